"""Types with a range, and the wording of their refusals.

A field says its range in its type, `eps: NotNegative = 1e-8`. The dataclass checks itself by it,
and so does the class that takes the option as a keyword.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from optrun.config.types import in_yaml

Check: TypeAlias = Callable[[str, Any], Any]
"""`check(name, value)` returns the value in the type it is kept in, or raises TypeError /
ValueError.
"""

MOST = 2**31 - 1
"""A count above it was not meant: libraries hold counts in 32 bits, and no run has so many steps.
"""


def _refused(name: str, value: object, expected: str, *, kind: bool = False) -> Exception:
    """Make the refusal of a value: of another kind, or out of range.

    A dotted name is a key of the configuration, whose value is written as there; another one is a
    keyword of Python's.
    """
    assignment = f"{name}={in_yaml(value)}" if "." in name else f"{name}={value!r}"
    if kind:
        return TypeError(f"{assignment}: expected {expected}, got {type(value).__name__}.")
    return ValueError(f"{assignment}: expected {expected}.")


def number(
    expected: str, fits: Callable[[Any], bool] = lambda _: True, *, whole: bool = False
) -> Check:
    """Make a checker for a finite number.

    Args:
        expected: What is right, for the message.
        fits: Whether a finite number is.
        whole: Whether it is a whole one.

    Example:
        >>> number("a number above 0", lambda x: x > 0)("lr", 0.0)
        Traceback (most recent call last):
        ValueError: lr=0.0: expected a number above 0.
    """
    kinds: Any = Integral if whole else Real

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, kinds):
            error = _refused(name, value, expected, kind=True)
            # torch takes a tensor so that a captured step may read another value; here a schedule
            # or set_lr writes it.
            raise (
                TypeError(f"{error} Pass a plain number, {name}.item().")
                if hasattr(value, "item")
                else error
            )
        plain: float = int(value) if whole else float(value)
        if not whole and not math.isfinite(plain):
            raise _refused(name, value, re.sub("^a number", "a finite number", expected))
        if not fits(plain):
            raise _refused(name, value, expected)
        return plain

    return check


whole_number = partial(number, whole=True)
finite = number("a finite number")
not_negative = number("a number of 0 or more", lambda x: x >= 0)
positive = number("a number above 0", lambda x: x > 0)
fraction = number("a number in [0, 1)", lambda x: 0 <= x < 1)
share = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
inner_share = number("a number in (0, 1)", lambda x: 0 < x < 1)


def seconds(name: str, value: float) -> float:
    """Check for a time above 0; `inf` stands for one without end."""
    if value == math.inf:
        return value
    return float(positive(name, value))


def at_least(least: int, why: str = "") -> Check:
    """Make a checker for a whole number from `least` to `MOST`."""
    low = whole_number(f"a whole number, {least} or more{why}", lambda x: x >= least)
    high = whole_number(f"{MOST:,} or less", lambda x: x <= MOST)
    return lambda name, value: high(name, low(name, value))


def rising(least: int) -> Check:
    """Make a checker for a list of steps, each above the one before."""

    def check(name: str, value: list[int]) -> list[int]:
        if not all(low < high for low, high in itertools.pairwise([least - 1, *value])):
            raise _refused(name, value, f"rising steps of {least} or more")
        return value

    return check


def matching(pattern: str, expected: str) -> Check:
    """Make a checker for a full match of a regular expression."""

    def check(name: str, value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise _refused(name, value, expected)
        return value

    return check


def several(expected: str, *checks: Check) -> Check:
    """Make a checker for a sequence of as many values as there are checkers.

    It returns a tuple. A text is refused, not read letter by letter; an item of the wrong type
    raises TypeError, any other fault ValueError.
    """

    def check(name: str, value: object) -> tuple[object, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _refused(name, value, expected, kind=True)
        if len(value) != len(checks):
            raise _refused(name, value, expected)
        try:
            return tuple(
                entry_check(name, entry) for entry_check, entry in zip(checks, value, strict=True)
            )
        except (TypeError, ValueError) as error:
            raise type(error)(str(_refused(name, value, expected))) from error

    return check


def one_of(*words: str) -> Check:
    """Make a checker for one word out of a few.

    Example:
        >>> one_of("l1", "l2")("weight_decay_mode", "l3")
        Traceback (most recent call last):
        ValueError: weight_decay_mode='l3': expected one of 'l1', 'l2'.
    """

    def check(name: str, value: object) -> str:
        if value in words:
            return str(value)
        choices = ", ".join(words if "." in name else map(repr, words))
        raise _refused(name, value, f"one of {choices}", kind=not isinstance(value, str))

    return check


def flag(name: str, value: object) -> bool:
    """Check for exactly True or False."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False", kind=True)
    return value


