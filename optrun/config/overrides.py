"""The command line's `key=value`, checked by name before Hydra composes anything."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.config import store
from optrun.config.optimizer import refuse_few_bits
from optrun.config.types import expected_type, in_yaml
from optrun.errors import ConfigError, did_you_mean, nearest

# What people know from other trainers, and what it is called here.
KNOWN_ELSEWHERE = {
    "learning_rate": "lr",
    "optimizer.lr": "lr",
    "optimizer.learning_rate": "lr",
    "warmup_steps": "scheduler.num_warmup_steps",
    "num_warmup_steps": "scheduler.num_warmup_steps",
    "warmup_ratio": "scheduler.warmup_ratio",
    "lr_scheduler_type": "scheduler=NAME",
    "lr_scheduler": "scheduler=NAME",
    "optim": "optimizer=NAME",
    "max_grad_norm": "clip.max_norm",
    "weight_decay": "optimizer.weight_decay",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "train_batch_size": "training.per_device_train_batch_size",
    "accumulation": "training.gradient_accumulation_steps",
    "bf16": "training.precision=bf16",
    "fp16": "training.precision=fp16",
    "workers": "training.dataloader_num_workers",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.metric",
    "resume_from_checkpoint": "resume",
    "report_to": "tracking=NAME",
    "output_dir": "hydra.run.dir",
    "model_name_or_path": "model.path",
    "train_file": "data.train",
    "validation_file": "data.eval",
    "max_seq_length": "data.max_length",
    "block_size": "data.max_length",
}


def as_key(option: str, keys: Iterable[str] = ()) -> str:
    """How an option of other programs is written here, as a sentence; empty for one that means nothing here.

    Args:
        option: Such as `--learning-rate`.
        keys: What a verb takes besides configuration keys.

    Example:
        >>> as_key("--learning-rate")
        ' Here it is written lr=VALUE.'
        >>> as_key("--optim"), as_key("--max_steps=9")
        (' Here it is written optimizer=NAME.', ' Here it is written training.max_steps=VALUE.')
        >>> as_key("--nothing-like-it")
        ''
    """
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    own = {key: key for key in ("lr", "seed", "run_name", "resume", *keys)}
    own |= {key: f"{key}=NAME" for key in store.GROUPS}
    for group in ("training", "checkpoint", "data"):
        for schema in store.GROUPS[group].values():
            names = [field.name for field in fields(schema) if field.name not in ("name", *own)]
            own |= {key: f"{group}.{key}" for key in names}
    found = own.get(name) or KNOWN_ELSEWHERE.get(name)
    if found is None:
        return ""
    return f" Here it is written {found if '=' in found else f'{found}=VALUE'}."


def parse(overrides: list[str]) -> list[Override]:
    """Read `key=value` words.

    Raises:
        ConfigError: For a word that is none, with what to quote.
    """
    parser = OverridesParser.create()
    parsed = []
    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r}: expected key=value. {_verb_hint(word)}")
        try:
            parsed += parser.parse_overrides([word])
        except HydraException as error:
            key, _, value = word.partition("=")
            hint = f"A value with = , ( ) [ ] {{ }} or spaces is quoted twice: {key}='\"{value}\"'."
            if value[:1] in ("[", "{"):
                hint = f"In a list or a mapping such a word is quoted: {key}='[\"a=b\"]', {key}='{{x: \"a=b\"}}'."
            raise ConfigError(f"{word!r} cannot be read: {_unreadable(error)}. {hint}") from error
        if not parsed[-1].key_or_group:
            raise ConfigError(f"{word!r}: expected key=value, and there is no key.")
    return parsed


def _unreadable(error: HydraException) -> str:
    """What Hydra's parser says, without its frame."""
    frame = ("Error parsing override", "See https://", "Available:")
    said = [line.strip() for line in str(error).splitlines() if line.strip(" ^") and not line.startswith(frame)]
    return said[0].removeprefix("LexerNoViableAltException: ") if said else "Hydra's grammar does not have it"


def _verb_hint(word: str) -> str:
    close = nearest(word, VERBS)
    return (
        f"Did you mean the command {close[0]}?"
        if close
        else f"Commands: {', '.join(VERBS)}; without one, optrun trains."
    )


VERBS = ("certify", "evaluate", "explain", "export", "report", "verify")


