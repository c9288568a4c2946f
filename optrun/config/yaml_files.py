"""YAML files that Hydra composes.

Which were read, where a key stands in them, and what makes one unreadable.
"""

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
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import read_bytes, read_text
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import ConfigRepository
from optrun.config.literal import changes_text, takes_text
from optrun.config.paths import VALUES_FILES, config_dir
from optrun.config.registered import publish_chosen

READ: dict[str, Path] = {}
"""Configuration, such as `optimizer/mine`, to the file that was read for it; begun anew with each
`open_hydra`.

Beside the repository and not in it: compositions of one `open_hydra` have a repository each."""
_IN_SWEEPER = re.compile(r"^hydra\.sweeper\.(params|grids\.\d+)\.")
_KEY = re.compile(r"^'?([^'=:]+?)(?==|:| is missing)")


class Repository(ConfigRepository):
    """Hydra's repository, with file names in its errors and a record of files read."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copy the list of sources alone.

        Hydra copies for each composition, and with a source its store of schemas.

        It does so because of `initialize_sources`, which begins a new list; `ConfigStore.load`
        hands out copies.
        """
        return copy.copy(self)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Find the folders; refuse missing ones from the user."""
        super().initialize_sources(config_search_path)
        for source in self.sources:
            if source.provider.startswith("hydra.searchpath") and not source.available():
                raise ConfigError(f"hydra.searchpath={source.path}: no such folder.")

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Read one configuration.

        Raises:
            ConfigError: It is no YAML mapping in UTF-8, or would put its values elsewhere; with
                file and line.
        """
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None and publish_chosen(config_path):
            return super().load_config(config_path)
        if source is None or source.scheme() != "file":
            return super().load_config(config_path)
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
        if result is not None:
            _refuse_misplaced(path, config_path, result)
        return result


def unreadable(path: Path, error: Exception) -> ConfigError:
    """Build the error for a file that cannot be read.

    Args:
        path: The file.
        error: Of YAML, of decoding or of the operating system; the message names the line of a
            syntax error or of a byte that is not UTF-8.
    """
    line = None
    problem = str(error).splitlines()[0].rstrip(".")
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = f"no valid YAML: {error.problem}"
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


def _refuse_misplaced(path: Path, config_path: str, result: ConfigResult) -> None:
    """Refuse a file without keys and values, or with misplaced names of choices."""
    if is_shipped(path):
        return
    if not isinstance(result.config, DictConfig) or not isinstance(_tree(path), yaml.MappingNode):
        raise ConfigError(
            f"{shown(path)}: expected keys and values. A recipe begins with `defaults: [config,"
            " _self_]`, a choice with one to change, such as `defaults: [lamb, _self_]`."
        )
    _refuse_names(path, config_path)
    refuse_numerals(path, config_path)


def _refuse_names(path: Path, config_path: str) -> None:
    """Refuse the name of a choice in a recipe: it would be written down, the same be trained."""
    if _group(config_path) in GROUPS:
        return
    for key, _, line in entries(path, config_path):
        group, _, leaf = key.rpartition(".")
        if leaf == "name" and group in GROUPS:
            raise ConfigError(
                f"{shown(path, line)}: {key}: the name of a choice is no key. Choose it in the"
                f" defaults list: `- override {group}: NAME`."
            )


def refuse_numerals(path: Path, config_path: str) -> None:
    """Refuse unquoted numbers and booleans for text keys: `1_0` would become `10`."""
    for key, node, line in entries(path, config_path):
        if isinstance(node, yaml.ScalarNode) and takes_text(key) and _is_rewritten(node):
            raise ConfigError(
                f"{shown(path, line)}: {key}: {node.value}: YAML reads this as a number or a truth"
                f" value, and a text is meant. Quote it: '{node.value}'."
            )


def _is_rewritten(node: yaml.ScalarNode) -> bool:
    """Tell whether YAML would change the spelling of a word."""
    if node.style:  # quoted
        return False
    is_value = node.tag.endswith((":int", ":float", ":bool")) or changes_text(node.value)
    return is_value and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d*[1-9])?", node.value) is None


def is_shipped(path: Path) -> bool:
    """Tell whether a file is a choice of optrun's own."""
    return path.resolve().is_relative_to(config_dir())


def users_files() -> dict[str, Path]:
    """Find the user's files of the last composition, the recipe first."""
    return VALUES_FILES | {name: path for name, path in READ.items() if not is_shipped(path)}


def shown(path: Path, line: int | None = None) -> str:
    """Write a file, as seen from here, with a line of it."""
    near = path.resolve()
    near = near.relative_to(Path.cwd()) if near.is_relative_to(Path.cwd()) else near
    if line is None:
        return f"{near}"
    return f"{near}, line {line}"


# Where things stand
# --------------------------------------------------------------------------------------------------


def entries(path: Path, config_path: str = "") -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield the dotted keys of a file with value and line; nothing without valid YAML.

    Args:
        path: The file.
        config_path: Its name for Hydra; a choice stands below its group.
    """
    seen: set[int] = set()

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, int]]:
        if (
            node is None or id(node) in seen
        ):  # an alias: looked at once, however often it is repeated
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                key = f"{prefix}{name.value}"
                yield key, value, name.start_mark.line + 1
                yield from walk(value, f"{key}.")
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                yield f"{prefix}{number}", value, value.start_mark.line + 1
                yield from walk(value, f"{prefix}{number}.")

    group = _group(config_path).replace("/", ".")
    yield from walk(_tree(path), f"{group}." if group else "")


def _tree(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(read_text(path, follow=True), Loader=yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _group(config_path: str) -> str:
    return os.path.dirname(config_path)  # noqa: PTH120 - a name of Hydra's


def line_of(path: Path, key: str, config_path: str = "") -> int | None:
    """Find the line of a dotted key in a file; None if the file does not set it.

    Keys of a sweep, such as `hydra.sweeper.params.lr`, count as the key that they vary.

    Args:
        path: The file.
        key: Such as `param_groups.rules[0].lr`.
        config_path: Name of the file for Hydra; a choice stands below its group.
    """
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    return next(
        (
            line
            for name, _, line in entries(path, config_path)
            if key in (name, _IN_SWEEPER.sub("", name))
        ),
        None,
    )


def location(message: str) -> str | None:
    """Name file and line of the key of a message in the files that the user gave.

    These are the files of the last composition. None if the message begins with no key, or no file
    sets it.

    Args:
        message: Such as `lr=-1: expected ...`.
    """
    key_match = _KEY.match(message)
    if key_match is None:
        return None
    key, group = key_match[1], key_match[1].split(".")[0]
    for name, path in users_files().items():
        line = line_of(path, key, name)
        if line is not None:
            return shown(path, line)
        if _group(name) == group and message.startswith(f"{key} is missing"):
            return shown(path)
    return None
