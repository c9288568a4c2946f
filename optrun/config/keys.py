"""Names of configuration keys, and suggestions for unknown ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.base.formatting import list_names
from optrun.config.foreign_names import explain_translation, translate_key
from optrun.config.groups import GROUPS, choices_with, keys_of
from optrun.config.schema.run import RunConfig
from optrun.config.schema.sweeper import INSTEAD as SWEEPER_INSTEAD
from optrun.config.schema.sweeper import OptunaConfig

_TOP_LEVEL = tuple(field.name for field in fields(RunConfig) if field.name not in GROUPS)
"""Keys of a run that belong to no group."""


def translate_option(option: str, verb_keys: Iterable[str] = (), *, value: str = "") -> str:
    """Say how to write an option of another program as a key; empty if unknown.

    Args:
        option: Such as `--learning-rate`.
        verb_keys: Keys of a subcommand, such as `out` of `optrun report`, besides those of the
            configuration.
        value: The word after the option, if there is one.

    Example:
        >>> translate_option("--learning-rate")
        'Here it is written lr=VALUE.'
        >>> translate_option("--optim"), translate_option("--max_steps=9")
        ('Here it is written optimizer=NAME.', 'Here it is written training.max_steps=9.')
        >>> translate_option("--lr", value="1e-3")
        'Here it is written lr=1e-3.'
        >>> translate_option("--do-eval")
        'Not offered: optrun trains and evaluates, optrun evaluate RUN_DIR evaluates alone.'
        >>> translate_option("--nothing-like-it")
        ''
    """
    name, _, attached_value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    value = attached_value or value
    if name in GROUPS:
        return f"Here it is written {name}={value or 'NAME'}."
    value = value or "VALUE"
    if name in (*_TOP_LEVEL, *verb_keys):
        return f"Here it is written {name}={value}."
    translation = translate_key(name)
    if translation is not None:
        sentence = explain_translation(translation, as_option=True)
        return sentence.replace("=VALUE.", f"={value}.")
    keys = keys_called(name)
    if keys:
        return f"Here it is written {' or '.join(f'{key}={value}' for key in keys)}."
    return ""


def word_after(option: str, argv: Sequence[str]) -> str:
    """Return the value after an option on the command line; empty if none follows.

    Another option and `key=value` are no values.

    Example:
        >>> word_after("--lr", ["--lr", "1e-3"]), word_after("--lr", ["--lr", "seed=1"])
        ('1e-3', '')
    """
    if option not in argv:
        return ""
    following = argv[argv.index(option) + 1 :]
    if not following or following[0].startswith("--") or "=" in following[0]:
        return ""
    return following[0]


def keys_called(name: str) -> list[str]:
    """List the dotted keys of all groups equal to `name` or `GROUP.name`.

    Empty for `name` itself: every choice has a name.

    Example:
        >>> keys_called("max_steps"), keys_called("training.max_steps"), keys_called("nothing")
        (['training.max_steps'], ['training.max_steps'], [])
    """
    if name == "name":
        return []
    keys = sorted(key for group in GROUPS for key in keys_of(group))
    return [key for key in keys if name in (key, key.partition(".")[2])]


def is_open_mapping(node: object) -> bool:
    """Tell whether a node of a configuration is a mapping that takes any key."""
    return isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict


def open_prefix(base: DictConfig, key: str) -> str | None:
    """Return the open mapping around a key, such as `model.config` for `model.config.n_layer`.

    An open mapping takes any key. None if the key is in no such mapping.
    """
    names = key.split(".")
    for end in range(1, len(names)):
        prefix = ".".join(names[:end])
        # `select` also finds an item of a list, such as `param_groups.rules.0`.
        if is_open_mapping(OmegaConf.select(base, prefix, throw_on_missing=False)):
            return prefix
    return None


def all_keys(base: DictConfig) -> list[str]:
    """List every dotted key of a configuration, inner ones too."""
    return [key for key, _ in _walk(base)]


def missing_keys(base: DictConfig) -> list[str]:
    """List the dotted keys with the value `???`, sorted; interpolations count as values."""
    return sorted(key for key, is_missing in _walk(base) if is_missing)


def _walk(base: DictConfig, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every dotted key below a mapping, and whether its value is `???`."""
    for name, value in base.items_ex(resolve=False):
        yield f"{prefix}{name!s}", OmegaConf.is_missing(base, name)
        if isinstance(value, DictConfig) and value.keys():  # none for null, ??? and ${...}
            yield from _walk(value, f"{prefix}{name!s}.")


def has_key(root: DictConfig, key: str) -> bool:
    """Tell whether a configuration has a dotted key, whatever its value."""
    head, _, leaf = key.rpartition(".")
    mapping = raw_value(root, head) if head else root
    return isinstance(mapping, DictConfig) and leaf in list(mapping.keys())


def raw_value(root: DictConfig, key: str) -> Any:
    """Return the value at a dotted key, interpolations as written; None if there is none."""
    value: Any = root
    for name in key.split("."):
        if not isinstance(value, DictConfig) or not value.keys():  # none for null, ??? and ${...}
            return None
        value = dict(value.items_ex(resolve=False)).get(name)
    return value