def checked(hydra: Hydra, config_name: str, overrides: list[str], *, sweep: bool) -> list[str]:
    """Refuse by name what Hydra would refuse at length, or not at all.

    Args:
        hydra: Composes the choices.
        config_name: The primary configuration.
        overrides: Words of the command line.
        sweep: True under `-m`, where a value may be a list of values.

    Returns:
        The words for Hydra. Keys below an open mapping, such as `model.config.n_layer`, need no `+`.

    Raises:
        ConfigError: For a key or choice that does not exist, with the nearest names; for a value of the wrong type; for
            a list of values without `-m`; for the same key twice.
    """
    parsed = parse(overrides)
    _refuse_twice(parsed)
    choices = [override for override in parsed if _is_choice(override)]
    for override in choices:
        _check_choice(hydra, override, sweep=sweep)
    settled = [f"{override.key_or_group}={_first(override)}" for override in choices]
    base = store.without_hydra(store.compose(hydra, config_name, settled))
    _check_hydra_keys(hydra, config_name, parsed)
    words = []
    for word, override in zip(overrides, parsed, strict=True):
        key = override.key_or_group
        if key in _HYDRA_CHOICES:
            _check_hydra_choice(hydra, override)
        if override in choices or key == "hydra" or key.startswith(("hydra.", "hydra/")):
            words.append(word)
            continue
        words.append(_check_value(base, word, override, sweep=sweep))
    return words


def _refuse_twice(parsed: list[Override]) -> None:
    seen: set[str] = set()
    for override in parsed:
        if override.key_or_group in seen:
            raise ConfigError(f"{override.key_or_group} is given twice: which value is meant?")
        seen.add(override.key_or_group)
    if {"training.max_steps", "training.num_train_epochs"} <= seen and not any(
        override.key_or_group == "training.max_steps" and override.value() is None for override in parsed
    ):
        raise ConfigError(
            "training.max_steps and training.num_train_epochs are both given: max_steps would decide alone. Give one."
        )


def _is_choice(override: Override) -> bool:
    return override.key_or_group in store.GROUPS


def _values(override: Override) -> list[Any]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    return [str(value) for value in override.sweep_string_iterator()]


def _typed_values(override: Override) -> list[Any]:
    """Every value of a word; the two ends of an interval, which only a search walks."""
    if not override.is_sweep_override():
        return [override.value()]
    swept = override.value()
    if isinstance(swept, IntervalSweep):
        # Hydra reads them as floats, also where a key takes whole numbers.
        ends = [float(end) for end in (swept.start, swept.end) if end is not None]
        return [int(end) if end.is_integer() else end for end in ends]
    return list(override.sweep_iterator())


def _first(override: Override) -> Any:
    return _values(override)[0]


def _check_choice(hydra: Hydra, override: Override, *, sweep: bool) -> None:
    group = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line}: {group} is a choice of names, not a range of numbers.")
    options = hydra.config_loader.get_group_options(group)
    if override.is_delete() or override.is_add():
        raise ConfigError(
            f"{override.input_line}: a run needs one {group}. Write {group}=NAME; {did_you_mean('', options)}"
        )
    for value in _values(override):
        if value not in options:
            if group == "optimizer":
                refuse_few_bits(group, str(value))
            raise ConfigError(
                f"{group}={value}: no such {group}. {did_you_mean(value, options)}"
                + (f" Choices: {', '.join(sorted(options))}." if nearest(value, options) else "")
            )


_HYDRA_CHOICES = ("hydra/launcher", "hydra/sweeper")


def _check_hydra_choice(hydra: Hydra, override: Override) -> None:
    key, value = override.key_or_group, str(override.value())
    options = hydra.config_loader.get_group_options(key)
    if value not in options:
        raise ConfigError(
            f"{key}={value}: not installed, or no such name. {did_you_mean(value, options)} Here are: "
            f"{', '.join(sorted(options))}. Launchers come with the extras optrun[joblib] and optrun[slurm]."
        )


def _check_hydra_keys(hydra: Hydra, config_name: str, parsed: list[Override]) -> None:
    """Keys below `hydra.` that do not exist, with the nearest that do, and values of another type."""
    asked = [override for override in parsed if override.key_or_group.startswith("hydra.")]
    if not asked:
        return
    choices = [override for override in parsed if override.key_or_group in _HYDRA_CHOICES]
    for override in choices:
        _check_hydra_choice(hydra, override)
    full = store.compose(hydra, config_name, [f"{choice.key_or_group}={_first(choice)}" for choice in choices]).copy()
    OmegaConf.set_struct(full, False)
    OmegaConf.set_readonly(full, False)
    known = all_keys(full)
    for override in asked:
        key = override.key_or_group
        if override.is_add() or override.is_force_add() or open_prefix(full, key) is not None:
            continue
        if key in known:
            if not override.is_delete() and not override.is_sweep_override():
                assign(full, key, _plain(override.value()))
            continue
        head, _, leaf = key.rpartition(".")
        siblings = [name[len(head) + 1 :] for name in known if name.startswith(f"{head}.")]
        near = did_you_mean(leaf, [name for name in siblings if "." not in name])
        raise ConfigError(f"{key}: no such key of Hydra's. {near}".strip())


