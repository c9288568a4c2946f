"""`optrun --help GROUP=CHOICE`, `GROUP` or `KEY`.

What can be set, from the schemas and the comments in conf/.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from optrun.base.errors import ConfigError, nearest
from optrun.config import reference
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.reference import CHOICES, Entry


def explain(hydra: Hydra, token: str) -> str:
    """Explain a group, a choice or a key.

    Args:
        hydra: Composes configurations, also from the user's folders.
        token: A group, a choice such as `optimizer=lamb`, or a key with or without a value.

    Raises:
        ConfigError: The choice or key is unknown.
    """
    key, _, value = token.lstrip("+~").partition("=")
    if key not in CHOICES:
        return _key(key)
    if not value:
        return _group(key)
    options = hydra.config_loader.get_group_options(key)
    if value in CHOICES[key]:
        return _choice(key, value)
    if value in options:
        return (
            f"{key}={value} is a file of your own: optrun {key}={value} --cfg job --package {key}"
            " shows its values."
        )
    raise no_such_choice(key, value, options)


def _group(group: str) -> str:
    """Explain a group: its meaning and its choices."""
    default, meaning = reference.defaults().get(group, ("", ""))
    lines = [f"{group}: {meaning}" if meaning else group]
    for choice in sorted(CHOICES[group]):
        mark = " (default)" if choice == default else ""
        lines += _columns(f"{group}={choice}{mark}", reference.head(group, choice))
    return "\n".join(
        [
            *lines,
            "",
            f"optrun --help {group}={default or sorted(CHOICES[group])[0]} shows its keys.",
        ]
    )


def _choice(group: str, choice: str) -> str:
    width = _width()
    description = textwrap.wrap(reference.head(group, choice), width)
    return "\n".join(
        [f"{group}={choice}", *description, "", *_table(reference.entries(group, choice))]
    )


def _key(key: str) -> str:
    """Explain a key once for each default and meaning, with the choices that have these.

    Raises:
        ConfigError: No choice has the key; the message names the nearest keys or all groups.
    """
    choices_by_entry: dict[Entry, list[str]] = {}
    every = [(entry, "") for entry in reference.top_level()]
    for group, choices in CHOICES.items():
        for choice in choices:
            every += [(entry, f"{group}={choice}") for entry in reference.entries(group, choice)]
    for entry, choice in every:
        if entry.key == key:
            choices_by_entry.setdefault(entry, []).append(choice)
    if not choices_by_entry:
        known_keys = dict.fromkeys([*CHOICES, *(entry.key for entry, _ in every)])
        near = [f"{group}={key}" for group in CHOICES if key in CHOICES[group]] or nearest(
            key, known_keys
        )
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Groups: {', '.join(CHOICES)}."
        raise ConfigError(f"--help {key}: no such key or group. {hint}")
    parts = []
    for entry, where in choices_by_entry.items():
        parts += [
            *_table([entry]),
            *(_columns("", f"with {', '.join(where)}") if any(where) else []),
        ]
    return "\n".join(parts)


def _table(entries: Iterable[Entry]) -> list[str]:
    lines: list[str] = []
    for entry in entries:
        meaning = f"{entry.meaning} ({entry.type.replace('`', '')})".strip()
        lines += _columns(f"{entry.key}={entry.default}", meaning)
    return lines or ["It has no keys."]


def _columns(name: str, meaning: str, gap: int = 44) -> list[str]:
    """Lay out a name beside its wrapped meaning.

    A long name has a line of its own.
    """
    lines = textwrap.wrap(meaning, _width() - gap, break_on_hyphens=False) or [""]
    head = f"  {name}"
    indented = [f"{'':{gap}}{line}" for line in lines]
    rows = [head, *indented]
    if len(name) <= gap - 4:
        rows = [f"{head:{gap}}{lines[0]}", *indented[1:]]
    return [row.rstrip() for row in rows if row.strip()]


def _width() -> int:
    return max(80, min(120, shutil.get_terminal_size((100, 24)).columns))
