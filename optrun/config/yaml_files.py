"""YAML files that Hydra composes: which were read, the lines of their keys, and errors in them."""

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from optrun.base.bounded_yaml import UnboundedYamlError, yaml_text
from optrun.base.errors import ConfigError, UnreadableFileError, first_line
from optrun.base.reading import read_bytes, read_text
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import ConfigRepository
from optrun.config.literal import changes_text, takes_text
from optrun.config.paths import VALUES_FILES, config_dir
from optrun.config.registered import publish_chosen

READ: dict[str, Path] = {}
"""Configuration, such as `optimizer/mine`, -> the file that was read for it; emptied by
`open_hydra`. Not an attribute of the repository, since each composition has its own."""
_IN_SWEEPER = re.compile(r"^hydra\.sweeper\.(params|grids\.\d+)\.")
_KEY = re.compile(r"^'?([^'=:]+?)(?==|:| is missing)")


class Repository(ConfigRepository):
    """Hydra's repository, with file names in its errors and a record of files read."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copy the list of sources only.

        Hydra copies its repository for each composition, since `initialize_sources` changes it. A
        deep copy would include the store of schemas; that is not needed, since
        `initialize_sources` begins a new list and `ConfigStore.load` hands out copies.
        """
        return copy.copy(self)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Find the folders; refuse missing ones from the user."""
        super().initialize_sources(config_search_path)
        for source in self.sources:
            if source.provider.startswith("hydra.searchpath") and not source.available():
                raise ConfigError(f"hydra.searchpath={source.path}: no such folder.")

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Read one configuration, and record its file in `READ`.

        Only files of optrun and of the user are recorded and checked; entries of Hydra's store and
        files of Hydra's own are not. A name that no source has may be a choice of an installed
        package: `publish_chosen` imports that package and puts the choice into the store.

        Args:
            config_path: Name of the configuration, such as `optimizer/lamb`.

        Returns:
            The configuration; None if there is none of this name.

        Raises:
            ConfigError: A file of the user is no YAML mapping in UTF-8, or names a choice among its
                values; the message names file and line.
        """
        # 1. What is in no folder, and needs no checks: a choice of an installed package, which is
        # put into Hydra's store, an entry of that store, or a file of Hydra's own.
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None:
            publish_chosen(config_path)
        if source is None or source.scheme() != "file":
            return super().load_config(config_path)
        # 2. A file of optrun or of the user.
        path = READ[config_path] = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
        try:
            if not is_shipped(path):
                yaml_text(path, follow=True)  # Hydra reads to the end, however long aliases make it
            result = super().load_config(config_path)
        except UnreadableFileError as error:
            raise ConfigError(str(error)) from error
        except UnboundedYamlError as error:
            raise ConfigError(f"{shown(path)}: not read: {error}.") from error
        except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, TypeError) as error:
            raise unreadable(path, error) from error
        if result is not None and not is_shipped(path):
            _check_file(path, config_path, result)
        return result


def unreadable(path: Path, error: Exception) -> ConfigError:
    """Build the error for an unreadable file.

    The message names the line of a syntax error, or of a byte that is not UTF-8.

    Args:
        path: The file.
        error: From YAML, from decoding or from the operating system.
    """
    line = None
    problem = first_line(error) or type(error).__name__
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = f"no valid YAML: {error.problem or problem}"
        if "'\\t'" in str(error.problem):
            problem = "no valid YAML: a tab indents here; YAML takes spaces"
    elif isinstance(error, UnicodeDecodeError):
        line = read_bytes(path, follow=True)[: error.start].count(b"\n") + 1
        problem = f"not UTF-8, because of byte 0x{error.object[error.start]:02x}"
    elif isinstance(error, yaml.YAMLError):
        problem = f"no valid YAML: {problem}"
    elif isinstance(error, OSError):
        problem = f"cannot be read: {error.strerror}"
    return ConfigError(f"{shown(path, line)}: {problem}.")


def _check_file(path: Path, config_path: str, result: ConfigResult) -> None:
    """Refuse a user's file without keys and values, or with misplaced names or numbers.

    Args:
        path: The file.
        config_path: Its name for Hydra.
        result: What Hydra read from it.
    """
    if not isinstance(result.config, DictConfig) or not isinstance(_tree(path), yaml.MappingNode):
        raise ConfigError(
            f"{shown(path)}: expected keys and values. A recipe begins with `defaults: [config,"
            " _self_]`, a choice with one to change, such as `defaults: [lamb, _self_]`."
        )
    _refuse_names(path, config_path)
    refuse_numerals(path, config_path)


def _refuse_names(path: Path, config_path: str) -> None:
    """Refuse `GROUP.name: NAME` in a recipe: it would rename the choice, and not choose another."""
    if _group(config_path) in GROUPS:  # a choice, which may have a name of its own
        return
    for key, _, line in entries(path, config_path):
        group, _, leaf = key.rpartition(".")
        if leaf == "name" and group in GROUPS:
            raise ConfigError(
                f"{shown(path, line)}: {key}: the name of a choice is no key. Choose it in the"
                f" defaults list: `- override {group}: NAME`."
            )


