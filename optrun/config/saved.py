"""The saved configuration of a run: read it, check it, and apply changes of the command line."""

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.bounded_yaml import UnboundedYamlError, interpolations, yaml_text
from optrun.base.errors import ConfigError, UnreadableFileError, first_line
from optrun.base.plain import PlainDict, flat
from optrun.config import store
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import has_key, open_prefix, raw_value, unknown_key
from optrun.config.kind import KIND, kind_of, saved_kind, with_kind
from optrun.config.overrides import assign, parse_single, refuse_names
from optrun.config.request import DEFAULT_CONFIG
from optrun.config.safety import refuse_code_and_secrets
from optrun.config.schema.run import RunConfig


def read_config(path: Path) -> PlainDict:
    """Read the `config.yaml` of a run directory, interpolations as written.

    The values are not checked against any schema.

    Raises:
        ConfigError: The file is missing or holds no YAML mapping.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(yaml_text(path))), resolve=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnreadableFileError as error:
        raise ConfigError(str(error)) from error
    except UnboundedYamlError as error:
        raise ConfigError(f"{path}: not read: {error}.") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: no valid YAML.") from error
    except Exception as error:  # PyYAML's errors share no public base with the above
        raise ConfigError(f"{path}: no valid YAML: {first_line(error)}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of configuration groups.")
    return {str(key): value for key, value in values.items()}


def refuse_interpolations(values: Mapping[str, object], where: str) -> None:
    """Refuse interpolations in a saved configuration: nothing resolves them again.

    Raises:
        ConfigError: The message names the first such key.
    """
    key = next((key for key, _ in interpolations(dict(values))), None)
    if key is not None:
        raise ConfigError(f"{where}: {key} holds `${{`: expected a resolved value.")


def with_schemas(values: Mapping[str, object], where: str) -> DictConfig:
    """Check the values of a saved configuration against the schemas of its choices.

    Args:
        values: A resolved configuration, as in `config.yaml` of a run.
        where: The file or checkpoint, for messages.

    Returns:
        The same values, typed by `RunConfig` and the schemas of the choices.

    Raises:
        ConfigError: A group is missing, a key or type does not fit, or a value is not resolved.
    """
    refuse_interpolations(values, where)
    schemas_of_groups: dict[str, type[object]] = {}
    plain_values = dict(values)
    for group, schemas in store.GROUPS.items():
        section = values.get(group)
        if not isinstance(section, Mapping) or "name" not in section:
            raise ConfigError(
                f"{where}: the group {group} is missing. Another version of optrun wrote this; use"
                " that version (summary.json names it)."
            )
        schemas_of_groups[group] = schemas[saved_kind(group, schemas, section)]
        plain_values[group] = {key: value for key, value in section.items() if key != KIND}
    try:
        typed = OmegaConf.merge(_empty_config(tuple(schemas_of_groups.items())), plain_values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{where}: {first_line(error)}. If another version of optrun wrote it, use"
            " that version (summary.json names it)."
        ) from error
    assert isinstance(typed, DictConfig)
    return typed


@cache
def _empty_config(schemas_of_groups: tuple[tuple[str, type[object]], ...]) -> DictConfig:
    """Build a configuration without values from (group, schema); cached, so never change it."""
    config: DictConfig = OmegaConf.structured(RunConfig)
    for group, schema in schemas_of_groups:
        OmegaConf.update(config, group, OmegaConf.structured(schema), merge=False, force_add=True)
    return config


def changed(hydra: Hydra, cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Apply the overrides of a command line to a saved configuration; choices come first.

    A new `scheduler.num_warmup_steps` unsets a saved `scheduler.warmup_ratio`, as on a fresh
    command line.

    Args:
        hydra: Composes choices of groups.
        cfg: The saved configuration, with schemas; not changed.
        overrides: Of the command line, without `resume` and Hydra's own.

    Returns:
        A changed copy.

    Raises:
        ConfigError: A key or choice is unknown, a value has another type, or the optimizer's saved
            options belong to another dialect.
    """
    parsed = parse_single(overrides)
    refuse_names(parsed)
    result = cfg.copy()
    # 1. The choices, since they decide which keys there are.
    for override in parsed:
        if override.key_or_group in store.GROUPS:
            _change_choice(hydra, result, override)
    # 2. The values.
    new_values = {override.key_or_group: override.value() for override in parsed}
    for override in parsed:
        key = override.key_or_group
        if key in store.GROUPS:
            continue
        if key == "optimizer.dialect":
            _refuse_other_dialect(result, override)
        # `open_prefix`: in a mapping that takes any key, such as `model.config`.
        if not has_key(result, key) and open_prefix(result, key) is None:
            raise unknown_key(result, key)
        assign(result, key, new_values[key])
    # 3. The saved length of the warm-up, if it is replaced: only one of both keys may be set.
    gives_steps = new_values.get("scheduler.num_warmup_steps") is not None
    if gives_steps and "scheduler.warmup_ratio" not in new_values:
        result.scheduler.warmup_ratio = None
    return result


