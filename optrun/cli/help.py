"""`optrun --help GROUP=CHOICE`, `GROUP` or `KEY`: from the schemas and the comments in conf/."""

import shutil
import textwrap
from collections.abc import Iterable

from optrun.base.errors import ConfigError, nearest
from optrun.config import reference
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.paths import shipped
from optrun.config.reference import CHOICES, Entry

_SEARCH = """\
search: a sweep in which Optuna proposes the values, instead of every combination of them
  optrun -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'lr=tag(log, interval(1e-4, 1e-2))'
search.NAME.KEY=VALUES: values for one optimizer of a sweep alone, such as search.lamb.lr=1e-2,2e-2
optrun --help hydra/sweeper=optuna shows the keys of a search.
Page: {page}"""


def explain(hydra: Hydra, token: str) -> str:
    """Explain a group, a choice, a key, or the keys of a search.

    Args:
        hydra: Composes configurations, also from the user's folders.
        token: A group, a choice such as `optimizer=lamb`, or a key with or without a value.

    Raises:
        ConfigError: The choice or key is unknown.
    """
    key, _, value = token.lstrip("+~").partition("=")
    if key.partition(".")[0] == "search":
        return _SEARCH.format(page=shipped("docs", "sweeps.md") / "sweeps.md")
    if key not in CHOICES:
        return _explain_key(key)
    if not value:
        return _explain_group(key)
    options = hydra.config_loader.get_group_options(key)
    if value in CHOICES[key]:
        return _explain_choice(key, value)
    if value in options:
        return (
            f"{key}={value} is a file of your own: optrun {key}={value} --cfg job --package {key}"
            " shows its values."
        )
    raise no_such_choice(key, value, options)


def _explain_group(group: str) -> str:
    """Explain a group: its meaning and its choices."""
    default, meaning = reference.defaults().get(group, ("", ""))
    lines = [f"{group}: {meaning}" if meaning else group]
    choices = sorted(CHOICES[group])
    for choice in choices:
        mark = " (default)" if choice == default else ""
        lines += _columns(f"{group}={choice}{mark}", reference.head(group, choice))
    lines += ["", f"optrun --help {group}={default or choices[0]} shows its keys."]
    return "\n".join(lines)


def _explain_choice(group: str, choice: str) -> str:
    """Explain a choice: its meaning and its keys."""
    description = textwrap.wrap(reference.head(group, choice), _width())
    keys = _key_lines(reference.entries(group, choice)) or ["It has no keys."]
    return "\n".join([f"{group}={choice}", *description, "", *keys])


def _explain_key(key: str) -> str:
    """Explain a key: one entry for each default and meaning, with the choices that share these.

    Raises:
        ConfigError: No choice has the key; the message names the nearest keys, or all groups.
    """
    # 1. All entries of the reference; a key of the top level has no choices.
    choices_by_entry: dict[Entry, list[str]] = {}
    for entry in reference.top_level():
        choices_by_entry[entry] = []
    for group, choices in CHOICES.items():
        for choice in choices:
            for entry in reference.entries(group, choice):
                choices_by_entry.setdefault(entry, []).append(f"{group}={choice}")
    # 2. Those of the key.
    lines: list[str] = []
    for entry, choices_with_entry in choices_by_entry.items():
        if entry.key == key:
            lines += _key_lines([entry])
            if choices_with_entry:
                lines += _columns("", f"with {', '.join(choices_with_entry)}")
    if lines:
        return "\n".join(lines)
    # 3. None: suggest the choice of this name, or the nearest keys and groups.
    close = [f"{group}={key}" for group in CHOICES if key in CHOICES[group]]
    if not close:
        known_keys = [*CHOICES, *(entry.key for entry in choices_by_entry)]
        close = nearest(key, dict.fromkeys(known_keys))
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Groups: {', '.join(CHOICES)}."
    raise ConfigError(f"--help {key}: no such key or group. {hint}")


def _key_lines(entries: Iterable[Entry]) -> list[str]:
    """Write keys with their defaults, meanings and types, in two columns."""
    lines: list[str] = []
    for entry in entries:
        meaning = f"{entry.meaning} ({entry.type.replace('`', '')})".strip()
        lines += _columns(f"{entry.key}={entry.default}", meaning)
    return lines


def _columns(name: str, meaning: str, indent: int = 44) -> list[str]:
    """Lay out a name beside its wrapped meaning, without empty lines.

    A name longer than `indent` minus 4 has a line of its own.

    Example:
        >>> _columns("lr=0.1", "Peak.", 10), _columns("seed=0", "", 10)
        (['  lr=0.1  Peak.'], ['  seed=0'])
        >>> _columns("optimizer=lamb", "Peak.", 10)
        ['  optimizer=lamb', '          Peak.']
    """
    lines = textwrap.wrap(meaning, _width() - indent, break_on_hyphens=False)
    if len(name) <= indent - 4:
        first = lines.pop(0) if lines else ""
        rows = [f"  {name}".ljust(indent) + first]
    else:
        rows = [f"  {name}"]
    rows += [" " * indent + line for line in lines]
    return [row.rstrip() for row in rows if row.strip()]


def _width() -> int:
    return max(80, min(120, shutil.get_terminal_size((100, 24)).columns))
