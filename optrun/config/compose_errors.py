"""Errors of Hydra and OmegaConf during composition, as one message.

It names file, line, key and value.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from optrun.base.errors import ConfigError, OptrunError, did_you_mean
from optrun.config.groups import CHOICES, GROUPS
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import all_keys, node_at, unknown_key
from optrun.config.safety import code_refusal
from optrun.config.types import expected_type, in_yaml
from optrun.config.yaml_files import READ, entries, line_of, shown, users_files

_SHOWN = 200
"""Characters of a value in a message."""
_SAID_OF_INTERPOLATIONS = (
    (r"Interpolation key '([^']+)' not found", "there is no key {0}."),
    (
        r"Environment variable '([^']+)' not found",
        "the environment variable {0} is not set. Set it, or write ${{oc.env:{0},DEFAULT}}.",
    ),
    (r"Missing mandatory value: (\S+)", "{0} has no value: give {0}=VALUE."),
    (r"Recursive interpolation", "it leads back to itself."),
    (r"Unsupported interpolation type (\S+)", "there is no resolver {0}."),
    (r"HydraConfig was not set", "Hydra knows its value only after this check. Give the value."),
)
"""What OmegaConf says of a `${...}` without a value, and how a person would."""


def composition_error(hydra: Hydra, config_name: str, error: BaseException) -> ConfigError:
    """Turn an error of a composition into a ConfigError.

    Args:
        hydra: Knows the choices.
        config_name: What was composed.
        error: What it raised.
    """
    if isinstance(error, OmegaConfBaseException):
        return interpolation_error(None, error)
    if isinstance(error, MissingConfigException):
        return _missing_file_error(hydra, config_name, str(error.missing_cfg_file))
    cause = error.__cause__ or error.__context__
    config_path = re.match(r"In '([^']+)':", str(error))
    if isinstance(cause, OmegaConfBaseException) and config_path and config_path[1] in READ:
        return _merge_error(config_path[1], cause)
    message = _short_message(cause if isinstance(cause, OmegaConfBaseException) else error)
    if isinstance(cause, ConfigKeyError):
        message = str(unknown_key(cause.parent_node._get_root(), str(cause.full_key)))
    if isinstance(error, KeyError):
        message = f"hydra.job.env_copy: the environment variable {error} is not set."
    if isinstance(error, RecursionError):
        message = "the defaults lists lead back to themselves. Take one entry out."
    return ConfigError(f"{_last_file()}{message}")


def _last_file() -> str:
    """Name the last file read from the user, for the start of a message."""
    files = list(users_files().values())
    if files:
        return f"{shown(files[-1])}: "
    return ""


def _first_of_optrun(error: BaseException) -> OptrunError | None:
    """Return the first OptrunError among an error and what it was raised from; else None.

    The OptrunError may itself be raised from another error, such as a ValueError. OmegaConf erases
    `__cause__` from what it raises (unless OC_CAUSE=1), so `__context__` is followed, too.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OptrunError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _short_message(error: BaseException) -> str:
    """Return the message of the first OptrunError that an error was raised from.

    Without one, the first line of the error's own message; the name of its class if it has none.
    """
    cause = _first_of_optrun(error)
    if cause is not None:
        return str(cause)
    lines = [line for line in str(error).splitlines() if line.strip()]
    if lines:
        return lines[0]
    return type(error).__name__


def _missing_file_error(hydra: Hydra, config_name: str, missing: str) -> ConfigError:
    """Build the error for a missing recipe, or a missing entry of a defaults list.

    Args:
        hydra: Knows the choices.
        config_name: What was composed.
        missing: Name of the missing file for Hydra, such as `optimizer/lam`; equal to `config_name`
            for a recipe.
    """
    group, _, name = missing.rpartition("/")
    options = hydra.config_loader.get_group_options(group)
    near = did_you_mean(name, [option for option in options if option != name])
    if missing == config_name.strip("/"):
        if Path(f"{config_name}.yaml").is_file():
            near = f"Did you mean -cn {config_name}.yaml?"
        return ConfigError(
            f"-cn {config_name}: no such recipe. {near} For a file of your own write -cn FILE.yaml"
        )
    kind = group or "configuration"
    message = f"{_last_file()}{group or 'defaults'}={name}: no such {kind}. {near}"
    return ConfigError(message.rstrip())