def refuse_numerals(path: Path, config_path: str) -> None:
    """Refuse unquoted numbers and booleans for text keys if YAML rewrites them, as `1_0` to 10.

    Raises:
        ConfigError: The message names file and line.
    """
    for key, node, line in entries(path, config_path):
        if isinstance(node, yaml.ScalarNode) and takes_text(key) and _is_rewritten(node):
            raise ConfigError(
                f"{shown(path, line)}: {key}: {node.value}: YAML reads this as a number or a truth"
                f" value, and a text is meant. Quote it: '{node.value}'."
            )


def _is_rewritten(node: yaml.ScalarNode) -> bool:
    """Tell whether YAML or Hydra would read a word as a number or boolean and respell it.

    True for `1_0`, `1e5` and `true` without quotes. A plain decimal such as `10` or `-0.5` keeps
    its spelling.
    """
    if node.style:  # quoted
        return False
    is_plain_decimal = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d*[1-9])?", node.value) is not None
    if is_plain_decimal:
        return False
    return node.tag.endswith((":int", ":float", ":bool")) or changes_text(node.value)


def is_shipped(path: Path) -> bool:
    """Tell whether a file is one of optrun's choices."""
    return path.resolve().is_relative_to(config_dir())


def users_files() -> dict[str, Path]:
    """Map configurations to the user's files of the last composition, `-cn FILE.yaml` first."""
    return VALUES_FILES | {name: path for name, path in READ.items() if not is_shipped(path)}


def shown(path: Path, line: int | None = None) -> str:
    """Write a path relative to the current folder if it is below, and a line of the file.

    Such as `conf/mine.yaml, line 2`, or `/etc/mine.yaml`.
    """
    path = path.resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if line is None:
        return str(path)
    return f"{path}, line {line}"


# Lines of keys
# --------------------------------------------------------------------------------------------------


def entries(path: Path, config_path: str = "") -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield every dotted key of a file with its value and line; nothing without valid YAML.

    A file with `betas: [0.9, 0.99]` in line 3 yields `optimizer.betas`, `optimizer.betas.0` and
    `optimizer.betas.1`, each with its YAML node and 3. A mapping comes before its keys.

    Args:
        path: The file.
        config_path: Its name for Hydra, such as `optimizer/mine`, whose keys are `optimizer.KEY`.
    """
    tree = _tree(path)
    if tree is not None:
        group = _group(config_path).replace("/", ".")
        yield from _walk(tree, f"{group}." if group else "", set())


def _walk(node: yaml.Node, prefix: str, visited: set[int]) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield every key below a node, with its value and line.

    Args:
        node: A mapping or list; a scalar has no keys.
        prefix: Put before the keys, with a dot at its end.
        visited: Ids of the nodes that were yielded; added to. Aliases repeat a node, perhaps
            without end.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    items: list[tuple[object, yaml.Node, yaml.Node]] = []  # name, node with the line, value
    if isinstance(node, yaml.MappingNode):
        items = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, value, value) for index, value in enumerate(node.value)]
    for name, line_node, value in items:
        yield f"{prefix}{name}", value, line_node.start_mark.line + 1
        yield from _walk(value, f"{prefix}{name}.", visited)


def _tree(path: Path) -> yaml.Node | None:
    """Parse a YAML file into nodes with their lines; None without valid YAML."""
    try:
        return yaml.compose(read_text(path, follow=True), Loader=yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _group(config_path: str) -> str:
    return os.path.dirname(config_path)  # noqa: PTH120 - a name of Hydra's


def line_of(path: Path, key: str, config_path: str = "") -> int | None:
    """Find the line of a dotted key in a file; None if the file does not set it.

    `hydra.sweeper.params.KEY` and a key in `hydra.sweeper.grids` count as the key that they sweep.

    Args:
        path: The file.
        key: Such as `param_groups.rules[0].lr`.
        config_path: Name of the file for Hydra, see `entries`.
    """
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    for name, _, line in entries(path, config_path):
        if key in (name, _IN_SWEEPER.sub("", name)):
            return line
    return None


def location(message: str) -> str | None:
    """Name file and line of the key of a message, in the user's files of the last composition.

    Args:
        message: Such as `lr=-1: expected ...`, or `optimizer.beta is missing: ...`.

    Returns:
        Such as `mine.yaml, line 2`; for "KEY is missing" the file of the group alone. None if the
        message begins with no key, or no file sets it.
    """
    key_match = _KEY.match(message)
    if key_match is None:
        return None
    key = key_match[1]
    is_missing = message.startswith(f"{key} is missing")
    for config_path, path in users_files().items():
        line = line_of(path, key, config_path)
        if line is not None:
            return shown(path, line)
        if is_missing and _group(config_path) == key.partition(".")[0]:
            return shown(path)
    return None
