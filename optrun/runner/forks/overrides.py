"""Put the configuration of a parent checkpoint, as overrides, under those typed for a branch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from optrun.artifacts.forks import KEY
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping, is_inside_any
from optrun.config import saved, store
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import is_open_mapping, open_prefix, raw_value
from optrun.config.kind import KIND, saved_kind
from optrun.config.literal import in_grammar
from optrun.config.original_cwd import path_keys
from optrun.config.overrides import parse
from optrun.config.request import DEFAULT_CONFIG
from optrun.config.tokens import OTHER_LENGTH, key_of
from optrun.config.types import in_yaml

OWN = (KEY, "branch_schedule", "resume", "run_name")
"""Keys that belong to one run, and are not taken from its parent checkpoint."""
_GOES_WITH = {"optimizer": ("lr",), "distributed": ("training.nproc_per_node",)}
"""Keys of the parent checkpoint that a branch drops if it types another choice of the group."""
_POSITION = ("seed", "training.per_device_train_batch_size", "training.group_by_length")
_BATCH = ("training.gradient_accumulation_steps", "training.global_batch_size")
_HARMLESS = ("task.prompt", "task.sample_tokens", "task.metrics")


def is_branch_from(token: str) -> bool:
    """Tell whether an override is `branch_from=...`.

    Example:
        >>> is_branch_from("branch_from=outputs/run"), is_branch_from("branch_schedule=restart")
        (True, False)
    """
    return key_of(token) == KEY


def as_overrides(hydra: Hydra, values: PlainMapping, where: str) -> list[str]:
    """Write a resolved configuration as overrides of the default one.

    A value that the default configuration or an interpolation gives anyway is not written: if a
    branch types another optimizer, it gets that optimizer's default lr.

    An interpolated value may follow from another value that differs, and need not be written once
    that one is. So overrides are added in three passes, and each composes what is there so far:

    1. values that the default configuration holds plainly,
    2. interpolated values at the top level, such as lr,
    3. all that still differ.

    Args:
        hydra: Composes configurations.
        values: Resolved values of a run, with every key that this version knows.
        where: What to call the run in messages.

    Returns:
        The choice of each group, as `optimizer=lamb`, then single values in the order of the
        passes. Keys in `OWN` are left out.

    Raises:
        ConfigError: A value cannot be written on a command line.
    """
    values_of_trunk = {key: value for key, value in values.items() if key not in OWN}
    choices = {
        group: saved_kind(group, schemas, values_of_trunk[group])
        for group, schemas in GROUPS.items()
    }
    tokens = [f"{group}={choice}" for group, choice in choices.items()]
    # Each pass composes the overrides so far, and adds what still differs. The last one only
    # compares.
    for writes in ("plain values", "top-level values", "all values", "nothing, only compares"):
        composed = store.without_hydra(store.compose(hydra, DEFAULT_CONFIG, tokens))
        differing = list(_differing(saved.plain(composed), values_of_trunk))
        if not differing:
            return tokens
        for key, value in differing:
            # The value in the composition, not resolved; None: it has no such key.
            default = raw_value(composed, key)
            is_interpolated = isinstance(default, str) and "${" in default
            if is_interpolated and writes == "plain values":
                continue
            if is_interpolated and writes == "top-level values" and "." in key:
                continue
            # A mapping that takes any key, and what is inside of one, needs `++`.
            takes_any_key = is_open_mapping(default) or open_prefix(composed, key) is not None
            tokens.append(_as_override(key, value, takes_any_key=takes_any_key))
    key, value = differing[0]
    raise ConfigError(
        f"{where}: {key}={value}: this value cannot be written on a command line, so no branch can"
        " start from it. Start a new run instead."
    )


_GONE = object()


def _as_override(key: str, value: object, *, takes_any_key: bool) -> str:
    """Write one value as an override; `_GONE` deletes the key."""
    if value is _GONE:
        return f"~{key}"
    plus = "++" if takes_any_key else ""
    return f"{plus}{key}={in_grammar(value)}"


def _differing(
    base: PlainMapping, target: PlainMapping, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key that differs, with its target value; `_GONE` if the target lacks it.

    Keys in `OWN`, such as `run_name`, do not count, and neither does `kind` of a group. Mappings
    are compared key by key, unless one of them is empty; NaN equals NaN.

    Args:
        base: Resolved values.
        target: Resolved values that `base` should have.
        prefix: The keys above, with a dot at the end.

    Example:
        >>> base = {"lr": 0.1, "clip": {"name": "none", "eps": 0}, "run_name": "a"}
        >>> target = {"lr": 0.2, "clip": {"name": "norm", "eps": 0}, "run_name": "b"}
        >>> list(_differing(base, target))
        [('lr', 0.2), ('clip.name', 'norm')]
    """
    for name in dict.fromkeys([*base, *target]):
        key = f"{prefix}{name}"
        if key in OWN or (name == KIND and prefix):
            continue
        if name not in target:
            yield key, _GONE
            continue
        before = base.get(name)
        after = target[name]
        if isinstance(before, Mapping) and isinstance(after, Mapping) and before and after:
            yield from _differing(before, after, f"{key}.")
        elif name not in base or not saved.same(before, after):
            yield key, after