def _merge_error(config_path: str, cause: OmegaConfBaseException) -> ConfigError:
    """Refuse a file with an unknown key or a value of the wrong type."""
    path = READ[config_path]
    key = str(cause.full_key or "")
    if not key:
        key, message = _value_of_other_kind(config_path, cause.parent_node._get_root())
    elif isinstance(cause, ConfigKeyError):
        message = _describe_unknown_key(config_path, key, cause)
    else:
        text = str(in_yaml(cause.value)).replace("None", "null")
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        message = f"{key}={text}: expected {expected_type(cause)}."
    return ConfigError(f"{shown(path, line_of(path, key, config_path))}: {message}")


def _value_of_other_kind(config_path: str, root: DictConfig) -> tuple[str, str]:
    """Find the first value of a file with a scalar in place of a mapping or list.

    Returns:
        The key, empty if there is none, and the message.
    """
    for key, node, _ in entries(READ[config_path], config_path):
        default = node_at(root, key)
        text = node.value if isinstance(node, yaml.ScalarNode) else "..."
        if isinstance(default, DictConfig) and not isinstance(node, yaml.MappingNode):
            hint = f" Choose it in the defaults list: `- override {key}: {text}`."
            return key, f"{key}={text}: expected a mapping.{hint if key in GROUPS else ''}"
        if isinstance(default, ListConfig) and not isinstance(node, yaml.SequenceNode):
            return key, f"{key}={text}: expected a list, such as [a,b]."
    return "", "a value is a mapping or a list where the configuration has another kind."


def _describe_unknown_key(config_path: str, key: str, cause: OmegaConfBaseException) -> str:
    """Describe an unknown key of a file: `_target_`, a choice that was not made, or a typing error.

    Args:
        config_path: Name of the file for Hydra, such as `optimizer/mine`.
        key: The key, dotted.
        cause: What OmegaConf raised for it.
    """
    group, _, leaf = key.rpartition(".")
    if leaf == "_target_":
        values = {name: node.value for name, node, _ in entries(READ[config_path], config_path)}
        return str(code_refusal(key, values.get(key)))
    choices = CHOICES.get(group.replace(".", "/"), {})
    is_choice = config_path.startswith(f"{group.replace('.', '/')}/")
    if choices and is_choice and cause.object_type not in choices.values():
        return (
            f"{key}: the defaults list names no choice of {group}. Begin with the one to change,"
            f" such as `defaults: [{next(iter(choices))}, _self_]`."
        )
    return str(unknown_key(cause.parent_node._get_root(), key))


def interpolation_error(cfg: DictConfig | None, error: OmegaConfBaseException) -> ConfigError:
    """Refuse an interpolation without a value, or with one of the wrong type.

    Args:
        cfg: What it stands in; None: it is not known.
        error: What OmegaConf raised.
    """
    message = _short_message(error)
    key = str(error.full_key or "")
    if _first_of_optrun(error) or not key or not isinstance(error, InterpolationResolutionError):
        return ConfigError(message)
    node = None if error.parent_node is None else node_at(error.parent_node._get_root(), key)
    text = node._value() if node is not None else "${...}"
    return ConfigError(f"{key}={text}: {_describe_interpolation(cfg, message, error)}")


def _describe_interpolation(
    cfg: DictConfig | None, message: str, error: OmegaConfBaseException
) -> str:
    """Describe why a `${...}` has no value, or one of the wrong type."""
    for pattern, template in _SAID_OF_INTERPOLATIONS:
        match = re.search(pattern, message)
        if match is None:
            continue
        reason = template.format(*match.groups())
        if "no key" in reason and cfg is not None:
            near = did_you_mean(match[1], all_keys(cfg))
            if near.startswith("Did"):
                return f"{reason} {near}"
        return reason
    return f"expected {expected_type(error)}."
