"""The configuration a run was started with, taken up again with changes from the command line."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.bounded_yaml import UnboundedYamlError, interpolations, yaml_text
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.plain import PlainDict, flat
from optrun.config import store
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import node_at, open_prefix, unknown_key
from optrun.config.kind import KIND, kind_of, saved_kind, with_kind
from optrun.config.overrides import assign, parse_single, refuse_names
from optrun.config.request import DEFAULT_CONFIG
from optrun.config.safety import refuse_code_and_secrets
from optrun.config.schema.run import RunConfig


def read_config(path: Path) -> PlainDict:
    """Read a `config.yaml` of a run directory.

    Raises:
        ConfigError: It is missing or no YAML mapping.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(yaml_text(path))), resolve=False)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnreadableFileError as error:
        raise ConfigError(str(error)) from error
    except UnboundedYamlError as error:
        raise ConfigError(f"{path}: {error}: not read.") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: no valid YAML.") from error
    except Exception as error:  # PyYAML's errors share no public base with the above
        raise ConfigError(f"{path}: no valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of configuration groups.")
    return {str(key): value for key, value in values.items()}


def refuse_interpolations(values: Mapping[str, object], where: str) -> None:
    """Refuse interpolations in a saved configuration: it is never resolved again.

    Raises:
        ConfigError: Naming the first such key.
    """
    key = next((key for key, _ in interpolations(dict(values))), None)
    if key is not None:
        raise ConfigError(f"{where}: {key} holds `${{`: expected a resolved value.")


def with_schemas(values: Mapping[str, object], where: str) -> DictConfig:
    """Put plain values under their dataclasses.

    Args:
        values: A resolved configuration.
        where: What it is, for messages.

    Raises:
        ConfigError: A group is missing, a key or type does not fit, or a value is not resolved.
    """
    refuse_interpolations(values, where)
    sections = dict(values)
    chosen: dict[str, type[object]] = {}
    for group, schemas in store.GROUPS.items():
        section = sections.get(group)
        if not isinstance(section, Mapping) or "name" not in section:
            raise ConfigError(
                f"{where}: group {group} is missing: this was not written by this version of"
                " optrun."
            )
        chosen[group] = schemas[saved_kind(group, schemas, section)]
        sections[group] = {key: value for key, value in section.items() if key != KIND}
    try:
        merged = OmegaConf.merge(_tree(tuple(chosen.items())), sections)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{where}: {str(error).splitlines()[0]}. If another version of optrun wrote it, use"
            " that version (summary.json names it)."
        ) from error
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _tree(chosen: tuple[tuple[str, type[object]], ...]) -> DictConfig:
    """Put schemas at their keys; not to be changed."""
    tree: DictConfig = OmegaConf.structured(RunConfig)
    for key, schema in chosen:
        OmegaConf.update(tree, key, OmegaConf.structured(schema), merge=False, force_add=True)
    return tree


def changed(hydra: Hydra, cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Apply the overrides of a command line to a saved configuration.

    Args:
        hydra: Composes choices of groups.
        cfg: The saved configuration, with schemas.
        overrides: Of the command line; `resume` and Hydra's own are the caller's.

    Raises:
        ConfigError: As on a fresh command line.
    """
    result = cfg.copy()
    parsed = parse_single(overrides)
    refuse_names(parsed)
    for override in (override for override in parsed if override.key_or_group in store.GROUPS):
        _change_choice(hydra, result, override)
    for override in (override for override in parsed if override.key_or_group not in store.GROUPS):
        key = override.key_or_group
        if key == "optimizer.dialect":
            _refuse_other_dialect(result, override)
        if node_at(result, key) is None and open_prefix(result, key) is None:
            raise unknown_key(result, key)
        assign(result, key, override.value())
    new_values = {override.key_or_group: override.value() for override in parsed}
    if (
        new_values.get("scheduler.num_warmup_steps") is not None
        and "scheduler.warmup_ratio" not in new_values
    ):
        result.scheduler.warmup_ratio = (
            None  # the default that was written down gives way, as on a fresh line
        )
    return result


def _refuse_other_dialect(cfg: DictConfig, override: Override) -> None:
    """Refuse another dialect for a saved configuration: its options are resolved."""
    saved_optimizer = cfg.optimizer
    resolved = not any(
        saved_optimizer._get_node(name)._is_interpolation() for name in saved_optimizer
    )
    if resolved and "dialect" in saved_optimizer and override.value() != saved_optimizer.dialect:
        raise ConfigError(
            f"{override.input_line}: the run's configuration holds the options of"
            f" optimizer.dialect={saved_optimizer.dialect or 'null'}, and another name changes none"
            " of them. Give the options themselves, such as optimizer.eps=1e-8, or begin a new run."
        )


def _change_choice(hydra: Hydra, cfg: DictConfig, override: Override) -> None:
    group = override.key_or_group
    value = override.get_value_element_as_str()
    options = hydra.config_loader.get_group_options(group)
    if value not in options:
        raise no_such_choice(group, value, options)
    chosen = store.without_hydra(store.compose(hydra, DEFAULT_CONFIG, [f"{group}={value}"]))
    kinds = [kind_of(group, store.GROUPS[group], tree[group]) for tree in (chosen, cfg)]
    same_name = OmegaConf.to_container(chosen[group]).get("name") in (cfg[group].name, "???")  # type: ignore[union-attr]
    if kinds[0] == kinds[1] and same_name:
        return  # the choice that stands already, with the values that were given to it then
    OmegaConf.update(cfg, group, chosen[group], merge=False)


def plain(cfg: DictConfig) -> PlainDict:
    """Convert to resolved plain values: names for Enums, and the kind of a choice of the user's.

    Raises:
        ConfigError: A choice that is built on none of ours, a value that would be resolved once
            more when read, or a secret that an environment variable gave.
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
    """Map each changed key to its old and new value; an absent key is None.

    Example:
        >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
        {'lr': (0.1, 0.2)}
        >>> differences({"lr": float("nan")}, {"lr": float("nan")})
        {}
    """
    old = flat(before)
    new = flat(after)
    changes = {
        name: (old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name != "resume" and not same(old.get(name), new.get(name))
    }
    for group in store.GROUPS:
        if f"{group}.name" in changes:  # which says it already
            changes.pop(f"{group}.{KIND}", None)
    return changes


def same(before: object, after: object) -> bool:
    """Compare two values for equality, NaN and NaN among them.

    A configuration says a value, not its result.
    """
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(same, before, after))
    return bool(before == after) or (before != before and after != after)
