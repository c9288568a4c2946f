"""Put the configuration of a trunk, as overrides, under those typed for a fork."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from optrun.artifacts.forks import KEY
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.config import saved, store
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import is_open_mapping, open_prefix, raw_value
from optrun.config.kind import KIND, saved_kind
from optrun.config.literal import in_grammar
from optrun.config.original_cwd import is_path, path_keys
from optrun.config.overrides import parse
from optrun.config.request import DEFAULT_CONFIG
from optrun.config.tokens import OTHER_LENGTH, key_of
from optrun.config.types import in_yaml

OWN = (KEY, "branch_schedule", "resume", "run_name")
"""Keys that belong to one run, and are not taken from its trunk."""
_GOES_WITH = {"optimizer": ("lr",), "distributed": ("training.nproc_per_node",)}
"""Keys of the trunk that mean nothing any more where another choice of a group takes its place."""
_PLACE = ("seed", "training.per_device_train_batch_size", "training.group_by_length")
_BATCH = ("training.gradient_accumulation_steps", "training.global_batch_size")
_HARMLESS = ("task.prompt", "task.sample_tokens", "task.metrics")


def names_fork(token: str) -> bool:
    """Tell whether an override is `branch_from=...`.

    Example:
        >>> names_fork("branch_from=outputs/run"), names_fork("branch_schedule=restart")
        (True, False)
    """
    return key_of(token) == KEY


def as_overrides(hydra: Hydra, values: PlainMapping, where: str) -> list[str]:
    """Write a resolved configuration as overrides of the default one.

    A value equal to the default, or to what interpolation gives, is not written: if a branch types
    another optimizer, it gets that optimizer's default lr.

    Args:
        hydra: Composes configurations.
        values: Resolved values of a run, with every key that this version knows.
        where: What to call the run in messages.

    Raises:
        ConfigError: A value cannot be written on a command line.
    """
    values_of_trunk = {key: value for key, value in values.items() if key not in OWN}
    choices = {
        group: saved_kind(group, schemas, values_of_trunk[group])
        for group, schemas in GROUPS.items()
    }
    tokens = [f"{group}={choice}" for group, choice in choices.items()]
    for step in (
        "plain",
        "top",
        "all",
        "end",
    ):  # what follows from another value is looked at once that one is set
        composed = store.without_hydra(store.compose(hydra, DEFAULT_CONFIG, tokens))
        differing = list(_differing(saved.plain(composed), values_of_trunk))
        if not differing:
            return tokens
        for key, value in differing:
            default = raw_value(composed, key)
            follows = isinstance(default, str) and "${" in default
            if not follows or step == "all" or (step == "top" and "." not in key):
                is_open = is_open_mapping(default) or open_prefix(composed, key) is not None
                plus = "++" if is_open else ""
                tokens.append(f"~{key}" if value is _GONE else f"{plus}{key}={in_grammar(value)}")
    key, value = differing[0]
    raise ConfigError(
        f"{where}: {key}={value}: a branch cannot be begun from this value: no override writes it."
    )


_GONE = object()


def _differing(
    base: PlainMapping, target: PlainMapping, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key that differs, with its target value; `_GONE` if the target lacks it.

    Keys in `OWN`, such as `run_name`, do not count. Mappings are compared key by key, unless one of
    them is empty; NaN equals NaN.
    """
    for name in dict.fromkeys([*base, *target]):
        key = f"{prefix}{name}"
        if key in OWN or (name == KIND and prefix):
            continue
        if name not in target:
            yield key, _GONE
        elif (
            isinstance(base.get(name), Mapping)
            and isinstance(target[name], Mapping)
            and base[name]
            and target[name]
        ):
            yield from _differing(base[name], target[name], f"{key}.")
        elif name not in base or not saved.same(base[name], target[name]):
            yield key, target[name]


def under(trunk: Sequence[str], values: PlainMapping, typed: Sequence[str]) -> list[str]:
    """Put the overrides of a trunk before the typed ones, group choices first.

    Args:
        trunk: Configuration of the trunk, from `as_overrides`.
        values: Resolved values of the trunk.
        typed: Overrides of the command line; they win. A typed choice that the trunk already has
            is dropped; any other choice drops what the trunk set in that group.

    Returns:
        The overrides of the branch.
    """
    trunk_words = list(trunk)
    typed_words = list(typed)
    for token, override in zip(typed, parse(typed), strict=True):
        key = override.key_or_group
        if key in GROUPS:
            if _repeats_trunk_choice(values[key], key, override):
                typed_words.remove(token)
                continue
            trunk_words = [
                word for word in trunk_words if not _below(word, (key, *_GOES_WITH.get(key, ())))
            ]
        else:
            dropped = (key, OTHER_LENGTH.get(key, key))
            trunk_words = [word for word in trunk_words if not _below(word, dropped)]
            if key == "training.num_train_epochs":
                trunk_words.append("training.max_steps=null")
    chosen = [word for word in trunk_words if key_of(word) in GROUPS]
    return [*chosen, *(word for word in trunk_words if word not in chosen), *typed_words]


def _repeats_trunk_choice(section: Mapping[str, object], group: str, override: Override) -> bool:
    """Tell whether a typed choice, such as `optimizer=lamb`, is the choice of the trunk.

    A trunk may use a plugin's choice (`KIND`) under its own name. If optrun has a choice of that
    name, too, the typed word means optrun's.

    Args:
        section: The trunk's values of the group.
        group: Name of the group.
        override: What was typed; a sweep over several choices is never the trunk's.
    """
    name = section["name"]
    if override.is_sweep_override() or str(override.value()) != name:
        return False
    return section.get(KIND, name) == name or name not in GROUPS[group]


def _below(token: str, keys: Sequence[str]) -> bool:
    key = key_of(token)
    return any(key == other_key or key.startswith(f"{other_key}.") for other_key in keys)


def refuse_other_data_position(trunk: PlainMapping, values: PlainMapping, where: str) -> None:
    """Refuse a branch that changes the model, the data or the position in the data.

    Paths may differ: files are compared by content later, when they are read.

    Args:
        trunk: Resolved values of the trunk.
        values: Resolved values of the branch.
        where: The trunk, for the message.

    Raises:
        ConfigError: Lists every such key with both values.
    """
    fixed_keys: tuple[str, ...] = _PLACE
    if all(config["distributed"]["name"] == "none" for config in (trunk, values)):
        fixed_keys += _BATCH
    paths = path_keys(values)
    refused = []
    for key, (before, now) in saved.differences(trunk, values).items():
        if key.startswith(_HARMLESS) or is_path(key, paths):
            continue
        if key in fixed_keys or key.startswith(("model.", "task.", "data.")):
            refused.append(f"{key}={in_yaml(now)} (the trunk: {in_yaml(before)})")
    if refused:
        changed_keys = ", ".join(refused)
        raise ConfigError(
            f"{changed_keys}: a branch has the model of its trunk and its place in the data, and"
            f" takes both from {where}. Leave it out, or start a new run without branch_from."
        )
