"""YAML from untrusted files, read within bounds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from optrun.base.errors import UnreadableFileError
from optrun.base.reading import read_text

_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # the C one is ten times faster, the content is the same
_MAX_DEPTH = 64
_MAX_VALUES = 50_000
"""Most values of a file, with every alias expanded: repeated `&a [*b, *b]` doubles them each time.
"""


class UnboundedYamlError(ValueError):
    """A YAML text with too many values or too deep a nesting."""


def yaml_text(path: Path, *, follow: bool = False) -> str:
    """Read the text of a YAML file, and refuse one that is nested too deeply or expands too far.

    Args:
        path: The file.
        follow: Whether it may be a link, as for `open_file`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no UTF-8, is unbounded, or is no regular file.
    """
    text = read_text(path, follow=follow)
    _refuse_unbounded(text)
    return text


def yaml_mapping(path: Path) -> dict[Any, Any]:
    """Read the mapping of a YAML file, which may be no link.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no YAML mapping, or is unbounded; an unbounded one is an
            `UnreadableFileError`.
    """
    try:
        values = yaml.load(yaml_text(path), Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no valid YAML ({type(error).__name__})") from error
    except UnboundedYamlError as error:
        raise UnreadableFileError(f"{path}: {error}: not read.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a YAML mapping, found {type(values).__name__}")
    return values


def _refuse_unbounded(text: str) -> None:
    """Refuse more than 64 levels of nesting, and more than 50,000 values with aliases expanded.

    Each scalar, list and mapping is a value, and each key. `[*x, *x]` behind `&x [1, 2]` has seven
    values: itself, and twice a list with its two items. PyYAML's C loader crashes on deep nesting.
    Invalid YAML passes; the later parse refuses it.

    Raises:
        UnboundedYamlError: With the bound; or an alias stands inside of what it names.
    """
    # The collections that are open at an event, from the outermost one: their anchors, and behind
    # the count of the document the values counted in each so far.
    open_anchors: list[str | None] = []
    open_counts = [0]
    counts: dict[str, int] = {}  # the values of each closed collection with an anchor
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            # `[` and `{`: a collection opens, and is a value itself.
            if isinstance(event, yaml.CollectionStartEvent):
                open_anchors.append(event.anchor)
                open_counts.append(1)
            # `]` and `}`: its values count in the one around it.
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor = open_anchors.pop()
                count = open_counts.pop()
                open_counts[-1] += count
                if anchor is not None:
                    counts[anchor] = count
            # `*x`: all values of `&x`, which is a scalar if no collection has this anchor.
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor in open_anchors:
                    raise UnboundedYamlError(f"the alias *{event.anchor} contains itself")
                open_counts[-1] += counts.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                open_counts[-1] += 1
            _refuse_beyond_bounds(len(open_anchors), open_counts[-1])
    except yaml.YAMLError:
        return


def _refuse_beyond_bounds(depth: int, values: int) -> None:
    if depth > _MAX_DEPTH:
        raise UnboundedYamlError(f"nested more than {_MAX_DEPTH} deep")
    if values > _MAX_VALUES:
        raise UnboundedYamlError(
            f"its aliases make more than {_MAX_VALUES:,} values of a short text"
        )


def interpolations(values: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys and texts of interpolations, `${...}`.

    Example:
        >>> list(interpolations({"data": {"train": ["a.txt", "${oc.env:HOME}"]}}))
        [('data.train.1', '${oc.env:HOME}')]
    """
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from interpolations(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and "${" in values:
        yield key, values
