"""Values of the wrong type: what OmegaConf says of them, for the person who typed them."""

from __future__ import annotations

import re

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNITS = {"%": 0.01, "k": 1000, "K": 1000, "m": 1_000_000, "M": 1_000_000, "": 1}
_MOST_VALUES = 20
"""That a range of whole numbers is written out to."""
_EXPECTED = {
    "could not be converted to Float": "a number",
    "could not be converted to Integer": "a whole number",
    "is not a valid bool": "true or false",
    "to string": "a text",
    "is not a ListConfig": "a list, such as [a,b]",
    "to Dict[": "a mapping, such as {key: value}",
    "not Optional": "a value, not null",
    "Incompatible value 'None'": "a value, not null",
}


def expected_type(refusal: Exception) -> str:
    """Describe what would have been right, as the end of "expected ...".

    Args:
        refusal: What OmegaConf raised.

    Example:
        >>> expected_type(ValueError("Value 'abc' of type 'str' could not be converted to Float"))
        'a number'
    """
    line = str(refusal).splitlines()[0].strip()
    for piece, expected in _EXPECTED.items():
        if piece in line:
            return expected
    if "expected one of" in line:
        return f"one of {line.rsplit('expected one of', 1)[1].strip(' []')}"
    return f"another type ({line})"


def in_yaml(value: object) -> object:
    """Write a value as in YAML and on the command line.

    Example:
        >>> in_yaml(None)
        'null'
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def number_meant(key: str, value: object, expected: str) -> str:
    """Suggest the words for what somebody gave in place of a number.

    Several of them, a range, a unit; may be empty.

    Example:
        >>> number_meant("lr", "1e-3..1e-2", "a number")
        ' A sweep tries several: -m lr=1e-3,1e-2'
        >>> number_meant("seed", "0-3", "a whole number")
        ' A sweep tries several: -m seed=0,1,2,3'
        >>> number_meant("scheduler.warmup_ratio", "10%", "a number")
        ' Did you mean scheduler.warmup_ratio=0.1?'
        >>> number_meant("seed", 1000.0, "a whole number")
        ' Did you mean seed=1000?'
    """
    several = [str(each) for each in value] if isinstance(value, list | tuple) else []
    if expected not in ("a number", "a whole number") or not all(
        re.fullmatch(_NUMBER, each) for each in several
    ):
        return ""
    if found := re.fullmatch(rf"({_NUMBER})(?:\.\.\.?|[-:~])({_NUMBER})", str(value)):
        several = [found[1], found[2]]
        if expected == "a whole number" and found[1].isdigit() and found[2].isdigit():
            ends = range(int(found[1]), int(found[2]) + 1)
            several = [str(each) for each in ends] if 1 < len(ends) <= _MOST_VALUES else several
    if several:
        return f" A sweep tries several: -m {key}={','.join(several)}"
    found = re.fullmatch(rf"({_NUMBER})([%kKmM]?)", str(value))
    if found is None:
        return ""
    meant = float(found[1]) * _UNITS[found[2]]
    fits = meant.is_integer() or expected == "a number"
    return f" Did you mean {key}={meant:.15g}?" if fits else ""
