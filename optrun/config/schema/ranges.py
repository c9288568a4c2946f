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
    """Build the error for a value: ValueError for its range, TypeError for its type.

    Args:
        name: A dotted key, whose value is written as in YAML, or a keyword of Python's.
        value: What was given.
        expected: What is valid, as the end of "expected ...".
        kind: Whether the type is wrong.
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
        expected: What is valid, for the message; it begins with "a number" unless `whole`.
        fits: Tells whether a finite number is valid.
        whole: Whether only whole numbers are valid.

    Example:
        >>> number("a number above 0", lambda x: x > 0)("lr", 0.0)
        Traceback (most recent call last):
        ValueError: lr=0.0: expected a number above 0.
    """
    kinds: Any = Integral if whole else Real

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, kinds):
            error = _refused(name, value, expected, kind=True)
            is_tensor = hasattr(value, "item")
            # torch takes a tensor as lr so that a captured step reads new values from it; here a
            # schedule or set_lr writes the lr.
            if is_tensor:
                error = TypeError(f"{error} Pass a plain number, {name}.item().")
            raise error
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
    """Check for a time above 0; `inf` is valid, and means no limit."""
    if value == math.inf:
        return value
    return float(positive(name, value))


def at_least(least: int, why: str = "") -> Check:
    """Make a checker for a whole number from `least` to `MOST`, which is 2**31 - 1.

    Args:
        least: The smallest valid number.
        why: Added to the message after `N or more`.

    Example:
        >>> at_least(2, ", for a warm-up")("steps", 1)
        Traceback (most recent call last):
        ValueError: steps=1: expected a whole number, 2 or more, for a warm-up.
    """
    low = whole_number(f"a whole number, {least} or more{why}", lambda x: x >= least)
    high = whole_number(f"{MOST:,} or less", lambda x: x <= MOST)
    return lambda name, value: high(name, low(name, value))


def rising(name: str, value: list[int]) -> list[int]:
    """Check a list of steps from 0, each above the one before.

    Example:
        >>> rising("milestones", [10, 20])
        [10, 20]
        >>> rising("milestones", [10, 10])
        Traceback (most recent call last):
        ValueError: milestones=[10, 10]: expected rising steps of 0 or more.
    """
    if not all(low < high for low, high in itertools.pairwise([-1, *value])):
        raise _refused(name, value, "rising steps of 0 or more")
    return value


