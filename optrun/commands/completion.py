"""What the TAB key offers: verbs, options, recipes, choices, keys, values and paths; never an error in a prompt.

Hydra installs the shell's function, which asks with the line so far in `COMP_LINE`. Hydra's own answers know nothing of
verbs, and read every word as `key=value`. Only keys are asked of Hydra here: importing it takes longer than the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from optrun.config.original_cwd import PATHS
from optrun.config.paths import config_dir, recipes_dir
from optrun.errors import EXIT_DONE

_SAFE = re.compile(r"[\w./=+,@%~:-]+")
"""What is offered: bash splits candidates at blanks and expands them, so that a file's name could be a command."""
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_FILES = (*PATHS, "out", *_FOLDERS)
_OF_OPTIONS = {"-c": "--cfg", "-i": "--info", "-p": "--package", "-cn": "--config-name", "-cd": "--config-dir"}
OPTION = "--plugin"
_VALUES = {
    "--cfg": ["job", "hydra", "all"],
    "--info": ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    "-sc": ["install=bash", "install=fish", "uninstall=bash", "uninstall=fish"],
}
_TRAIN = "optrun train [KEY=VALUE ...] -m -cn --config-dir --cfg --resolve --package --info --help --hydra-help -sc"


def run(argv: list[str]) -> int:
    """Answer the shell.

    Args:
        argv: `query=SHELL`; the line stands in `COMP_LINE`, the cursor in `COMP_POINT`.

    Returns:
        0, whatever happens: what goes wrong here is of no use to somebody who is typing.
    """
    found: list[str] = []
    with (
        contextlib.suppress(Exception, KeyboardInterrupt, SystemExit),
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # noqa: PTH123 - no file
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        line = os.environ["COMP_LINE"]
        point = os.environ.get("COMP_POINT", "")
        found = candidates(line[: int(point)] if point.isdecimal() else line)
    sys.stdout.write(("\n" if argv[-1:] == ["query=fish"] else " ").join(found) + "\n")
    return EXIT_DONE


def candidates(line: str) -> list[str]:
    """What the last word of a line may become.

    Args:
        line: The command so far, the program's name first; a blank at its end begins a new word.
    """
    words = line.split()
    current = "" if line[-1:].isspace() or not words else words.pop()
    if OPTION in words[:-1]:
        from optrun import plugins

        plugins.take(words)
    program = next((index for index, word in enumerate(words) if Path(word).name == "optrun"), 0)
    found = _next_word(words[program + 1 :], current)
    return sorted({word for word in found if word.startswith(current) and _SAFE.fullmatch(word)})


def _next_word(before: list[str], current: str) -> Iterable[str]:
    from optrun.commands.verbs import VERBS

    verb = before[0] if before and before[0] in VERBS else None
    takes = _usage(_TRAIN if verb is None else importlib.import_module(VERBS[verb]).USAGE)
    option, joined, _ = current.partition("=")
    if current.startswith("-") and joined:
        return [f"{option}={value}" for value in _of_option(option, before, current[len(option) + 1 :])]
    last = _OF_OPTIONS.get(before[-1], before[-1]) if before else ""
    if last in {*_OF_OPTIONS.values(), *_VALUES} or takes.values.get(last) == "FILE":
        return _of_option(last, before, current)
    if last in takes.values:
        return []
    if current.startswith("-"):
        return takes.options
    if joined and not _is_path(option):
        return [f"{option}={value}" for value in _of_key(option.lstrip("+~"), before, current[len(option) + 1 :])]
    found = [*takes.words, *(_keys(before, current) if takes.keys else [])]
    if takes.folders:
        found += _paths(current, folders=True)
    return found if verb is not None or before else [*found, *VERBS]


def _is_path(text: str) -> bool:
    return "/" in text and not text.lstrip("+~").startswith("hydra/")


class _Usage:
    """What a verb takes, by the first line of its help.

    Example:
        >>> _usage("optrun explain [-cn RECIPE] [KEY=VALUE ...] [--all]").options
        ['-cn', '--all', '--plugin', '--help']
    """

    def __init__(self, pieces: list[str]) -> None:
        self.options = [piece for piece in pieces if piece.startswith("-")]
        after = zip(pieces, [*pieces[1:], ""], strict=True)
        self.values = {piece: value for piece, value in after if piece.startswith("-") and value.isupper()}
        self.keys = "KEY=VALUE" in pieces
        self.folders = any(re.search(r"DIR|CHECKPOINT|DEST", piece) and "=" not in piece for piece in pieces)
        self.words = [re.sub(r"=.*", "=", piece) for piece in pieces if piece[0].islower()]


def _usage(text: str) -> _Usage:
    pieces = re.findall(r"[^\s\[\]]+", text.strip().splitlines()[0])[2:]
    return _Usage([*pieces, OPTION, "FILE", *([] if "--help" in pieces else ["--help"])])


def _of_option(option: str, before: list[str], value: str) -> Iterable[str]:
    if option == "--config-name":
        own = _given(before, "--config-dir")
        folders = [recipes_dir(), config_dir(), *([Path(own)] if own else [])]
        return [path.stem for folder in folders for path in folder.glob("*.yaml")]
    if option == "--package":
        return [key.rstrip(".") for key in _keys(before, value) if key.endswith(".")]
    return _VALUES.get(option) or _paths(value, folders=option == "--config-dir")


def _given(before: list[str], option: str) -> str | None:
    """The value of an option on the line."""
    for index, word in enumerate(before):
        name, joined, value = word.partition("=")
        if _OF_OPTIONS.get(name, name) == option:
            return value if joined else next(iter(before[index + 1 :]), None)
    return None


def _paths(text: str, *, folders: bool = False) -> list[str]:
    """Files below a path that is being typed; a folder ends with a slash, so that one can go on."""
    head, name = os.path.split(text)
    place = Path(head or ".").expanduser()
    shown = text[: len(text) - len(name)]
    found = [path for path in place.iterdir() if path.name.startswith(name)] if place.is_dir() else []
    found = [path for path in found if name.startswith(".") or not path.name.startswith(".")]
    return [f"{shown}{path.name}{'/' if path.is_dir() else ''}" for path in found if path.is_dir() or not folders]


# Keys and their values ------------------------------------------------------------------------------------------------


def _groups(before: list[str]) -> dict[str, list[str]]:
    """Group to its choices, the user's own among them."""
    own = _given(before, "--config-dir")
    found: dict[str, list[str]] = {}
    for root in (config_dir(), *([Path(own)] if own else [])):
        for path in root.glob("*/*.yaml"):
            found.setdefault(path.parent.name, []).append(path.stem)
    if OPTION in before:
        from optrun.config.groups import KINDS, complete_choices

        for group in KINDS:
            found[group] += complete_choices(group)
    return found


def _of_key(key: str, before: list[str], text: str) -> Iterable[str]:
    """Values of a key; of several, as for a sweep, the last is completed."""
    cut = text.rfind(",") + 1
    done, value = text[:cut], text[cut:]
    if key in _FILES or key == "resume":
        words = ["latest", "auto"] if key == "resume" else []
        return [f"{done}{found}" for found in [*words, *_paths(value, folders=key in _FOLDERS)]]
    choices = _groups(before).get(key)
    return [f"{done}{found}" for found in choices or _known_values(key, before)]


def _known_values(key: str, before: list[str]) -> list[str]:
    from enum import Enum

    from omegaconf import OmegaConf

    from optrun.config.types import in_yaml

    if key.startswith("hydra/"):
        return list(_hydra(before).config_loader.get_group_options(key))
    cfg = _configuration(before)
    kind = OmegaConf.select(cfg, key.rpartition(".")[0])._get_node(key.rpartition(".")[2])._metadata.ref_type
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.name for member in kind]
    value = OmegaConf.select(cfg, key)
    return ["true", "false"] if kind is bool else [str(in_yaml(value))]


