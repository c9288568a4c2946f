"""Names of configuration keys, and suggestions for unknown ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.config.foreign_names import explain_answer, translate_key
from optrun.config.groups import GROUPS, choices_with, keys_of
from optrun.config.schema.run import RunConfig
from optrun.config.schema.sweeper import INSTEAD as SWEEPER_INSTEAD
from optrun.config.schema.sweeper import OptunaConfig

_TOP_LEVEL = tuple(field.name for field in fields(RunConfig) if field.name not in GROUPS)
"""Keys of a run that belong to no group."""


def as_key(option: str, verb_keys: Iterable[str] = (), *, value: str = "") -> str:
    """Say how to write an option of another program here; empty if unknown.

    Args:
        option: Such as `--learning-rate`.
        verb_keys: What a verb takes besides configuration keys.
        value: The word after the option, if there is one.

    Example:
        >>> as_key("--learning-rate")
        ' Here it is written lr=VALUE.'
        >>> as_key("--optim"), as_key("--max_steps=9")
        (' Here it is written optimizer=NAME.', ' Here it is written training.max_steps=9.')
        >>> as_key("--lr", value="1e-3")
        ' Here it is written lr=1e-3.'
        >>> as_key("--do-eval")
        ' Not offered: optrun trains and evaluates, optrun evaluate RUN_DIR evaluates alone.'
        >>> as_key("--nothing-like-it")
        ''
    """
    name, _, attached = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    value = attached or value or "VALUE"
    if name in GROUPS:
        return f" Here it is written {name}={value if value != 'VALUE' else 'NAME'}."
    if name in (*_TOP_LEVEL, *verb_keys):
        return f" Here it is written {name}={value}."
    answer = translate_key(name)
    if answer is not None:
        sentence = explain_answer(answer, as_option=True)
        return f" {sentence.replace('=VALUE.', f'={value}.')}"
    keys = keys_called(name)
    if keys:
        return f" Here it is written {' or '.join(f'{key}={value}' for key in keys)}."
    return ""


def word_after(option: str, argv: Sequence[str]) -> str:
    """Return the value that follows an option on the command line; empty if none does.

    Example:
        >>> word_after("--lr", ["--lr", "1e-3"]), word_after("--lr", ["--lr", "seed=1"])
        ('1e-3', '')
    """
    following = argv[argv.index(option) + 1 :] if option in argv else ()
    if not following or following[0].startswith("--") or "=" in following[0]:
        return ""
    return following[0]


def keys_called(name: str) -> list[str]:
    """List the dotted keys of any choice with this name at their end.

    Example:
        >>> keys_called("max_steps"), keys_called("training.max_steps"), keys_called("nothing")
        (['training.max_steps'], ['training.max_steps'], [])
    """
    every = sorted(key for group in GROUPS for key in keys_of(group))
    return [key for key in every if name in (key, key.partition(".")[2]) and name != "name"]


def open_prefix(base: DictConfig, key: str) -> str | None:
    """Return the open mapping around a key, such as `model.config` for `model.config.n_layer`.

    An open mapping takes any key. None if the key is in no such mapping.
    """
    pieces = key.split(".")
    for end in range(1, len(pieces)):
        prefix = ".".join(pieces[:end])
        node = OmegaConf.select(
            base, prefix, throw_on_missing=False
        )  # also in a list: `param_groups.rules.0`
        if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
            return prefix
    return None


def all_keys(base: DictConfig) -> list[str]:
    """List every dotted key of a configuration, inner ones too."""
    return [key for key, _ in _nodes(base)]


def missing_keys(base: DictConfig) -> list[str]:
    """List every dotted key without a value, sorted; interpolations count as values."""
    return sorted(key for key, node in _nodes(base) if node._is_missing())


def _nodes(base: DictConfig, prefix: str = "") -> Iterator[tuple[str, Node]]:
    for name, node in vars(base)["_content"].items():
        key = f"{prefix}{name!s}"
        yield key, node
        if isinstance(node, DictConfig) and isinstance(node._content, dict):
            yield from _nodes(node, f"{key}.")


def node_at(root: DictConfig, key: str) -> Any:
    """Return the node at a dotted key, with interpolations unresolved; None if there is none."""
    node: Any = root
    for piece in key.split("."):
        is_mapping = isinstance(node, DictConfig) and isinstance(
            node._content, dict
        )  # else null, ??? or ${...}
        node = node._get_node(piece, validate_access=False) if is_mapping else None
    return node


def unknown_key(base: DictConfig, key: str) -> ConfigError:
    """Build the error for an unknown key.

    It suggests, in this order: `--plugin` for code; the outer mapping that another choice has; the
    name of the key here, for a key of another program; the nearest keys.

    Args:
        base: The composed configuration.
        key: The unknown dotted key.
    """
    keys = all_keys(base)
    if key.startswith("hydra."):
        return unknown_hydra_key(keys, key)
    head, _, leaf = key.rpartition(".")
    group, *inner = key.split(".")
    if group in ("plugin", "plugins"):
        return ConfigError(
            f"{key}: code is named on the command line alone: --plugin FILE.py or --plugin MODULE."
        )
    mapping = f"{group}.{inner[0]}" if len(inner) > 1 and group in GROUPS else ""
    if mapping and mapping not in keys and choices_with(group, inner[0]):
        return unknown_key(base, mapping)  # a mapping that another choice has
    owners = choices_with(head, leaf) if head in GROUPS else []
    answer = translate_key(key)
    if answer is None or owners:
        return _no_key(base, keys, key, owners)
    return ConfigError(f"{key}: no such key. {explain_answer(answer)}")


def _no_key(base: DictConfig, keys: list[str], key: str, owners: list[str]) -> ConfigError:
    """Build the error for a key without a known translation.

    Args:
        base: The configuration.
        keys: Every dotted key of it.
        key: The one that was given.
        owners: Other choices of its group, which have it.
    """
    head, _, leaf = key.rpartition(".")
    if head and head in keys:
        return _not_among(base, keys, head, leaf, owners)
    hint = did_you_mean(key, [*keys, *keys_called(leaf)], "`optrun --cfg job` shows every key.")
    return ConfigError(f"{key}: no such key. {hint}")


def _not_among(
    base: DictConfig, keys: list[str], head: str, leaf: str, choices_with_key: list[str]
) -> ConfigError:
    """Build the error for a key that the chosen choice of its group does not have.

    Args:
        base: The composed configuration.
        keys: Every dotted key of it.
        head: The group, or the dotted mapping, such as `optimizer`.
        leaf: The unknown name in it.
        choices_with_key: Other choices of the group that have the key.
    """
    siblings = [name[len(head) + 1 :] for name in keys if name.startswith(f"{head}.")]
    siblings = [name for name in siblings if "." not in name and name != "name"]
    elsewhere = [name for name in _TOP_LEVEL if name == leaf] or keys_called(leaf)
    close = [*(f"{head}.{name}" for name in nearest(leaf, siblings)), *elsewhere]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    within = [name for name in keys if name.startswith(f"{head}.") and name.endswith(f".{leaf}")]
    if choices_with_key:
        owners = " or ".join(f"{head}={choice}" for choice in choices_with_key)
        hint = f"Did you mean {' or '.join(within)}? " if within else f"It belongs to {owners}. "
    elif head == "model" and "config" in siblings and not close:
        hint = f"Options of transformers' configuration are model.config.KEY: model.config.{leaf}. "
    chosen = f"{head}={OmegaConf.select(base, f'{head}.name')}" if head in GROUPS else head
    return ConfigError(f"{head}.{leaf}: no such key. {hint}{chosen} has: {', '.join(siblings)}.")


def unknown_hydra_key(keys: Iterable[str], key: str) -> ConfigError:
    """Build the error for an unknown key below `hydra.`.

    Args:
        keys: Every dotted key there is.
        key: The one that was given.
    """
    head, _, leaf = key.rpartition(".")
    if head == "hydra.sweeper" and leaf in [field.name for field in fields(OptunaConfig)]:
        return ConfigError(f"{key}: no such key. It belongs to hydra/sweeper=optuna.")
    if head == "hydra.sweeper" and leaf in SWEEPER_INSTEAD:
        return ConfigError(f"{key}: no such key. {SWEEPER_INSTEAD[leaf]}")
    answer = translate_key(key)
    if answer is not None:
        return ConfigError(f"{key}: no such key. {explain_answer(answer)}")
    siblings = [name[len(head) + 1 :] for name in keys if name.startswith(f"{head}.")]
    near = did_you_mean(leaf, [name for name in siblings if "." not in name and name[:1] != "_"])
    return ConfigError(f"{key}: no such key of Hydra's. {near}".strip())


def unknown_hydra_group(groups: Iterable[str], key: str) -> ConfigError:
    """Build the error for an unknown group below `hydra/`.

    Args:
        groups: Names of the groups there.
        key: Such as `hydra/sweeper/sampler`.
    """
    hint = did_you_mean(key, [f"hydra/{group}" for group in groups])
    return ConfigError(f"{key}: no such choice of Hydra's. {hint}")
