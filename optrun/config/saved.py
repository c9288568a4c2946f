"""The configuration a run was started with, taken up again with changes from the command line."""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.bounded_yaml import ENVIRONMENT as ENVIRONMENT
from optrun.base.bounded_yaml import (
    REFERENCE,
    UnboundedYamlError,
    interpolations,
    unresolved_key,
    yaml_text,
)
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config import store
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import node_at, open_prefix, unknown_key
from optrun.config.kind import KIND, kind_of, saved_kind, with_kind
from optrun.config.overrides import assign, parse, quoted, refuse_names, refuse_twice
from optrun.config.request import DEFAULT_CONFIG
from optrun.config.schema.run import RunConfig

_TO_KEY = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_LOCAL_TRACKERS = ("none", "tensorboard")
_SHORTEST = 4
"""Characters of a text that is looked for in messages: a shorter one is part of other words."""


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
    """Refuse an interpolation in a resolved configuration.

    `${oc.env:...}` may be a secret, if no start noted it.

    Raises:
        ConfigError: Naming the first such key.
    """
    key = unresolved_key(values)
    if key is not None:
        raise ConfigError(
            f"{where}: {key} holds `${{`. Expected a resolved value, or ${{oc.env:NAME}} or"
            " ${oc.env:NAME,DEFAULT} as the run was given it: nothing else is resolved again."
        )


def with_schemas(values: Mapping[str, object], where: str) -> DictConfig:
    """Put plain values under their dataclasses.

    Args:
        values: A resolved configuration.
        where: What it is, for messages.

    Raises:
        ConfigError: A group is missing, a key or type does not fit, or a value is not resolved.
    """
    refuse_interpolations(values, where)
    sections = {key: value for key, value in values.items() if key != ENVIRONMENT}
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
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error
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
    """Change a saved configuration as the command line says.

    Args:
        hydra: Composes choices of groups.
        cfg: The saved configuration, with schemas.
        overrides: Of the command line; `resume` and Hydra's own are the caller's.

    Raises:
        ConfigError: As on a fresh command line.
    """
    result = cfg.copy()
    parsed = parse(overrides)
    refuse_twice(parsed)
    refuse_names(parsed)
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: several values are a sweep, which cannot be resumed as one"
                " run."
            )
        if override.is_delete():
            raise ConfigError(
                f"{override.input_line}: what a run has cannot be taken away from it; give it a"
                " value."
            )
    for override in (override for override in parsed if override.key_or_group in store.GROUPS):
        _change_choice(hydra, result, override)
    for override in (override for override in parsed if override.key_or_group not in store.GROUPS):
        key = override.key_or_group
        if key == "optimizer.dialect":
            _refuse_other_dialect(result, override)
        if node_at(result, key) is None and open_prefix(result, key) is None:
            raise unknown_key(result, key)
        assign(result, key, override.value())
    given = {override.key_or_group: override.value() for override in parsed}
    if (
        given.get("scheduler.num_warmup_steps") is not None
        and "scheduler.warmup_ratio" not in given
    ):
        result.scheduler.warmup_ratio = (
            None  # the default that was written down gives way, as on a fresh line
        )
    return result


def _refuse_other_dialect(cfg: DictConfig, override: Override) -> None:
    """Refuse another dialect for a saved configuration, whose options it would not change."""
    own = cfg.optimizer
    resolved = not any(own._get_node(name)._is_interpolation() for name in own)
    if resolved and "dialect" in own and override.value() != own.dialect:
        raise ConfigError(
            f"{override.input_line}: the options of optimizer.dialect={own.dialect or 'null'} stand"
            " in the run's configuration, and another name changes none of them. Give the options"
            " themselves, such as optimizer.eps=1e-8, or begin a new run."
        )


def _change_choice(hydra: Hydra, cfg: DictConfig, override: Override) -> None:
    group, value = override.key_or_group, override.get_value_element_as_str()
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
    """Convert to resolved plain values; names for Enums.

    The kind of each choice that has another name.

    A text that comes from an environment variable may be a secret, and values are written into
    files: it stays the reference that was given, and its key is noted.

    Raises:
        ConfigError: A choice that is built on none of ours, or a value that would be resolved once
            more when read.
    """
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(values, dict)
    for group, schemas in store.GROUPS.items():
        if group in values:
            values[group] = with_kind(group, schemas, cfg[group], values[group])
    resolved = {str(key): value for key, value in values.items()}
    noted: list[str] = []
    resolved = {
        key: _referring(cfg, cfg._get_node(key), value, key, noted)
        for key, value in resolved.items()
    }
    if noted:
        resolved[ENVIRONMENT] = noted
    refuse_interpolations(resolved, "configuration")
    return resolved


