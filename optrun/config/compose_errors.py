"""Errors of Hydra and OmegaConf during composition, as one message.

It names file, line, key and value.
"""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from optrun.base.errors import ConfigError, OptrunError, did_you_mean
from optrun.config.groups import CHOICES, GROUPS
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import all_keys, raw_value, unknown_key
from optrun.config.safety import code_refusal
from optrun.config.types import expected_type, in_yaml
from optrun.config.yaml_files import READ, entries, line_of, shown, users_files

_SHOWN = 200
"""Characters of a value in a message."""
_INTERPOLATION_ERRORS = (
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
"""Pattern of OmegaConf's message on a `${...}` without a value -> our sentence."""


def composition_error(hydra: Hydra, config_name: str, error: BaseException) -> ConfigError:
    """Turn an error of a composition into a ConfigError.

    The message names the file of the user that was being read, if there was one.

    Args:
        hydra: Knows the choices.
        config_name: Name of the composed configuration, as after `-cn`.
        error: What Hydra, OmegaConf or Python raised.
    """
    # 1. An error of OmegaConf that Hydra did not wrap: a `${...}` without a value.
    if isinstance(error, OmegaConfBaseException):
        return interpolation_error(None, error)
    # 2. A recipe, or an entry of a defaults list, that no folder has.
    if isinstance(error, MissingConfigException):
        return _missing_file_error(hydra, config_name, str(error.missing_cfg_file))
    # 3. A value of a file of the user, for which Hydra wraps the error of OmegaConf and begins with
    # the configuration that it merged: "In 'optimizer/mine': ...".
    cause = error.__cause__ or error.__context__
    config_path = re.match(r"In '([^']+)':", str(error))
    if isinstance(cause, OmegaConfBaseException) and config_path and config_path[1] in READ:
        return _merge_error(config_path[1], cause)
    # 4. Any other.
    return ConfigError(f"{_last_file()}{_describe_composition(error, cause)}")


def _describe_composition(error: BaseException, cause: BaseException | None) -> str:
    """Describe an error of a composition without the name of a file."""
    if isinstance(error, RecursionError):
        return "the defaults lists lead back to themselves. Take one entry out."
    if isinstance(error, KeyError):
        return f"hydra.job.env_copy: the environment variable {error} is not set."
    if isinstance(cause, ConfigKeyError):
        return str(unknown_key(_root_of(cause), str(cause.full_key)))
    if isinstance(cause, OmegaConfBaseException):
        return _short_message(cause)
    return _short_message(error)


def _root_of(error: OmegaConfBaseException) -> DictConfig:
    """Return the whole configuration around an error of OmegaConf."""
    root: DictConfig = error.parent_node._get_root()  # no public name for it
    return root


def _last_file() -> str:
    """Name the last file read from the user, as the start of a message; empty if there is none."""
    files = list(users_files().values())
    if files:
        return f"{shown(files[-1])}: "
    return ""


def _first_optrun_error(error: BaseException) -> OptrunError | None:
    """Return the first OptrunError among an error and its causes; None if there is none.

    OmegaConf erases `__cause__` from what it raises (unless OC_CAUSE=1), so `__context__` is
    followed, too.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OptrunError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _short_message(error: BaseException) -> str:
    """Return the message of the first OptrunError among an error and its causes.

    Without one: the first line of the error's own message, or the name of its class.
    """
    cause = _first_optrun_error(error)
    if cause is not None:
        return str(cause)
    first_line = str(error).strip().partition("\n")[0]
    return first_line or type(error).__name__


def _missing_file_error(hydra: Hydra, config_name: str, missing: str) -> ConfigError:
    """Build the error for a missing recipe, or a missing entry of a defaults list.

    Args:
        hydra: Knows the choices.
        config_name: Name of the composed configuration, as after `-cn`.
        missing: Name of the missing file for Hydra, such as `optimizer/lam`; equal to `config_name`
            for a recipe.
    """
    group, _, name = missing.rpartition("/")
    options = hydra.config_loader.get_group_options(group)
    hint = did_you_mean(name, [option for option in options if option != name])
    if missing != config_name.strip("/"):
        message = f"{_last_file()}{group or 'defaults'}={name}: no such {group or 'configuration'}."
        return ConfigError(f"{message} {hint}".rstrip())
    if Path(f"{config_name}.yaml").is_file():
        hint = f"Did you mean -cn {config_name}.yaml?"
    return ConfigError(
        f"-cn {config_name}: no such recipe. {hint} For a file of your own write -cn FILE.yaml"
    )


def _merge_error(config_path: str, cause: OmegaConfBaseException) -> ConfigError:
    """Build the error for a file with an unknown key or a value of the wrong type.

    Args:
        config_path: Name of the file for Hydra, such as `optimizer/mine`.
        cause: What OmegaConf raised. It has no key if a scalar stands in place of a mapping, or a
            mapping in place of a scalar.
    """
    path = READ[config_path]
    key = str(cause.full_key or "")
    if not key:
        return _scalar_error(config_path, _root_of(cause))
    if isinstance(cause, ConfigKeyError):
        message = _describe_unknown_key(config_path, key, cause)
    else:
        text = str(in_yaml(cause.value)).replace("None", "null")
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN]}..."
        message = f"{key}={text}: expected {expected_type(cause)}."
    return ConfigError(f"{shown(path, line_of(path, key, config_path))}: {message}")


def _scalar_error(config_path: str, root: DictConfig) -> ConfigError:
    """Build the error for the first value of a file that should be a mapping or a list.

    Without such a value, a mapping or list stands where the configuration has a scalar.

    Args:
        config_path: Name of the file for Hydra.
        root: The configuration into which the file was merged.
    """
    path = READ[config_path]
    for key, node, line in entries(path, config_path):
        default = raw_value(root, key)
        text = node.value if isinstance(node, yaml.ScalarNode) else "..."
        assignment = f"{shown(path, line)}: {key}={text}"
        if isinstance(default, DictConfig) and not isinstance(node, yaml.MappingNode):
            hint = ""
            if key in GROUPS:
                hint = f" Choose it in the defaults list: `- override {key}: {text}`."
            return ConfigError(f"{assignment}: expected a mapping.{hint}")
        if isinstance(default, ListConfig) and not isinstance(node, yaml.SequenceNode):
            return ConfigError(f"{assignment}: expected a list, such as [a,b].")
    return ConfigError(
        f"{shown(path)}: a value is a mapping or a list, where the configuration has none."
    )


def _describe_unknown_key(config_path: str, key: str, cause: OmegaConfBaseException) -> str:
    """Describe an unknown key of a file, as a message without the file.

    The key is one of three: `_target_`, which names code; a key of a group whose choice the file
    does not build on; or a misspelt key.

    Args:
        config_path: Name of the file for Hydra, such as `optimizer/mine`.
        key: The key, dotted.
        cause: What OmegaConf raised for it.
    """
    group, _, leaf = key.rpartition(".")
    if leaf == "_target_":
        values = {name: node.value for name, node, _ in entries(READ[config_path], config_path)}
        return str(code_refusal(key, values.get(key)))
    group_folder = group.replace(".", "/")
    choices = CHOICES.get(group_folder, {})
    is_file_of_group = config_path.startswith(f"{group_folder}/")
    builds_on_choice = cause.object_type in choices.values()
    if choices and is_file_of_group and not builds_on_choice:
        return (
            f"{key}: the defaults list names no choice of {group}. Begin with the one to change,"
            f" such as `defaults: [{next(iter(choices))}, _self_]`."
        )
    return str(unknown_key(_root_of(cause), key))


def interpolation_error(cfg: DictConfig | None, error: OmegaConfBaseException) -> ConfigError:
    """Build the error for an interpolation without a value, or with one of the wrong type.

    The message is such as `lr=${nothing}: there is no key nothing.` Any other error becomes its
    first line, or the message of the OptrunError behind it.

    Args:
        cfg: The configuration of the interpolation, to suggest keys; None if unknown.
        error: What OmegaConf raised.
    """
    message = _short_message(error)
    key = str(error.full_key or "")
    if not key or not isinstance(error, InterpolationResolutionError):
        return ConfigError(message)
    if _first_optrun_error(error) is None:
        message = _describe_interpolation(cfg, message, error)
    text = "${...}"
    if error.parent_node is not None:
        text = raw_value(_root_of(error), key) or text
    return ConfigError(f"{key}={text}: {message}")


def _describe_interpolation(
    cfg: DictConfig | None, message: str, error: OmegaConfBaseException
) -> str:
    """Describe why a `${...}` has no value, or one of the wrong type.

    An unknown key gets the nearest keys of the configuration.

    Args:
        cfg: The configuration, to suggest keys; None if unknown.
        message: The first line of the error, from OmegaConf.
        error: What OmegaConf raised.

    Example:
        >>> message = "Environment variable 'HOST' not found"
        >>> _describe_interpolation(None, message, OmegaConfBaseException(message))
        'the environment variable HOST is not set. Set it, or write ${oc.env:HOST,DEFAULT}.'
    """
    for pattern, template in _INTERPOLATION_ERRORS:
        match = re.search(pattern, message)
        if match is None:
            continue
        reason = template.format(*match.groups())
        is_unknown_key = reason.startswith("there is no key")
        if is_unknown_key and cfg is not None:
            return f"{reason} {did_you_mean(match[1], all_keys(cfg), '')}".rstrip()
        return reason
    return f"expected {expected_type(error)}."
