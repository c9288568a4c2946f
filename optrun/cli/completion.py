"""What the TAB key offers: verbs, options, recipes, choices, keys, values and paths.

Never an error in a prompt.

Hydra installs the shell's function, which asks with the line so far in `COMP_LINE`. Hydra's own
answers know nothing of verbs, and read every token as `key=value`. Only keys are asked of Hydra
here: importing it takes longer than the rest.
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
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE
from optrun.cli.overview import groups
from optrun.cli.parser import VerbParser, is_override
from optrun.cli.verbs import VERBS, module
from optrun.config.original_cwd import PATHS
from optrun.config.paths import config_dir, recipes_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from optrun.config.hydra_internals import Hydra

_SAFE = re.compile(r"[\w./=+,@%~:-]+")
"""What is offered.

Bash splits candidates at blanks and expands them, so that a file's name could be a command.
"""
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "lr_from")
_FILES = (*PATHS, "branch_from", "out", *_FOLDERS)
PLUGIN = "--plugin"
"""Taken out of every command line by `optrun.config.registry.plugins`."""
_LONG_OPTIONS = {
    "-c": "--cfg",
    "-i": "--info",
    "-p": "--package",
    "-cn": "--config-name",
    "-cd": "--config-dir",
}
_VALUES = {
    "--cfg": ["job", "hydra", "all"],
    "--info": ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    "-sc": ["install=bash", "install=fish", "uninstall=bash", "uninstall=fish"],
}
_TRAIN_OPTIONS = (
    "-m",
    "-cn",
    "--config-dir",
    "--cfg",
    "--resolve",
    "--package",
    "--info",
    "--help",
    "--hydra-help",
    "-sc",
    PLUGIN,
)
"""Of `optrun` without a verb.