def _refuse_list_without_sweep(override: Override, *, sweep: bool) -> None:
    if override.is_sweep_override() and not sweep:
        raise ConfigError(
            f"{override.input_line}: several values are a sweep. Add -m to run one job for each; a list is written "
            f"{override.key_or_group}=[a,b]."
        )


def open_prefix(base: DictConfig, key: str) -> str | None:
    """The open mapping a key lies below, such as `model.config` for `model.config.n_layer`; else None."""
    pieces = key.split(".")
    for end in range(1, len(pieces)):
        prefix = ".".join(pieces[:end])
        node = OmegaConf.select(base, prefix, throw_on_missing=False)
        if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
            return prefix
    return None


def all_keys(base: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a configuration, inner ones too."""
    keys = []
    for name in map(str, base):
        key = f"{prefix}{name}"
        keys.append(key)
        node = base._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            keys += all_keys(node, f"{key}.")
    return keys


def unknown_key(base: DictConfig, key: str) -> ConfigError:
    """The refusal of a key that does not exist, with what may have been meant."""
    keys = all_keys(base)
    head, _, leaf = key.rpartition(".")
    here = KNOWN_ELSEWHERE.get(leaf if head == "training" else key)
    if here is not None:
        return ConfigError(f"{key}: no such key. Here it is called {here}.")
    if head and head in keys:
        siblings = [name for name in keys if name.startswith(f"{head}.") and "." not in name[len(head) + 1 :]]
        close = [f"{head}.{name}" for name in nearest(leaf, [name.rsplit(".", 1)[-1] for name in siblings])]
        others = store.choices_with(head, leaf) if head in store.GROUPS else []
        belongs = f"It belongs to {' or '.join(f'{head}={choice}' for choice in others)}. " if others else ""
        if head in store.GROUPS:
            chosen = OmegaConf.select(base, f"{head}.name")
            head = f"{head}={chosen}"
        names = ", ".join(name.rsplit(".", 1)[-1] for name in siblings)
        hint = f"Did you mean {' or '.join(close)}? " if close else ""
        elsewhere = [] if close else nearest(leaf, [name for name in keys if name.rsplit(".", 1)[-1] == leaf])
        hint = f"Did you mean {' or '.join(elsewhere)}? " if elsewhere else hint
        return ConfigError(f"{key}: no such key. {belongs or hint}{head} has: {names}.")
    close = nearest(key, [*keys, *KNOWN_ELSEWHERE])
    close = list(dict.fromkeys(KNOWN_ELSEWHERE.get(name, name) for name in close))
    hint = f"Did you mean {' or '.join(close)}?" if close else "`optrun --cfg job` shows every key."
    return ConfigError(f"{key}: no such key. {hint}")


def _check_value(base: DictConfig, word: str, override: Override, *, sweep: bool) -> str:
    key = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    prefix = open_prefix(base, key)
    if prefix is not None:
        return word if override.is_add() or override.is_force_add() or override.is_delete() else f"++{word}"
    if key not in all_keys(base):
        raise unknown_key(base, key)
    if override.is_delete():
        raise ConfigError(f"{word}: {key} cannot be taken away; give it a value, or null where the comment allows it.")
    for value in _typed_values(override):
        assign(base, key, _plain(value))
    node = OmegaConf.select(base, key, throw_on_missing=False)
    whole = isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict  # open: Hydra adds to it, or refuses
    return f"{'++' if whole else ''}{key}={word.split('=', 1)[1]}"


def _plain(value: Any) -> Any:
    text = getattr(value, "text", None)  # a quoted string of Hydra's grammar
    if text is not None and not isinstance(value, str):
        return text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return value


def assign(cfg: DictConfig, key: str, value: Any) -> None:
    """Set one value, with type.

    Raises:
        ConfigError: With key, value and the type that was expected.
    """
    try:
        OmegaConf.update(cfg, key, value, merge=False, force_add=open_prefix(cfg, key) is not None)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={in_yaml(value)}: expected {expected_type(error)}.") from error