def matching(pattern: str, expected: str) -> Check:
    """Make a checker for a text that a regular expression matches from begin to end.

    Example:
        >>> matching("gpt|bert", "gpt or bert")("model", "gpt2")
        Traceback (most recent call last):
        ValueError: model='gpt2': expected gpt or bert.
    """

    def check(name: str, value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise _refused(name, value, expected)
        return value

    return check


def several(expected: str, *checks: Check) -> Check:
    """Make a checker for a sequence with one checker for each of its values.

    It returns a tuple. A text is refused, not read letter by letter. A value of the wrong type
    raises TypeError, any other fault ValueError; the message always shows the whole sequence.

    Example:
        >>> two_shares = several("two numbers from 0 to 1", share, share)
        >>> two_shares("betas", [0.5, 1])
        (0.5, 1.0)
        >>> two_shares("betas", [0.5, 7])
        Traceback (most recent call last):
        ValueError: betas=[0.5, 7]: expected two numbers from 0 to 1.
    """

    def check(name: str, value: object) -> tuple[object, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _refused(name, value, expected, kind=True)
        if len(value) != len(checks):
            raise _refused(name, value, expected)
        try:
            return tuple(
                check_item(name, item) for check_item, item in zip(checks, value, strict=True)
            )
        except (TypeError, ValueError) as error:
            raise type(error)(str(_refused(name, value, expected))) from error

    return check


def one_of(*words: str) -> Check:
    """Make a checker for one of a few words.

    Example:
        >>> one_of("l1", "l2")("weight_decay_mode", "l3")
        Traceback (most recent call last):
        ValueError: weight_decay_mode='l3': expected one of 'l1', 'l2'.
    """

    def check(name: str, value: object) -> str:
        if value in words:
            return str(value)
        is_key = "." in name  # else a keyword of Python's, whose texts are quoted
        choices = ", ".join(words if is_key else map(repr, words))
        raise _refused(name, value, f"one of {choices}", kind=not isinstance(value, str))

    return check


def flag(name: str, value: object) -> bool:
    """Check for exactly True or False."""
    if not isinstance(value, bool):
        raise _refused(name, value, "True or False", kind=True)
    return value


def check_patterns(name: str, value: object) -> list[str]:
    """Check for a list of strings; return them as a list, and compile none of them.

    They are meant as regular expressions.

    Raises:
        TypeError: The value is one string, which would be read letter by letter; it is no list; or
            an item is no string.
    """
    if isinstance(value, str):
        raise TypeError(
            f"{name}={value!r}: expected a list of patterns, got one string. Write [{value!r}]."
        )
    if not isinstance(value, Iterable) or isinstance(value, dict):
        raise _refused(name, value, "a list of patterns", kind=True)
    patterns = list(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{name}={patterns!r}: expected patterns as strings, got {type(pattern).__name__}"
                f" {pattern!r}."
            )
    return patterns


def optional(check: Check, also_valid: str = "") -> Check:
    """Make a checker for None or a value of `check`.

    also_valid: Added to the messages of ValueError, such as ", or null".

    Example:
        >>> optional(positive, ", or null")("lr", -1)
        Traceback (most recent call last):
        ValueError: lr=-1: expected a number above 0, or null.
    """

    def check_optional(name: str, value: object) -> Any:
        if value is None:
            return None
        try:
            return check(name, value)
        except ValueError as error:
            raise ValueError(f"{str(error).removesuffix('.')}{also_valid}.") from error

    return check_optional


Finite = Annotated[float, finite]
NotNegative = Annotated[float, not_negative]
Positive = Annotated[float, positive]
Fraction = Annotated[float, fraction]
Seconds = Annotated[float, seconds]
Share = Annotated[float, share]
InnerShare = Annotated[float, inner_share]
WholeNumber = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Steps = Annotated[list[int], rising]
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
        prefix: Put before an option in messages, such as `scheduler.`.

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

    A field `eps: Annotated[float, not_negative]` gives `{"eps": not_negative}`.
    A subclass that declares a field again without a checker keeps that of the base class. Flags and
    Enums have none here; `checks` adds them for callers from Python.
    """
    checkers: dict[str, Check] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            for key, hint in get_type_hints(base, include_extras=True).items():
                check = _checker_of(hint)
                if check is not None:
                    checkers[key] = check
    return checkers


def _checker_of(hint: object) -> Check | None:
    """Return the checker in a type, such as `Annotated[float, positive]`; None without one.

    For `Annotated[...] | None` it lets None pass. A union of more types has none.
    """
    if get_origin(hint) is Annotated:
        _, *metadata = get_args(hint)
        return next((extra for extra in metadata if callable(extra)), None)
    members = list(get_args(hint))
    if len(members) == 2 and NoneType in members:
        members.remove(NoneType)
        check = _checker_of(members[0])
        if check is not None:
            return optional(check, ", or null")
    return None


def checks(schema: type) -> dict[str, Check]:
    """Map fields to checkers for callers from Python: `ranges`, and checkers of flags and Enums.

    A field of type bool, or bool or None, takes a flag; one of an Enum takes the value of a member.
    OmegaConf checks both for values from YAML. Other fields have the checker in their type, if any.
    """
    checkers: dict[str, Check] = {}
    for key, hint in get_type_hints(schema).items():
        members = get_args(hint) or (hint,)  # of a union its types, else the type itself
        kinds = [member for member in members if member is not NoneType]
        kind = kinds[0]
        if kinds == [bool]:
            checkers[key] = optional(flag) if NoneType in members else flag
        elif isinstance(kind, type) and issubclass(kind, Enum):
            checkers[key] = one_of(*(member.value for member in kind))
    return {**checkers, **ranges(schema)}


def defaults(schema: type) -> dict[str, Any]:
    """Map the fields of a dataclass to their defaults, an Enum's as its value.

    Fields with a default factory are left out; fields without a default are `MISSING`.
    """
    values = {}
    for field in fields(schema):
        if not callable(field.default_factory):
            is_enum = isinstance(field.default, Enum)
            values[field.name] = field.default.value if is_enum else field.default
    return values