def unknown_key(base: DictConfig, key: str) -> ConfigError:
    """Build the error for an unknown key, with the first applicable of these hints.

    1. `--plugin`, for the name of code.
    2. The same error for the mapping around the key, if only another choice has that mapping.
    3. The name here, for a key of another program.
    4. The nearest keys of the whole configuration, for a key below no mapping.
    5. The nearest keys beside it. If none is near, the choices that have it and the keys beside it.

    A key of Hydra's goes to `unknown_hydra_key`.

    Args:
        base: The composed configuration.
        key: The unknown dotted key.
    """
    keys = all_keys(base)
    if key.startswith("hydra."):
        return unknown_hydra_key(keys, key)
    problem = f"{key}: no such key."
    group, *inner = key.split(".")
    # 1. The name of code.
    if group in ("plugin", "plugins"):
        return ConfigError(
            f"{problem} Give code on the command line only: --plugin FILE.py or --plugin MODULE."
        )
    # 2. Below a mapping that only another choice has.
    # For `parametrization.base.n_embd` of `standard` the error is about `parametrization.base`.
    if len(inner) > 1 and group in GROUPS:
        mapping = f"{group}.{inner[0]}"
        if mapping not in keys and choices_with(group, inner[0]):
            return unknown_key(base, mapping)
    # 3. A key of another program, unless another choice here has a key of this name.
    head, _, leaf = key.rpartition(".")
    other_choices = choices_with(head, leaf) if head in GROUPS else []
    translation = translate_key(key)
    if translation is not None and not other_choices:
        return ConfigError(f"{problem} {explain_translation(translation)}")
    # 4. Below no mapping.
    if head not in keys:
        hint = did_you_mean(key, [*keys, *keys_called(leaf)], "`optrun --cfg job` shows every key.")
        return ConfigError(f"{problem} {hint}")
    # 5. Below a mapping.
    siblings = [name for name in _children(keys, head) if name != "name"]
    mapping = f"{head}={OmegaConf.select(base, f'{head}.name')}" if head in GROUPS else head
    keys_here = f"{mapping} has: {list_names(siblings, 12)}."
    hint = _hint_beside(keys, siblings, head, leaf, other_choices) or keys_here
    if hint.startswith("It belongs to"):
        hint = f"{hint} {keys_here}"
    return ConfigError(f"{problem} {hint}")


def _children(keys: Iterable[str], head: str) -> list[str]:
    """List the names directly below a dotted mapping."""
    names = [key.removeprefix(f"{head}.") for key in keys if key.startswith(f"{head}.")]
    return [name for name in names if "." not in name]


def _hint_beside(
    keys: list[str], siblings: list[str], head: str, leaf: str, other_choices: list[str]
) -> str:
    """Suggest keys for an unknown name below a mapping, as a sentence; empty if nothing is near.

    Args:
        keys: Every dotted key of the configuration.
        siblings: The valid names below the mapping.
        head: The group or the dotted mapping, such as `optimizer`.
        leaf: The unknown name in it.
        other_choices: Other choices of the group, which have this key.
    """
    # 1. Another choice has it: a key of the same name deeper here, or that choice.
    if other_choices:
        deeper = [key for key in keys if key.startswith(f"{head}.") and key.endswith(f".{leaf}")]
        if deeper:
            return f"Did you mean {' or '.join(deeper)}?"
        return f"It belongs to {list_names([f'{head}={choice}' for choice in other_choices], 3)}."
    # 2. Near names beside it, and the same name elsewhere, such as `lr` for `optimizer.lr`.
    elsewhere = [leaf] if leaf in _TOP_LEVEL else keys_called(leaf)
    close = [*(f"{head}.{name}" for name in nearest(leaf, siblings)), *elsewhere]
    if close:
        return f"Did you mean {' or '.join(close)}?"
    # 3. An option of a model from scratch.
    if head == "model" and "config" in siblings:
        return f"Options of transformers' configuration are model.config.KEY: model.config.{leaf}."
    return ""


def unknown_hydra_key(keys: Iterable[str], key: str) -> ConfigError:
    """Build the error for an unknown key below `hydra.`, with the first hint that applies.

    1. An option of Optuna's sweeper, while another sweeper is chosen.
    2. An option that other sweepers have, such as `storage`: what does it here.
    3. A key of another program: the key of optrun for it.
    4. The nearest names beside it in Hydra's configuration.

    Args:
        keys: Every dotted key of the composition, Hydra's included.
        key: The unknown key.
    """
    head, _, leaf = key.rpartition(".")
    if head == "hydra.sweeper" and leaf in [field.name for field in fields(OptunaConfig)]:
        return ConfigError(f"{key}: no such key. It belongs to hydra/sweeper=optuna.")
    if head == "hydra.sweeper" and leaf in SWEEPER_INSTEAD:
        return ConfigError(f"{key}: no such key. {SWEEPER_INSTEAD[leaf]}")
    our_key = translate_key(key)
    if our_key is not None:
        return ConfigError(f"{key}: no such key. {explain_translation(our_key)}")
    public_names = [name for name in _children(keys, head) if not name.startswith("_")]
    return ConfigError(f"{key}: Hydra has no such key. {did_you_mean(leaf, public_names)}".strip())


def unknown_hydra_group(groups: Iterable[str], key: str) -> ConfigError:
    """Build the error for an unknown group below `hydra/`.

    Args:
        groups: Hydra's groups, without `hydra/`.
        key: Such as `hydra/sweeper/sampler`.
    """
    hint = did_you_mean(key, [f"hydra/{group}" for group in groups])
    return ConfigError(f"{key}: Hydra has no such group. {hint}")
