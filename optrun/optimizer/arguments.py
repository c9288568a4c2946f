"""What a hyper-parameter may be: one checker each, whose message names the argument, the value and the range."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from optrun.base.errors import did_you_mean
from optrun.config.foreign_names import OPTIMIZERS, explained

Check: TypeAlias = Callable[[str, Any], Any]
"""`check(name, value)` returns the value in the type it is kept in, or raises TypeError / ValueError."""


def _number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        # torch takes a tensor so that a captured step may read another value; here a schedule or set_lr writes it.
        advice = f" Pass a plain number, {name}.item()." if hasattr(value, "item") else ""
        raise TypeError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}.{advice}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r}: expected {expected}.")
    return number


def finite(name: str, value: Any) -> float:
    """Check for any finite number."""
    return _number(name, value, "a finite number")


def not_negative(name: str, value: Any) -> float:
    """Check for a finite number of 0 or more."""
    number = _number(name, value, "a finite number >= 0")
    if number < 0:
        raise ValueError(f"{name}={value!r}: expected a finite number >= 0.")
    return number


def positive(name: str, value: Any) -> float:
    """Check for a finite number above 0."""
    number = _number(name, value, "a finite number > 0")
    if number <= 0:
        raise ValueError(f"{name}={value!r}: expected a finite number > 0.")
    return number


def optional_positive(name: str, value: Any) -> float | None:
    """Check for a finite number above 0, or None for "none"."""
    return None if value is None else positive(name, value)


def in_order(low: str, least: float, high: str, most: float | None) -> None:
    """Refuse a lower bound that is above the upper one.

    Raises:
        ValueError: With both.
    """
    if most is not None and least > most:
        raise ValueError(f"{low}={least!r}: expected at most {high}={most!r}.")


def fraction(name: str, value: Any) -> float:
    """Check for a number in [0, 1)."""
    number = _number(name, value, "a number in [0, 1)")
    if not 0 <= number < 1:
        raise ValueError(f"{name}={value!r}: expected a number in [0, 1).")
    return number


def optional_fraction(name: str, value: Any) -> float | None:
    """Check for a number in [0, 1), or None."""
    return None if value is None else fraction(name, value)


def betas(name: str, value: Any) -> tuple[float, float]:
    """Check for two numbers, each in [0, 1).

    Example:
        >>> betas("betas", [0.9])
        Traceback (most recent call last):
        ValueError: betas=[0.9]: expected two numbers, each in [0, 1).
    """
    first, second = _fractions(name, value, "two", 2)
    return first, second


def three_betas(name: str, value: Any) -> tuple[float, float, float]:
    """Check for three numbers, each in [0, 1)."""
    first, second, third = _fractions(name, value, "three", 3)
    return first, second, third


def _fractions(name: str, value: Any, word: str, count: int) -> list[float]:
    expected = f"{word} numbers, each in [0, 1)"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}.")
    if len(value) != count:
        raise ValueError(f"{name}={value!r}: expected {expected}.")
    found = [_number(name, entry, expected) for entry in value]
    if not all(0 <= beta < 1 for beta in found):
        raise ValueError(f"{name}={value!r}: expected {expected}.")
    return found


def flag(name: str, value: Any) -> bool:
    """Check for True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False, got {type(value).__name__}.")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """Check for True, False, or None for "you pick"."""
    return None if value is None else flag(name, value)


def whole_number(name: str, value: Any) -> int:
    """Check for a whole number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}: expected a whole number >= 0, got {type(value).__name__}.")
    if value < 0:
        raise ValueError(f"{name}={value!r}: expected a whole number >= 0.")
    return int(value)


def count(name: str, value: Any) -> int:
    """Check for a whole number of 1 or more."""
    number = whole_number(name, value)
    if number < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number >= 1.")
    return number


def optional_count(name: str, value: Any) -> int | None:
    """Check for a whole number of 0 or more, or None."""
    return None if value is None else whole_number(name, value)


def one_of(*words: str) -> Check:
    """Make a checker for one word out of a few.

    Example:
        >>> one_of("l1", "l2")("weight_decay_mode", "l3")
        Traceback (most recent call last):
        ValueError: weight_decay_mode='l3': expected one of 'l1', 'l2'.
    """
    listing = ", ".join(repr(word) for word in words)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}: expected one of {listing}, got {type(value).__name__}.")
        if value not in words:
            raise ValueError(f"{name}={value!r}: expected one of {listing}.")
        return value

    return check


def patterns(name: str, value: Any) -> list[str] | None:
    """Check for a list of regular expressions, or None; a bare string would be taken letter by letter."""
    if value is None:
        return None
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r}: expected a list of patterns, got one string. Write [{value!r}].")
    if not isinstance(value, Iterable) or isinstance(value, dict):
        raise TypeError(f"{name}={value!r}: expected a list of patterns or None, got {type(value).__name__}.")
    listed = list(value)
    for entry in listed:
        if not isinstance(entry, str):
            raise TypeError(f"{name}={listed!r}: expected patterns as strings, got {type(entry).__name__} {entry!r}.")
    return listed


def known_keys(keys: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Refuse a key that nothing reads.

    Args:
        keys: What was given.
        allowed: What is read.
        where: How the message begins, such as "Lamb" or "a parameter group of Lamb".

    Raises:
        TypeError: With the first unknown key and the nearest valid one.

    Example:
        >>> known_keys(["bettas"], ["lr", "betas"], "Lamb")
        Traceback (most recent call last):
        TypeError: Lamb has no option 'bettas'. Did you mean betas?
    """
    pool = sorted(allowed)
    for key in keys:
        if key not in pool:
            found = OPTIMIZERS.get(str(key))
            hint = explained(found).replace("optimizer.", "") if found else did_you_mean(str(key), pool)
            raise TypeError(f"{where} has no option {key!r}. {hint}")
