"""What the verbs share: positional words, `key=value` words and a few flags."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from optrun.errors import ConfigError, did_you_mean

SHORT = {"-cn": "--config-name", "-cd": "--config-dir"}
"""Options that a verb shares with Hydra, by their short names."""


@dataclass
class Words:
    """A verb's command line, taken apart."""

    positional: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str | None] = field(default_factory=dict)
    """Option by its long name, to its value; None where it takes none."""


def parse_arguments(
    verb: str, argv: list[str], usage: str, options: dict[str, bool] | None = None, keys: Collection[str] = ()
) -> Words | None:
    """Sort the words of a verb.

    Args:
        verb: Its name, for messages.
        argv: Words after it.
        usage: What `--help` prints.
        options: Option to whether it takes a value.
        keys: What the verb takes as `key=value` besides configuration keys.

    Returns:
        The words; None where `--help` was asked for and has been printed.

    Raises:
        ConfigError: An option the verb does not have, or one without its value.
    """
    known = {**(options or {}), "--help": False, "-h": False}
    words = Words()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            import sys

            sys.stdout.write(usage.strip() + "\n")
            return None
        if word.startswith("-"):
            name, joined, value = word.partition("=")
            name = SHORT.get(name, name)
            if name not in known:
                from optrun.config.keys import as_key

                hint = as_key(name, keys) or f" {did_you_mean(name, known)}"
                raise ConfigError(f"optrun {verb} {name}: no such option.{hint}")
            if name in words.flags:
                raise ConfigError(f"optrun {verb} {name} is given twice: which one is meant?")
            if known[name]:
                if not joined and not rest:
                    raise ConfigError(f"optrun {verb} {name}: a value is missing.")
                value = value if joined else rest.pop(0)
                if not value:
                    raise ConfigError(f"optrun {verb} {name}: a value is missing.")
                words.flags[name] = value
            elif joined:
                raise ConfigError(f"optrun {verb} {name}: takes no value.")
            else:
                words.flags[name] = None
        elif "=" in word and not _is_path(word):
            words.overrides.append(word)
        else:
            words.positional.append(word)
    return words


def _is_path(word: str) -> bool:
    """Whether a word with `=` in it is a path all the same, such as `outputs/lr=0.1/run`."""
    head = word.split("=", 1)[0]
    return "/" in head and not head.startswith("hydra/")
