"""Checks of the configuration.

A dataclass that refuses values out of range, and the refusal of a value by its key.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.errors import ConfigError
from optrun.config.schema.ranges import (
    Check,
    at_least,
    in_order,
    not_negative,
    optional,
    positive,
    ranges,
)
from optrun.config.types import expected_type, in_yaml

T = TypeVar("T")


def expect(condition: bool, key: str, value: object, expected: str, hint: str = "") -> None:
    """Refuse a value by name.

    Args:
        condition: True where the value is right.
        key: Dotted configuration key.
        value: What was given.
        expected: What would have been right, as the end of "expected ...".
        hint: What to do, one sentence.

    Raises:
        ConfigError: Where `condition` is false.
    """
    if not condition:
        raise ConfigError(
            f"{key}={in_yaml(value)}: expected {expected}." + (f" {hint}" if hint else "")
        )


def expecting(check: Check) -> Callable[[str, object], None]:
    """Turn a check into a function with ConfigError in place of TypeError and ValueError."""

    def refuse(key: str, value: object) -> None:
        try:
            check(key, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    return refuse


expect_count = expecting(optional(at_least(1)))
"""Expect a whole number of 1 or more, and one that somebody may have meant; None passes."""
expect_not_negative = expecting(optional(not_negative))
"""Expect a number of 0 or more; None passes."""
expect_positive = expecting(positive)
"""Expect a number above 0."""


def build(schema: type[T], values: Mapping[str, object], key: str) -> T:
    """Build an instance of a schema from unchecked values.

    Args:
        schema: A dataclass.
        values: Of its fields.
        key: What stands before them, for messages.

    Raises:
        ConfigError: A value of another type or out of range, or one that is missing.
    """
    typed = OmegaConf.structured(schema)
    for option, value in values.items():
        try:
            typed[option] = value
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{key}.{option}={in_yaml(value)}: expected {expected_type(error)}."
            ) from error
    missing = sorted(OmegaConf.missing_keys(typed))
    if missing:
        raise ConfigError(f"{key}.{missing[0]} is missing: give {key}.{missing[0]}=VALUE.")
    try:
        built: T = OmegaConf.to_object(typed)  # type: ignore[assignment]
    except (TypeError, ValueError) as error:  # of the schema's own check of ranges
        message = str(error)
        raise ConfigError(
            message if message.startswith(f"{key}.") else f"{key}: {message}"
        ) from error
    return built


def expect_pattern(key: str, pattern: object) -> None:
    """Refuse invalid regular expressions."""
    expect(isinstance(pattern, str) and bool(pattern), key, pattern, "a regular expression")
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ConfigError(f"{key}={pattern}: not a regular expression: {error}.") from error


@dataclass(kw_only=True)
class Checked:
    """Values of a group, each checked against the range in its type."""

    GROUP: ClassVar[str] = ""
    """What stands before the keys, with a dot."""
    BOUNDS: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys of which the first is not above the second."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Keys that hold files or folders: relative ones are found again when the run goes on from
    another folder."""

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: With the key, the value and the range.
        """
        try:
            for key, check in ranges(type(self)).items():  # type: ignore[arg-type]
                setattr(self, key, check(f"{self.GROUP}{key}", getattr(self, key)))
            in_order(vars(self), self.BOUNDS, self.GROUP)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def expect(self, good: bool, key: str, expected: str, hint: str = "") -> None:
        """Refuse the value of a key of this group by name.

        Args:
            good: True where the value is right.
            key: Of a field.
            expected: What would have been right, as the end of "expected ...".
            hint: What to do, one sentence.

        Raises:
            ConfigError: Where `good` is false.
        """
        if not good:
            expect(good, f"{self.GROUP}{key}", getattr(self, key), expected, hint)
