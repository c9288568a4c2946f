"""YAML that somebody else may have written.

Read in bounded time, and only what it says, never what it points to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from optrun.base.errors import UnreadableFileError
from optrun.base.plain import PlainMapping
from optrun.base.reading import read_text

_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # the C one is ten times faster, the content is the same
_DEPTH = 64
_REPEATED = 10_000
"""Values that aliases may repeat in all.

`&a [*b, *b]`, over and over, is a short text and a giant's configuration.
"""
_DIGITS = 1_000
ENVIRONMENT = "environment"
"""Of a run's configuration.

The dotted keys whose texts were given by environment variables, and are kept so.
"""
REFERENCE = re.compile(r"\$\{oc\.env:([^,${}]+)(?:,[^${}]*)?\}")
_INTEGER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]*")
"""Also hexadecimal and in sixties, for which Python sets no limit until it prints them."""


class UnboundedYamlError(ValueError):
    """A text that would take minutes to read, however short it is."""


def yaml_text(path: Path, *, follow: bool = False) -> str:
    """Read a YAML file, after a look at how much it is.

    Args:
        path: The file.
        follow: Whether it may be a link, as for `open_file`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no UTF-8, would take too long to read, or is no regular file.
    """
    text = read_text(path, follow=follow)
    refuse_unbounded(text)
    return text


def yaml_mapping(path: Path) -> dict[Any, Any]:
    """Read what a YAML file says.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no YAML mapping, or would take too long to read.
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


def refuse_unbounded(text: str) -> None:
    r"""Count what a text would become, without making it; what is no YAML is left to who reads it.

    Raises:
        UnboundedYamlError: It is nested too deeply, refers to itself, repeats too much, or holds a
            number that is too long.

    Example:
        >>> refuse_unbounded("a: &a [1, 2]\nb: *a")
        >>> refuse_unbounded("a: &a [*a]")
        Traceback (most recent call last):
        optrun.base.bounded_yaml.UnboundedYamlError: the alias *a stands inside of what it means
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    repeated = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            size = 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, 1))
                if len(open_nodes) > _DEPTH:
                    raise UnboundedYamlError(f"nested more than {_DEPTH} deep")
                if event.anchor:
                    sizes.pop(event.anchor, None)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_nodes.pop()
                sizes |= {anchor: size} if anchor else {}
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    if event.anchor not in [anchor for anchor, _ in open_nodes]:
                        return  # of nothing: no valid YAML
                    raise UnboundedYamlError(
                        f"the alias *{event.anchor} stands inside of what it means"
                    )
                size = sizes[event.anchor]
                repeated += size
            elif isinstance(event, yaml.ScalarEvent):
                sizes |= {event.anchor: 1} if event.anchor else {}
                number = event.implicit[0] or (event.tag or "").endswith(":int")
                if number and len(event.value) > _DIGITS and _INTEGER.fullmatch(event.value):
                    raise UnboundedYamlError(f"a number of more than {_DIGITS:,} digits")
            else:
                continue
            if repeated > _REPEATED:
                raise UnboundedYamlError(f"its aliases repeat more than {_REPEATED:,} values")
            anchor, held = open_nodes.pop()
            open_nodes.append((anchor, held + size))
    except yaml.YAMLError:
        return


def interpolations(values: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and texts of values that are not plain.

    `${...}` would be resolved, and might be a secret.

    Example:
        >>> list(interpolations({"data": {"train": ["a.txt", "${oc.env:HOME}"]}}))
        [('data.train.1', '${oc.env:HOME}')]
    """
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from interpolations(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, str) and "${" in values:
        yield key, values


def unresolved_key(config: PlainMapping) -> str | None:
    """Find the first dotted key that is neither plain nor recorded as a reference."""
    recorded = config.get(ENVIRONMENT) or ()
    found = ((key, REFERENCE.sub("", text)) for key, text in interpolations(dict(config)))
    return next((key for key, rest in found if key not in recorded or "${" in rest), None)