def _refuse_other_dialect(cfg: DictConfig, override: Override) -> None:
    """Refuse another dialect for an optimizer with resolved options.

    A dialect decides the default of an option only while that is the interpolation
    `${dialect:1e-6}`. A run saves `1e-6`, or what its dialect has instead, so another dialect would
    change nothing.

    Args:
        cfg: The saved configuration, perhaps with another optimizer since then.
        override: `optimizer.dialect=NAME`.

    Raises:
        ConfigError: The dialect differs from the saved one.
    """
    optimizer = cfg.optimizer
    # An optimizer that this command line chose has interpolations, and takes any dialect.
    if any(OmegaConf.is_interpolation(optimizer, option) for option in optimizer):
        return
    if "dialect" in optimizer and override.value() != optimizer.dialect:
        raise ConfigError(
            f"{override.input_line}: the run began with"
            f" optimizer.dialect={optimizer.dialect or 'null'} and saved the value of each"
            " option, so another dialect would change nothing. Give the options, such as"
            " optimizer.eps=1e-8, or begin a new run."
        )


def _change_choice(hydra: Hydra, cfg: DictConfig, override: Override) -> None:
    """Replace a group of a saved configuration by another choice, with the choice's values.

    Does nothing if it has this choice already; its values then stay. `optimizer=lamb` on a run with
    lamb and `optimizer.eps=1e-8` leaves the 1e-8; on a run with adamw it gives all values of
    `conf/optimizer/lamb.yaml`.

    Args:
        hydra: Composes the choice.
        cfg: The saved configuration; changed in place.
        override: Such as `optimizer=lamb`.

    Raises:
        ConfigError: The choice is unknown.
    """
    group = override.key_or_group
    value = override.get_value_element_as_str()
    options = hydra.config_loader.get_group_options(group)
    if value not in options:
        raise no_such_choice(group, value, options)
    composed = store.without_hydra(store.compose(hydra, DEFAULT_CONFIG, [f"{group}={value}"]))
    schemas = store.GROUPS[group]
    # Both are compared: a choice of the user's builds on one of ours (its kind) by another name.
    is_same_kind = kind_of(group, schemas, composed[group]) == kind_of(group, schemas, cfg[group])
    # `???`: the name is given by the user, so that any name is one of this choice.
    is_same_name = raw_value(composed, f"{group}.name") in (cfg[group].name, "???")
    if not (is_same_kind and is_same_name):
        OmegaConf.update(cfg, group, composed[group], merge=False)


def plain(cfg: DictConfig) -> PlainDict:
    """Convert a configuration to resolved plain values, as `config.yaml` holds them.

    Enums become their names, and a choice of the user's gets the `kind` it builds on.

    Raises:
        ConfigError: A user's choice builds on none of ours, a value would be resolved once more
            when it is read, or an environment variable put a secret into it.
    """
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(values, dict)
    for group, schemas in store.GROUPS.items():
        if group in values:
            values[group] = with_kind(group, schemas, cfg[group], values[group])
    resolved = {str(key): value for key, value in values.items()}
    refuse_interpolations(resolved, "configuration")
    refuse_code_and_secrets(resolved)
    return resolved


def differences(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, tuple[Any, Any]]:
    """Map each changed dotted key to its old and new value; an absent key has the value None.

    `resume` is left out, and so is `GROUP.kind` beside a changed `GROUP.name`.

    Example:
        >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
        {'lr': (0.1, 0.2)}
        >>> differences({"lr": float("nan")}, {"lr": float("nan")})
        {}
    """
    old = flat(before)
    new = flat(after)
    changes = {}
    for key in dict.fromkeys([*old, *new]):
        if key != "resume" and not same(old.get(key), new.get(key)):
            changes[key] = (old.get(key), new.get(key))
    for group in store.GROUPS:
        if f"{group}.name" in changes:
            changes.pop(f"{group}.{KIND}", None)
    return changes


def same(before: object, after: object) -> bool:
    """Compare two values of a configuration; NaN equals NaN, since it is the same setting."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(same, before, after))
    both_nan = before != before and after != after
    return bool(before == after) or both_nan