def _keys(before: list[str], current: str) -> list[str]:
    """Keys, one level at a time: `training.` leads on, `training.max_steps=` is whole."""
    sign = current[: len(current) - len(current.lstrip("+~"))]
    head, dot, _ = current[len(sign) :].rpartition(".")
    if current.startswith("hydra/"):
        return [f"hydra/{group}=" for group in _hydra(before).config_loader.list_groups("hydra")]
    if not dot:
        from optrun.config.schema.run import RunConfig

        groups = _groups(before)
        single = [f"{field.name}=" for field in fields(RunConfig) if field.name not in groups]
        return [f"{sign}{key}" for key in [*(f"{group}{end}" for group in groups for end in "=."), *single, "hydra."]]
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.select(_configuration(before), head)
    if not isinstance(node, DictConfig):
        return []
    return [f"{sign}{head}.{name}{'.' if _is_mapping(node, name) else '='}" for name in map(str, node)]


def _is_mapping(node: Any, name: str) -> bool:
    from omegaconf import DictConfig

    inner = node._get_node(name)
    return isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing()


def _hydra(before: list[str]) -> Any:
    from optrun.config import store

    return store.open_hydra(_given(before, "--config-dir"))


def _configuration(before: list[str]) -> Any:
    """The configuration so far: the recipe with the choices on the line, without those that do not exist."""
    from optrun.config import store

    hydra, groups = _hydra(before), _groups(before)
    words: Mapping[str, str] = dict(word.split("=", 1) for word in before if "=" in word)
    chosen = [f"{group}={name}" for group, name in words.items() if name in groups.get(group, [])]
    return store.compose(hydra, _given(before, "--config-name") or store.DEFAULT_CONFIG, chosen)
