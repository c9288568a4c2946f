"""What Hydra and OmegaConf raise while they compose, as one message.

File, line, key, value, what was expected.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.groups import CHOICES, GROUPS
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import all_keys, node_at, unknown_hydra_group, unknown_key
from optrun.config.safety import code_refusal
from optrun.config.types import expected_type, in_yaml
from optrun.config.yaml_files import READ, entries, line_of, mentioned, shown, users_files

_SHOWN = 200
"""Characters of a value in a message."""


def refusal(hydra: Hydra, config_name: str, error: BaseException) -> ConfigError:
    """Make the refusal that stands for an error of a composition.

    Args:
        hydra: Knows the choices.
        config_name: What was composed.
        error: What it raised.
    """
    if isinstance(error, OmegaConfBaseException):
        return interpolation(None, error)
    if isinstance(error, MissingConfigException):
        return _missing(hydra, config_name, str(error.missing_cfg_file))
    if isinstance(error, RecursionError):
        return _circular(config_name)
    return _not_merged(config_name, error)


def _circular(config_name: str) -> ConfigError:
    """Refuse defaults lists that lead back to themselves."""
    names = users_files()
    where = shown(list(names.values())[-1]) if names else config_name
    return ConfigError(
        f"{where}: the defaults lists of {', '.join(names)} lead back to themselves. Take one out."
    )


def _not_merged(config_name: str, error: BaseException) -> ConfigError:
    """Refuse values, or a defaults list, that Hydra could not put together."""
    cause = error.__cause__ or error.__context__
    named = re.match(r"In '([^']+)':", str(error))
    if isinstance(cause, OmegaConfBaseException) and named is not None:
        return _unmerged(named[1], cause)
    if isinstance(cause, ConfigKeyError):  # an override, under the choice of another
        return unknown_key(cause.parent_node._get_root(), str(cause.full_key))
    if isinstance(error, KeyError):
        return ConfigError(f"hydra.job.env_copy: the environment variable {error} is not set.")
    return _not_taken(config_name, first_line(error))


def _not_taken(config_name: str, message: str) -> ConfigError:
    """Refuse a defaults list that Hydra does not take.

    Its own message, behind the line that it is about.
    """
    inside = re.match(r"In '?([^':]+)'?: (.*)", message)
    name, message = (inside[1], inside[2]) if inside else (config_name, message)
    names = [
        "".join(found)
        for found in re.findall(
            r"'([^']+)'|Multiple values for ([\w/]+)|^([\w/]+) appears", message
        )
    ]
    if "No match in the defaults list" in message and names:
        message = f"override {names[0]}: no such group. {did_you_mean(names[0], GROUPS)}"
        if names[0].startswith("hydra/"):
            message = str(unknown_hydra_group(["launcher", "sweeper"], names[0]))
    positions = [position for position in map(mentioned, names) if position is not None]
    if not positions and name in users_files():
        key = (
            "defaults"
            if "searchpath" not in message and "config source" not in message
            else "hydra.searchpath"
        )
        positions = [shown(READ[name], line_of(READ[name], key))]
    return ConfigError(f"{positions[0]}: {message}" if positions else message)


def first_line(error: BaseException) -> str:
    """Return the message of the ConfigError that caused an error.

    Without one, the first line of the message of the innermost cause.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ConfigError):
        return str(cause)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _missing(hydra: Hydra, config_name: str, missing: str) -> ConfigError:
    """Refuse a recipe, or an entry of a defaults list, that leads nowhere."""
    group, _, name = missing.rpartition("/")
    options = hydra.config_loader.get_group_options(group)
    folders = (
        Path(source.path)
        for source in hydra.config_loader.get_sources()
        if source.scheme() == "file"
    )
    twin = next((path for path in folders if (path / f"{missing}.yml").is_file()), None)
    near = (
        f"{shown(twin / missing)}.yml: call it {name}.yaml."
        if twin
        else did_you_mean(name, options)
    )
    path = Path(config_name if config_name.endswith(".yaml") else f"{config_name}.yaml")
    if missing == config_name.strip("/") and path.is_file():
        words = f"--config-dir {path.parent} -cn {path.stem}"
        return ConfigError(f"-cn {config_name}: no such recipe. For the file {path} write {words}")
    if missing == config_name.strip("/"):
        near = near or "It is the name of a file, not a path."
        return ConfigError(
            f"-cn {config_name}: no such recipe. {near} Your own are found with --config-dir DIR."
        )
    where = mentioned(name) or mentioned(missing)
    where = f"{where}: " if where else ""
    if group and not options:
        groups = hydra.config_loader.list_groups(group.rpartition("/")[0])
        return ConfigError(
            f"{where}{group}={name}: no such group {group}. {did_you_mean(group, groups)}"
        )
    if name.endswith("_schema"):
        near = did_you_mean(name, [f"{choice}_schema" for choice in CHOICES.get(group, ())])
    return ConfigError(
        f"{where}{group or 'defaults'}={name}: no such"
        f" {group if group in GROUPS else 'configuration'}. {near}"
    )


# A file that does not fit
# ---------------------------------------------------------------------------------------------