def check_patterns(name: str, value: object) -> list[str]:
    """Check for a list of regular expressions; a bare string would be taken letter by letter."""
    if isinstance(value, str):
        raise TypeError(
            f"{name}={value!r}: expected a list of patterns, got one string. Write [{value!r}]."
        )
    if not isinstance(value, Iterable) or isinstance(value, dict):
        raise _refused(name, value, "a list of patterns", kind=True)
    entries = list(value)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(
                f"{name}={entries!r}: expected patterns as strings, got {type(entry).__name__}"
                f" {entry!r}."
            )
    return entries


def optional(check: Check, said: str = "") -> Check:
    """Let None pass a check, too, and add that to its message."""

    def checked(name: str, value: object) -> Any:
        try:
            if value is None:
                return None
            return check(name, value)
        except ValueError as error:
            raise ValueError(f"{str(error).removesuffix('.')}{said}.") from error

    return checked


Finite = Annotated[float, finite]
NotNegative = Annotated[float, not_negative]
Positive = Annotated[float, positive]
Fraction = Annotated[float, fraction]
Seconds = Annotated[float, seconds]
Share = Annotated[float, share]
InnerShare = Annotated[float, inner_share]
WholeNumber = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Steps = Annotated[list[int], rising(0)]
Betas = Annotated[tuple[float, float], several("two numbers, each in [0, 1)", fraction, fraction)]
ThreeBetas = Annotated[
    tuple[float, float, float],
    several("three numbers, each in [0, 1)", fraction, fraction, fraction),
]
Patterns = Annotated[list[str], check_patterns]


def in_order(
    options: Mapping[str, Any], bounds: Iterable[tuple[str, str]], prefix: str = ""
) -> None:
    """Refuse a lower bound above the upper one; an upper bound of None passes.

    Args:
        options: Option -> value.
        bounds: Pairs of options, the lower one first.
        prefix: What stands before an option in messages, such as `scheduler.`.

    Raises:
        ValueError: The message names both options with their values.
    """
    for low, high in bounds:
        least = options[low]
        most = options[high]
        if most is not None and least > most:
            raise ValueError(f"{prefix}{low}={least!r}: expected at most {prefix}{high}={most!r}.")


@cache
def ranges(schema: type) -> Mapping[str, Check]:
    """Map the fields of a dataclass to the checkers in their types.

    A class that says a field again without a range leaves that of its base. Flags and Enums, whose
    values are words to a caller from Python, are in `checks`.
    """
    checkers: dict[str, Check] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            hints = get_type_hints(base, include_extras=True)
            checkers |= {key: check for key, hint in hints.items() if (check := _of_hint(hint))}
    return checkers


def _of_hint(hint: object) -> Check | None:
    """Return the checker in a type, such as `Annotated[float, positive]`; None without one."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in get_args(hint)[1:] if callable(extra)), None)
    inner = [argument for argument in get_args(hint) if argument is not NoneType]
    check = _of_hint(inner[0]) if len(inner) == 1 and NoneType in get_args(hint) else None
    if check:
        return optional(check, ", or null")
    return None


def checks(schema: type) -> dict[str, Check]:
    """Map fields to checkers, as `ranges`, with flags and Enums for callers from Python."""
    checkers: dict[str, Check] = {}
    for key, hint in get_type_hints(schema).items():
        kinds = [argument for argument in get_args(hint) or (hint,) if argument is not NoneType]
        if kinds == [bool]:
            checkers[key] = optional(flag) if NoneType in get_args(hint) else flag
        elif isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
            checkers[key] = one_of(*(member.value for member in kinds[0]))
    return {**checkers, **ranges(schema)}


def defaults(schema: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, words for Enums.

    Without fields that have none.
    """
    values = {
        field.name: field.default for field in fields(schema) if not callable(field.default_factory)
    }
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
