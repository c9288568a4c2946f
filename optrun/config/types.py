"""OmegaConf's errors on values of the wrong type, in plain words."""

from optrun.base.errors import first_line

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
    """Describe the expected type, as the end of "expected ...".

    Args:
        refusal: What OmegaConf raised. A message that is not known is quoted.

    Example:
        >>> expected_type(ValueError("Value 'abc' of type 'str' could not be converted to Float"))
        'a number'
        >>> expected_type(ValueError("Cannot merge."))
        'another type (Cannot merge)'
    """
    line = first_line(refusal) or type(refusal).__name__
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
    if isinstance(value, bool):
        return str(value).lower()
    return value
