"""Checks of the configuration: `Checked`, a dataclass that refuses values out of range."""

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
    """Raise ConfigError for the value of a key unless a condition holds.

    Args:
        condition: True if the value is valid.
        key: Dotted configuration key.
        value: What was given.
        expected: What is valid, as the end of "expected ...".
        hint: What to do, one sentence.
    """
    if not condition:
        raise ConfigError(f"{key}={in_yaml(value)}: expected {expected}. {hint}".rstrip())


def expecting(check: Check) -> Callable[[str, object], None]:
    """Make a function `refuse(key, value)` from a checker that raises TypeError or ValueError.

    The function raises ConfigError with the same message instead, and returns nothing.

    Example:
        >>> expecting(positive)("data.weight", -1)
        Traceback (most recent call last):
        optrun.base.errors.ConfigError: data.weight=-1: expected a number above 0.
    """

    def refuse(key: str, value: object) -> None:
        try:
            check(key, value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    return refuse


expect_count = expecting(optional(at_least(1)))
"""Expect a whole number from 1 to `ranges.MOST`; None passes."""
expect_not_negative = expecting(optional(not_negative))
"""Expect a number of 0 or more; None passes."""
expect_positive = expecting(positive)
"""Expect a number above 0."""


def build(schema: type[T], values: Mapping[str, object], key: str) -> T:
    """Build an instance of a schema from unchecked values, converted as on the command line.

    Args:
        schema: A dataclass.
        values: Field to value; the others keep their defaults.
        key: Put before the fields in messages, such as `data`.

    Raises:
        ConfigError: A value is missing, has another type or is out of range.
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
    except (TypeError, ValueError) as error:  # from the range checks of the schema
        message = str(error)
        if not message.startswith(f"{key}."):
            message = f"{key}: {message}"
        raise ConfigError(message) from error
    return built


def expect_pattern(key: str, pattern: object) -> None:
    """Refuse a pattern that is no text, is empty, or is no valid regular expression."""
    expect(isinstance(pattern, str) and bool(pattern), key, pattern, "a regular expression")
    try:
        re.compile(str(pattern))
    except re.error as error:
        raise ConfigError(f"{key}={pattern}: not a regular expression: {error}.") from error


@dataclass(kw_only=True)
class Checked:
    """Values of a group, each checked against the range in its type."""

    GROUP: ClassVar[str] = ""
    """Put before the keys in messages, with a dot."""
    BOUNDS: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of keys; the value of the first must not be above that of the second."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Keys that hold files or folders. If the run is resumed in another folder, relative paths
    still mean the same files."""

    def __post_init__(self) -> None:
        """Check every value against its range, and store it in the type of the range.

        Raises:
            ConfigError: The message names the key, the value and the range.
        """
        try:
            for key, check in ranges(type(self)).items():  # type: ignore[arg-type]
                setattr(self, key, check(f"{self.GROUP}{key}", getattr(self, key)))
            in_order(vars(self), self.BOUNDS, self.GROUP)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def expect(self, condition: bool, key: str, expected: str, hint: str = "") -> None:
        """Raise ConfigError for the value of a field unless a condition holds.

        Args:
            condition: True if the value is valid.
            key: Name of the field.
            expected: What is valid, as the end of "expected ...".
            hint: What to do, one sentence.
        """
        if not condition:  # only then every class must have the field
            expect(condition, f"{self.GROUP}{key}", getattr(self, key), expected, hint)
