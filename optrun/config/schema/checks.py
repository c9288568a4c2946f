"""Range checks shared by the configuration dataclasses: one wording for every refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optrun.base.errors import ConfigError

MOST = 2**31 - 1
"""A count above it was not meant: libraries hold counts in 32 bits, and no run has so many steps."""


def expect(condition: bool, key: str, value: Any, expected: str, hint: str = "") -> None:
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
        raise ConfigError(f"{key}={value}: expected {expected}." + (f" {hint}" if hint else ""))


def expect_positive(key: str, value: float | None) -> None:
    """Expect a number above 0; None passes."""
    expect(value is None or value > 0, key, value, "a number above 0")


def expect_count(key: str, value: int | None) -> None:
    """Expect a whole number of 1 or more, and one that somebody may have meant; None passes."""
    expect(value is None or value >= 1, key, value, "1 or more")
    expect(value is None or value <= MOST, key, value, f"{MOST:,} or less")


def expect_not_negative(key: str, value: float | None) -> None:
    """Expect a number of 0 or more; None passes."""
    expect(value is None or value >= 0, key, value, "0 or more")


def expect_fraction(key: str, value: float | None) -> None:
    """Expect a number in [0, 1); None passes."""
    expect(value is None or 0 <= value < 1, key, value, "a number in [0, 1)")


def expect_one_of(key: str, value: Any, choices: Sequence[str]) -> None:
    """Expect a word out of a list, with the list in the message."""
    expect(value in choices, key, value, f"one of {', '.join(choices)}")