Hydra's parser knows them, and importing it takes longer than answering.
"""


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
    """Complete the last token of a line.

    Args:
        line: The command so far, the program's name first; a blank at its end begins a new token.
    """
    tokens = line.split()
    current = "" if line[-1:].isspace() or not tokens else tokens.pop()
    if PLUGIN in tokens[:-1]:
        from optrun.config.registry import plugins

        plugins.take(tokens)
    program = next((index for index, token in enumerate(tokens) if Path(token).name == "optrun"), 0)
    found = _next_token(tokens[program + 1 :], current)
    return sorted(
        {token for token in found if token.startswith(current) and _SAFE.fullmatch(token)}
    )


def _next_token(before: list[str], current: str) -> Iterable[str]:
    verb = before[0] if before and before[0] in VERBS else None
    parser: VerbParser | None = (
        None if verb is None else importlib.import_module(module(verb)).parser()
    )
    values = (
        {**dict.fromkeys(_TRAIN_OPTIONS), PLUGIN: "FILE"}
        if parser is None
        else parser.option_values()
    )
    option, joined, _ = current.partition("=")
    if current.startswith("-") and joined:
        return [
            f"{option}={value}" for value in _of_option(option, before, current[len(option) + 1 :])
        ]
    last = _LONG_OPTIONS.get(before[-1], before[-1]) if before else ""
    if last in {*_LONG_OPTIONS.values(), *_VALUES} or values.get(last) == "FILE":
        return _of_option(last, before, current)
    if values.get(last) is not None:
        return []
    if current.startswith("-"):
        return values
    if joined and is_override(current):
        return [
            f"{option}={value}"
            for value in _of_key(option.lstrip("+~"), before, current[len(option) + 1 :])
        ]
    found = [] if parser is None else [*parser.claims, *(f"{key}=" for key in parser.keys)]
    if parser is None or parser.takes_overrides:
        found += _keys(before, current)
    if parser is not None and parser.takes_paths:
        found += _paths(current, folders=True)
    return found if verb is not None or before else [*found, *VERBS]


def _of_option(option: str, before: list[str], value: str) -> Iterable[str]:
    if option == "--config-name":
        own = _given(before, "--config-dir")
        folders = [recipes_dir(), config_dir(), *([Path(own)] if own else [])]
        return [path.stem for folder in folders for path in folder.glob("*.yaml")]
    if option == "--package":
        return [key.rstrip(".") for key in _keys(before, value) if key.endswith(".")]
    return _VALUES.get(option) or _paths(value, folders=option == "--config-dir")


def _given(before: list[str], option: str) -> str | None:
    """Return the value of an option on the line."""
    for index, token in enumerate(before):
        name, joined, value = token.partition("=")
        if _LONG_OPTIONS.get(name, name) == option:
            return value if joined else next(iter(before[index + 1 :]), None)
    return None


def _paths(text: str, *, folders: bool = False) -> list[str]:
    """List files below a path that is being typed.

    A folder ends with a slash, so that one can go on.
    """
    head, name = os.path.split(text)
    folder = Path(head or ".").expanduser()
    shown = text[: len(text) - len(name)]
    found = (
        [path for path in folder.iterdir() if path.name.startswith(name)] if folder.is_dir() else []
    )
    found = [path for path in found if name.startswith(".") or not path.name.startswith(".")]
    return [
        f"{shown}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.is_dir() or not folders
    ]


# Keys and their values
# ------------------------------------------------------------------------------------------------


def _groups(before: list[str]) -> dict[str, list[str]]:
    return groups(_given(before, "--config-dir"))


def _of_key(key: str, before: list[str], text: str) -> Iterable[str]:
    """Complete values of a key; of several, as for a sweep, the last is completed."""
    cut = text.rfind(",") + 1
    done, value = text[:cut], text[cut:]
    if key in _FILES or key == "resume":
        named = ["latest", "auto"] if key == "resume" else []
        return [f"{done}{found}" for found in [*named, *_paths(value, folders=key in _FOLDERS)]]
    choices = _groups(before).get(key)
    return [f"{done}{found}" for found in choices or _known_values(key, before)]


def _known_values(key: str, before: list[str]) -> list[str]:
    from enum import Enum

    from omegaconf import OmegaConf

    from optrun.config.types import in_yaml

    if key.startswith("hydra/"):
        return list(_hydra(before).config_loader.get_group_options(key))
    cfg = _configuration(before)
    kind = (
        OmegaConf.select(cfg, key.rpartition(".")[0])
        ._get_node(key.rpartition(".")[2])
        ._metadata.ref_type
    )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.name for member in kind]
    value = OmegaConf.select(cfg, key)
    return ["true", "false"] if kind is bool else [str(in_yaml(value))]


def _keys(before: list[str], current: str) -> list[str]:
    """Complete keys, one level at a time: `training.` leads on, `training.max_steps=` is whole."""
    sign = current[: len(current) - len(current.lstrip("+~"))]
    head, dot, _ = current[len(sign) :].rpartition(".")
    if current.startswith("hydra/"):
        return [f"hydra/{group}=" for group in _hydra(before).config_loader.list_groups("hydra")]
    if not dot:
        from optrun.config.schema.run import RunConfig

        groups = _groups(before)
        single = [f"{field.name}=" for field in fields(RunConfig) if field.name not in groups]
        return [
            f"{sign}{key}"
            for key in [*(f"{group}{end}" for group in groups for end in "=."), *single, "hydra."]
        ]
    from omegaconf import DictConfig, OmegaConf

    node = OmegaConf.select(_configuration(before), head)
    if not isinstance(node, DictConfig):
        return []
    found = []
    for name in map(str, node):
        inner = node._get_node(name)
        leads_on = (
            isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing()
        )
        found.append(f"{sign}{head}.{name}{'.' if leads_on else '='}")
    return found


def _hydra(before: list[str]) -> Hydra:
    from optrun.config import store

    return store.open_hydra(_given(before, "--config-dir"))


def _configuration(before: list[str]) -> DictConfig:
    """Compose the configuration so far: the recipe with the choices on the line that exist."""
    from optrun.config import store
    from optrun.config.request import DEFAULT_CONFIG

    hydra, groups = _hydra(before), _groups(before)
    given: Mapping[str, str] = dict(token.split("=", 1) for token in before if "=" in token)
    chosen = [f"{group}={name}" for group, name in given.items() if name in groups.get(group, [])]
    return store.compose(hydra, _given(before, "--config-name") or DEFAULT_CONFIG, chosen)