def _referring(cfg: DictConfig, node: object, value: object, key: str, noted: list[str]) -> Any:
    """Put the references to environment variables back into a resolved value.

    Args:
        cfg: The whole configuration.
        node: What stands there.
        value: What it comes to; a text of it becomes the reference it was.
        key: Dotted.
        noted: Takes the keys of references.
    """
    while isinstance(node, Node) and (found := _TO_KEY.fullmatch(str(node._value()))):
        node = node_at(cfg, found[1])
    content = node._value() if isinstance(node, Node) else None
    if isinstance(value, dict) and isinstance(content, dict):
        return {
            name: _referring(cfg, content.get(name), item, f"{key}.{name}", noted)
            for name, item in value.items()
        }
    if isinstance(value, list) and isinstance(content, list):
        return [
            _referring(cfg, content[at], item, f"{key}.{at}", noted)
            for at, item in enumerate(value)
        ]
    if not isinstance(value, str) or not isinstance(content, str):
        return value
    text = content
    while (wider := _TO_KEY.sub(lambda found: _text_at(cfg, found), text)) != text:
        text = wider
    if "oc.env:" not in text or "${" not in text:
        return value
    noted.append(key)
    return text


def _text_at(cfg: DictConfig, found: re.Match[str]) -> str:
    node = node_at(cfg, found[1])
    return str(
        node._value() if isinstance(node, Node) and not isinstance(node, Container) else found[0]
    )


def references_in(values: Mapping[str, object]) -> dict[str, str]:
    """Collect the references of a configuration to environment variables: name -> reference."""
    texts = "".join(text for _, text in interpolations(dict(values)))
    return {found[1]: found[0] for found in REFERENCE.finditer(texts)}


def without_secrets(text: str, references: Mapping[str, str]) -> str:
    """Put references to variables in the place of what they stand for.

    Where a message repeats that.
    """
    secrets = {os.environ.get(name, ""): reference for name, reference in references.items()}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, secrets[secret]) if len(secret) >= _SHORTEST else text
    return text


def variables_asked(values: PlainMapping, where: str, typed: Sequence[str]) -> list[str]:
    """Name the variables that a saved configuration asks for.

    Whoever wrote it may mean a secret of whoever runs it.

    Args:
        values: Of a run.
        where: What it is, for messages.
        typed: The overrides that a person typed; a variable in one of these was asked for by them.

    Returns:
        A sentence for each key.

    Raises:
        ConfigError: It would be sent to a tracker on another machine.
    """
    given = {override.key_or_group: override.value() for override in parse(typed)}
    tracking = values.get("tracking", {})
    tracker = given.get(
        "tracking",
        saved_kind("tracking", store.GROUPS["tracking"], tracking) if tracking else "none",
    )
    notes = []
    for key, text in interpolations(dict(values)):
        if any(key == own or key.startswith(f"{own}.") for own in given):
            continue
        if (key == "run_name" or key.startswith("tracking.")) and tracker not in _LOCAL_TRACKERS:
            example = shlex.quote(f"{key}={quoted(text)}")
            raise ConfigError(
                f"{where}: {key}={text}: tracking={tracker} may send this to another machine, and a"
                f" file may not ask for that. Give {example} on the command line if you mean it."
            )
        names = ", ".join(dict.fromkeys(found[1] for found in REFERENCE.finditer(text)))
        notes.append(f"{where}: {key} takes the environment variable {names}")
    return notes


def flat(values: Mapping[str, object], prefix: str = "") -> PlainDict:
    """Map dotted names to leaf values; lists are leaves.

    Example:
        >>> flat({"lr": 0.1, "clip": {"max_norm": 1.0}})
        {'lr': 0.1, 'clip.max_norm': 1.0}
    """
    found: PlainDict = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{name}."))
        else:
            found[name] = value
    return found


def differences(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, tuple[Any, Any]]:
    """Map dotted names whose values differ to both values; a key that is absent counts as None.

    Example:
        >>> differences({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
        {'lr': (0.1, 0.2)}
        >>> differences({"lr": float("nan")}, {"lr": float("nan")})
        {}
    """
    old = flat(before)
    new = flat(after)
    found = {
        name: (old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name not in ("resume", ENVIRONMENT) and not same(old.get(name), new.get(name))
    }
    for group in store.GROUPS:
        if f"{group}.name" in found:  # which says it already
            found.pop(f"{group}.{KIND}", None)
    return found


def same(before: object, after: object) -> bool:
    """Compare two values for equality, NaN and NaN among them.

    A configuration says a value, not its result.
    """
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(same, before, after))
    return bool(before == after) or (before != before and after != after)