def merge_trunk_overrides(
    trunk: Sequence[str], values: PlainMapping, typed: Sequence[str]
) -> list[str]:
    """Merge the overrides of a parent checkpoint with the typed ones; the typed ones win.

    A typed value replaces that of the parent checkpoint; steps and epochs replace each other. A
    typed choice of a group drops all that the parent checkpoint set in the group, and its lr for
    another optimizer, unless both choose the same: then only the typed choice is dropped.

    Args:
        trunk: Configuration of the parent checkpoint, from `as_overrides`.
        values: Resolved values of the parent checkpoint.
        typed: Overrides of the command line.

    Returns:
        The overrides of the branch: choices of the parent checkpoint, its other values, then the
        typed ones.

    Example:
        >>> trunk = ["optimizer=lamb", "seed=3", "lr=0.01", "optimizer.eps=0.1"]
        >>> values = {"optimizer": {"name": "lamb"}}
        >>> merge_trunk_overrides(trunk, values, ["optimizer=adamw"])
        ['seed=3', 'optimizer=adamw']
        >>> merge_trunk_overrides(trunk, values, ["optimizer=lamb", "seed=4"])
        ['optimizer=lamb', 'lr=0.01', 'optimizer.eps=0.1', 'seed=4']
    """
    trunk_tokens = list(trunk)
    typed_tokens: list[str] = []
    for token, override in zip(typed, parse(typed), strict=True):
        key = override.key_or_group
        if key in GROUPS and _repeats_trunk_choice(values[key], key, override):
            continue
        typed_tokens.append(token)
        # What the typed override replaces: a group with all of its keys, or a key; and what goes
        # with it, such as lr with the optimizer, or epochs with steps.
        if key in GROUPS:
            replaced = (key, *_GOES_WITH.get(key, ()))
        else:
            replaced = (key, OTHER_LENGTH.get(key, key))
        trunk_tokens = [word for word in trunk_tokens if not is_inside_any(key_of(word), replaced)]
        if key == "training.num_train_epochs":  # epochs count only without a number of steps
            trunk_tokens.append("training.max_steps=null")
    choices = [token for token in trunk_tokens if key_of(token) in GROUPS]
    other_values = [token for token in trunk_tokens if token not in choices]
    return [*choices, *other_values, *typed_tokens]


def _repeats_trunk_choice(section: Mapping[str, object], group: str, override: Override) -> bool:
    """Tell whether a typed choice, such as `optimizer=lamb`, is the parent checkpoint's.

    A user's own YAML may give a registered choice another name: then `name` is the user's and
    `kind` the registered one. If a registered choice has that name, too, the typed word means that
    choice, and not the user's.

    Args:
        section: The parent checkpoint's values of the group, with `name` and perhaps `kind`.
        group: Name of the group.
        override: What was typed; a sweep over several choices is never the parent checkpoint's.
    """
    name = section["name"]
    if override.is_sweep_override() or str(override.value()) != name:
        return False
    # Without `kind`, or with an equal one, `name` is the registered choice itself.
    return section.get(KIND, name) == name or name not in GROUPS[group]


def refuse_other_data_position(trunk: PlainMapping, values: PlainMapping, where: str) -> None:
    """Refuse a branch with another model, other data or another position in the data.

    Keys of `model`, `task` and `data` count, and those that decide which examples a step sees.
    Paths may differ: files are compared by content later, when they are read. If one of the two
    runs on several ranks, accumulation and global batch may differ: the examples of a step are
    compared later.

    Args:
        trunk: Resolved values of the parent checkpoint.
        values: Resolved values of the branch.
        where: The parent checkpoint, for the message.

    Raises:
        ConfigError: The message lists every changed key with both values.
    """
    fixed_keys: tuple[str, ...] = _POSITION
    if all(config["distributed"]["name"] == "none" for config in (trunk, values)):  # one process
        fixed_keys += _BATCH
    paths = path_keys(values)
    refused = []
    for key, (before, now) in saved.differences(trunk, values).items():
        if key.startswith(_HARMLESS) or is_inside_any(key, paths):
            continue
        if key in fixed_keys or key.startswith(("model.", "task.", "data.")):
            refused.append(f"{key}={in_yaml(now)} (the trunk: {in_yaml(before)})")
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: a branch takes its model and its position in the data from its"
            f" trunk {where}. Leave these keys out, or start a new run without branch_from."
        )