def _unmerged(config_path: str, cause: OmegaConfBaseException) -> ConfigError:
    """Refuse a file whose keys or values do not fit those there are."""
    key = str(cause.full_key or "")
    path = READ.get(config_path)
    root = cause.parent_node._get_root()
    if path is None and not key:
        where = mentioned(config_path.split("/")[0]) or config_path
        return ConfigError(f"{where}: a run has one choice of each group, and here are several.")
    if path is None:  # a schema, put elsewhere by the defaults list
        where = mentioned(key.split(".")[0]) or config_path
        return ConfigError(
            f"{where}: {key}: no such key. A group keeps its place: write it without @{key}."
        )
    message = _unknown(root, config_path, key, cause) if isinstance(cause, ConfigKeyError) else None
    if message is None:
        key, message = _misfit(root, path, config_path) if not key else (key, _unfit(key, cause))
    return ConfigError(f"{shown(path, line_of(path, key, config_path))}: {message}")


def _unknown(root: DictConfig, config_path: str, key: str, cause: OmegaConfBaseException) -> str:
    group, _, leaf = key.rpartition(".")
    choices = CHOICES.get(group.replace(".", "/"), {})
    if leaf == "_target_":
        values = {name: node.value for name, node, _ in entries(READ[config_path], config_path)}
        return str(code_refusal(key, values.get(key)))
    if (
        choices
        and cause.object_type not in choices.values()
        and config_path.startswith(group.replace(".", "/"))
    ):
        return (
            f"{key}: the defaults list names no schema. Begin with a choice to change, such as"
            f" `defaults: [{next(iter(choices))}, _self_]`, or with its schema, `defaults:"
            f" [{next(iter(choices))}_schema, _self_]`."
        )
    if config_path.startswith(f"{key}/"):
        return f"{key}: no such group. {did_you_mean(key, GROUPS)}"
    if str(cause.key) == key and key in all_keys(root):
        head, _, leaf = key.rpartition(".")
        return f"{key}: a file has no dotted keys. Expected `{leaf}` indented below `{head}:`."
    return str(unknown_key(root, key))


def _unfit(key: str, cause: OmegaConfBaseException) -> str:
    text = str(in_yaml(cause.value)).replace("None", "null")
    return (
        f"{key}={text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'}: expected"
        f" {expected_type(cause)}."
    )


def _misfit(root: DictConfig, path: Path, config_path: str) -> tuple[str, str]:
    """Find the first entry of another kind: a single value, a list or a mapping."""
    for key, node, _ in entries(path, config_path):
        there = node_at(root, key)
        text = node.value if isinstance(node, yaml.ScalarNode) else "..."
        if isinstance(there, DictConfig) and not isinstance(node, yaml.MappingNode):
            hint = (
                f" Choose it in the defaults list: `- override {key}: {text}`."
                if key in GROUPS
                else ""
            )
            return key, f"{key}={text}: expected a mapping, such as {{key: value}}.{hint}"
        if isinstance(there, ListConfig) and not isinstance(node, yaml.SequenceNode):
            return key, f"{key}={text}: expected a list, such as [a,b]."
    return "", "a value is a mapping or a list where the configuration has another kind."


# Interpolations
# --------------------------------------------------------------------------------------------------


def interpolation(cfg: DictConfig | None, error: OmegaConfBaseException) -> ConfigError:
    """Make the refusal of a `${...}` that comes to nothing, or to a value of another type.

    Args:
        cfg: What it stands in; None: it is not known.
        error: What OmegaConf raised.
    """
    message = first_line(error)
    key = str(error.full_key or "")
    if (
        isinstance(error.__cause__, ConfigError)
        or not key
        or not isinstance(error, InterpolationResolutionError)
    ):
        return ConfigError(message)
    node = None if error.parent_node is None else node_at(error.parent_node._get_root(), key)
    text = node._value() if node is not None else "${...}"
    return ConfigError(f"{key}={text}: {_why(cfg, message, error)}")


def _why(cfg: DictConfig | None, message: str, error: OmegaConfBaseException) -> str:
    """Say why a `${...}` has no value, or not the right one."""
    absence = _what_is_missing(cfg, message)
    if absence is not None:
        return absence
    if "HydraConfig was not set" in message:
        return (
            "what ${hydra:...} stands for is known to Hydra alone, after the configuration is"
            " checked. Give the value itself, or ${oc.env:NAME}."
        )
    if "Recursive interpolation" in message:
        return "it leads back to itself."
    resolver = re.search(r"Unsupported interpolation type (\S+)", message)
    if resolver is not None:
        return (
            f"there is no resolver {resolver[1]}. OmegaConf has oc.env and others below oc., Hydra"
            " has now and hydra."
        )
    return f"expected {expected_type(error)}."


def _what_is_missing(cfg: DictConfig | None, message: str) -> str | None:
    """Name the key, environment variable or value that a `${...}` needs; None: it is all there."""
    key = re.search(r"Interpolation key '([^']+)' not found", message)
    if key is not None:
        near = did_you_mean(key[1], all_keys(cfg)) if cfg is not None else ""
        return f"there is no key {key[1]}. {near if near.startswith('Did') else ''}".strip()
    variable = re.search(r"Environment variable '([^']+)' not found", message)
    if variable is not None:
        return (
            f"the environment variable {variable[1]} is not set. Set it, or write"
            f" ${{oc.env:{variable[1]},DEFAULT}}."
        )
    mandatory = re.search(r"Missing mandatory value: (\S+)", message)
    if mandatory is not None:
        return f"{mandatory[1]} has no value: give {mandatory[1]}=VALUE."
    return None
