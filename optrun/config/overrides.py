"""Parse and check the `key=value` of a command line, before Hydra composes a run."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base import shell
from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.config import store
from optrun.config.foreign_names import NOT_OFFERED, translate_choice
from optrun.config.groups import no_such_choice
from optrun.config.hydra_internals import Hydra
from optrun.config.keys import (
    all_keys,
    has_key,
    is_open_mapping,
    open_prefix,
    raw_value,
    unknown_hydra_group,
    unknown_hydra_key,
    unknown_key,
)
from optrun.config.literal import parse_token, quote_path
from optrun.config.schema.optimizer_base import refuse_few_bits
from optrun.config.types import expected_type, in_yaml

SEARCH = "search."
"""Begins the keys of a sweep that are for one optimizer alone: `search.NAME.KEY=VALUES`."""


def parse(tokens: Sequence[str]) -> list[Override]:
    """Parse `key=value` tokens.

    Raises:
        ConfigError: A token is no `key=value`, is a glob of choices, or has a package (`@`); the
            message says what to write instead.
    """
    parsed: list[Override] = []
    for token in tokens:
        if "=" not in token and not token.startswith("~"):
            raise ConfigError(f"{token!r}: expected key=value.")
        key, _, value = token.partition("=")
        try:
            override = parse_token(token)
        except HydraException as error:
            key = key.strip()
            raise ConfigError(
                f"{token!r} cannot be read: expected key=value without blanks. Write a list as"
                f" {key}=[A,B], a mapping as {{KEY:VALUE}}, a text with other signs as"
                f" {shell.quote(f'{key}={quoted(value)}')}."
            ) from error
        if not override.key_or_group:
            raise ConfigError(f"{token!r}: expected key=value, and there is no key.")
        if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            raise ConfigError(f"{token!r}: not offered. List the values: KEY=A,B.")
        if override.package is not None:
            raise ConfigError(
                f"{token!r}: a group cannot be put elsewhere with @. Write"
                f" {key.partition('@')[0]}={value}."
            )
        parsed.append(override)
    return parsed


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar, with `"`, or with `'` if that needs no escapes."""
    mark = "'" if '"' in text and "'" not in text else '"'
    return quote_path(text, mark)


@dataclass(frozen=True)
class Checked:
    """Overrides with checked names and types."""

    tokens: list[str]
    """The overrides for Hydra. Keys below an open mapping, such as `model.config.n_layer`, need no
    `+`."""
    choices: DictConfig
    """The configuration composed from the choices among them, with the node `hydra`, without
    values."""


def parse_checked(
    hydra: Hydra, config_name: str, tokens: Sequence[str], *, sweep: bool
) -> list[str]:
    """Parse overrides, refuse repeated keys, and check them; see `check`."""
    parsed = parse(tokens)
    refuse_twice(parsed)
    return check(hydra, config_name, parsed, sweep=sweep).tokens


def check(hydra: Hydra, config_name: str, overrides: list[Override], *, sweep: bool) -> Checked:
    """Check the keys, choices and types of overrides, before Hydra composes them.

    Hydra would refuse some at length, and others not at all.

    Args:
        hydra: Composes the choices.
        config_name: Name of the configuration to compose, as after `-cn`.
        overrides: Parsed; each key occurs once.
        sweep: Whether a value may be a list of values, as under `-m`.

    Returns:
        The tokens for Hydra in their order, some with `++` added, and the composition of the first
        value of each choice, without the values.

    Raises:
        ConfigError: A key or choice is unknown, a value has the wrong type, or a list of values is
            given without `-m`.
    """
    # Each helper below raises ConfigError for what it refuses, and returns nothing; `_check_value`
    # alone returns a value.
    # 1. `GROUP.name=NAME`. The overrides of a branch include such names, from its trunk.
    branch = next((item for item in overrides if item.key_or_group == "branch_from"), None)
    if branch is None or branch.value() is None:
        refuse_names(overrides)
    # 2. The choices, since they decide which keys there are.
    choices: list[Override] = []
    for override in overrides:
        if override.key_or_group in store.GROUPS:
            # Refuses an unknown name, and a list without `-m`.
            _check_choice(hydra, override, sweep=sweep)
            choices.append(override)
        elif override.key_or_group.startswith("hydra/"):
            _check_hydra_choice(hydra, override)  # refuses what is not installed
            choices.append(override)
    # 3. The composition of the first value of each choice, and two copies of it: `run_cfg` with the
    # keys of the run, and `hydra_cfg` with those of Hydra. Types are checked by writing: step 4
    # puts each value into a copy, and OmegaConf raises if the type is wrong. The copies are then
    # thrown away.
    first_choices = [f"{override.key_or_group}={values_of(override)[0]}" for override in choices]
    composed = store.compose(hydra, config_name, first_choices)
    run_cfg = store.without_hydra(composed)
    hydra_cfg = run_cfg  # stays unused if no override is for Hydra
    if any(override.is_hydra_override() for override in overrides):
        hydra_cfg = copy.deepcopy(composed)
        OmegaConf.set_struct(hydra_cfg, False)
        OmegaConf.set_readonly(hydra_cfg, False)
    # 4. The values. Choices are checked already.
    tokens = []
    for override in overrides:
        token = str(override.input_line)
        if override.key_or_group == "hydra":
            raise ConfigError(f"{token}: expected a key of Hydra's, such as hydra.run.dir=DIR.")
        if override.key_or_group.startswith("hydra."):
            # Refuses an unknown key, several values, and a wrong type.
            _check_hydra_key(hydra_cfg, override)
        elif override not in choices:
            # Refuses an unknown key, a wrong type, and a list without `-m`; returns the token for
            # Hydra, which may begin with `++`.
            token = _check_value(run_cfg, token, override, sweep=sweep)
        tokens.append(token)
    return Checked(tokens, composed)


def refuse_twice(parsed: list[Override]) -> None:
    """Refuse a repeated key, and `max_steps` together with `num_train_epochs`.

    Signs do not make another key: `+lr=1 lr=2` repeats one. `training.max_steps=null` may stand
    beside the epochs.

    Raises:
        ConfigError: The message names the key.
    """
    values: dict[str, object] = {}
    for override in parsed:
        if override.key_or_group in values:
            raise ConfigError(f"{override.key_or_group} is given twice; leave one out.")
        values[override.key_or_group] = override.value()
    gives_steps = values.get("training.max_steps") is not None
    if gives_steps and "training.num_train_epochs" in values:
        raise ConfigError(
            "training.max_steps and training.num_train_epochs are both given, and max_steps would"
            " decide alone. Give one."
        )


def parse_single(tokens: Sequence[str]) -> list[Override]:
    """Parse overrides of one value each, such as the changes of a saved configuration.

    Raises:
        ConfigError: A token cannot be read, has several values or deletes a key (`~key`), or a key
            is repeated.
    """
    parsed = parse(tokens)
    refuse_twice(parsed)
    for override in parsed:
        if override.is_sweep_override() or override.is_delete():
            raise ConfigError(
                f"{override.input_line}: expected one value, not a sweep. A list is written"
                f" {override.key_or_group}=[a,b]."
            )
    return parsed


def refuse_names(parsed: Sequence[Override]) -> None:
    """Refuse `GROUP.name=NAME`: it would rename the choice, and not choose another.

    Raises:
        ConfigError: The message suggests the choice that may be meant.
    """
    for override in parsed:
        group, _, name = override.key_or_group.rpartition(".")
        if name == "name" and group in store.GROUPS:
            raise ConfigError(
                f"{override.input_line}: the name of a choice is no key: it would be written down,"
                f" and the same would be trained. {_suggest_choice(group, override)}"
            )


def _suggest_choice(group: str, override: Override) -> str:
    """Suggest the choice meant by `GROUP.name=VALUE`.

    The nearest name, which is the value itself if the group has it, else the choice that another
    program calls so; without any of these, all names.
    """
    value = str(override.input_line).partition("=")[2]
    suggestion = translate_choice(group, value)
    close = nearest(value, store.GROUPS[group])
    if close:
        suggestion = f"{group}={close[0]}"
    if suggestion is None or suggestion.startswith(NOT_OFFERED):
        return f"A choice is {group}=NAME: {', '.join(store.GROUPS[group])}."
    return f"Did you mean {suggestion}?"


def values_of(override: Override) -> list[Any]:
    """List every value of an override as text."""
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    return list(map(str, override.sweep_string_iterator()))


def _typed_values(override: Override) -> list[object]:
    """List every value of an override; for an interval, its two ends."""
    if not override.is_sweep_override():
        return [override.value()]
    swept = override.value()
    if not isinstance(swept, IntervalSweep):
        return list(override.sweep_iterator())
    # Hydra reads the ends as floats, even if the key takes whole numbers.
    ends = [float(end) for end in (swept.start, swept.end) if end is not None]
    return [int(end) if end.is_integer() else end for end in ends]


def _check_choice(hydra: Hydra, override: Override, *, sweep: bool) -> None:
    """Check an override of a group: the name of a choice, or under `-m` several names.

    Raises:
        ConfigError: A list without `-m`, a range, `+group` or `~group`, or an unknown name; for a
            4- or 8-bit optimizer the message says what to use instead.
    """
    group = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: {group} is a choice of names, not a range of numbers."
        )
    adds_or_deletes = override.is_add() or override.is_delete()
    unknown = [value for value in values_of(override) if value not in store.GROUPS[group]]
    if not unknown and not adds_or_deletes:
        return
    options = hydra.config_loader.get_group_options(group)  # includes choices of the user's
    if adds_or_deletes:
        raise ConfigError(
            f"{override.input_line}: a run needs one {group}. Write {group}=NAME;"
            f" {did_you_mean('', options)}"
        )
    for value in unknown:
        if value not in options:
            if group == "optimizer":
                refuse_few_bits(group, str(value))
            raise no_such_choice(group, value, options)


def _check_hydra_choice(hydra: Hydra, override: Override) -> None:
    """Refuse a choice of Hydra's, such as `hydra/launcher=joblib`, unless it is installed.

    A deletion (`~hydra/launcher`) and a list of choices are refused, too, since their values are no
    names.

    Raises:
        ConfigError: The message names the nearest groups, or all names of the group.
    """
    key = override.key_or_group
    value = str(override.value())
    options = hydra.config_loader.get_group_options(key)
    if not options:
        raise unknown_hydra_group(hydra.config_loader.list_groups("hydra"), key)
    if value not in options:
        raise ConfigError(
            f"{key}={value}: not installed, or no such name. {did_you_mean(value, options)}"
            f" Installed: {', '.join(sorted(options))}. Launchers come with the extras"
            " optrun[joblib] and optrun[slurm]."
        )


def _check_hydra_key(full: DictConfig, override: Override) -> None:
    """Refuse an unknown key, several values or a wrong type below `hydra.`.

    Of a key with `+` or inside a mapping that takes any key, such as `hydra.sweeper.params`,
    neither the name nor the type is checked.

    Args:
        full: The composition with the node `hydra`; the value is put into it.
        override: An override of a key that begins with `hydra.`.

    Raises:
        ConfigError: The message names the nearest keys, or how to write a list as one value.
    """
    key = override.key_or_group
    is_open = override.is_add() or override.is_force_add() or open_prefix(full, key) is not None
    if not is_open and not has_key(full, key):
        raise unknown_hydra_key(all_keys(full), key)
    if override.is_sweep_override():
        text = str(override.input_line).partition("=")[2]
        if key.startswith("hydra.sweeper.params"):
            single_value = f"{key}='{text}'"
        else:
            single_value = f"{key}=[{text}]"
        raise ConfigError(
            f"{override.input_line}: {key} cannot be swept. Expected one value; a list is"
            f" {single_value}."
        )
    if not is_open and not override.is_delete():
        assign(full, key, plain_value(override.value()))  # raises for another type


def _refuse_list_without_sweep(override: Override, *, sweep: bool) -> None:
    """Refuse several values or an interval without `-m`.

    Raises:
        ConfigError: The message says how to sweep, and how to write a list or text as one value.
    """
    if sweep or not override.is_sweep_override():
        return
    key, _, text = str(override.input_line).partition("=")
    if isinstance(override.value(), IntervalSweep):
        raise ConfigError(
            f"{key}={text}: an interval is for a search. Add -m hydra/sweeper=optuna."
        )
    raise ConfigError(
        f"{key}={text}: several values are a sweep. Add -m to run one job for each. One value"
        f" is {shell.quote(f'{key}=[{text}]')}, or as a text"
        f" {shell.quote(f'{key}={quoted(text)}')}."
    )


def _check_value(base: DictConfig, token: str, override: Override, *, sweep: bool) -> str:
    """Check the key and the value types of an override `KEY=VALUE`.

    Args:
        base: The composed choices; every value is put into it, which checks the type.
        token: The override as typed.
        override: The same, parsed.
        sweep: Whether a list of values is allowed.

    Returns:
        The override for Hydra: with `++` if the key is in, or is, a mapping that takes any key,
        such as `++model.config.n_layer=2` for `model.config.n_layer=2`.

    Raises:
        ConfigError: The key is unknown or deleted, or a value has the wrong type.
    """
    key = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    # 1. In a mapping that takes any key, such as `model.config`: there is nothing to check. For a
    # new key Hydra demands a sign: `+` or `++`.
    if open_prefix(base, key) is not None:
        has_sign = override.is_add() or override.is_force_add() or override.is_delete()
        return token if has_sign else f"++{token}"
    # 2. The key.
    if not has_key(base, key):
        raise unknown_key(base, key)
    if override.is_delete():
        raise ConfigError(
            f"{token}: {key} cannot be deleted. Give it a value, or null if `optrun --help {key}`"
            " allows null."
        )
    # 3. Each value, of a sweep too.
    values = _typed_values(override)
    if override.is_range_sweep() and len(values) == 1:
        raise ConfigError(
            f"{token}: it holds {values[0]} alone: range() goes in steps of 1. List the"
            f" values: {key}=A,B,C."
        )
    for value in values:
        assign(base, key, plain_value(value))  # raises for another type
    # 4. The token. The key exists, so that a `+` before it would make Hydra refuse it.
    unsigned_token = f"{key}={token.partition('=')[2]}"
    if is_open_mapping(raw_value(base, key)):
        return f"++{unsigned_token}"  # without ++ Hydra would merge the value, or refuse it
    return unsigned_token


def refuse_meaningless(overrides: Sequence[Override], valid: Sequence[str], action: str) -> None:
    """Refuse overrides without an effect on an action.

    Args:
        overrides: Parsed.
        valid: Keys with an effect; a group stands for all of its keys.
        action: The action with an article, for the message, such as `an evaluation`.

    Raises:
        ConfigError: The message names the first such override, and the nearest valid keys, or all
            of them if none is near.
    """
    for override in overrides:
        key = override.key_or_group
        if key in valid or key.partition(".")[0] in valid:
            continue
        hint = did_you_mean(key, valid, f"It takes {', '.join(valid)}.")
        raise ConfigError(f"{override.input_line}: has no effect on {action}. {hint}")


def plain_value(value: object) -> object:
    """Replace the quoted strings of a parsed value by their texts, in lists and mappings too."""
    text = getattr(value, "text", None)
    is_quoted_string = text is not None and not isinstance(value, str)
    if is_quoted_string:
        return text
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {plain_value(name): plain_value(item) for name, item in value.items()}
    return value


_EXAMPLES = {
    "lr": ", such as lr=3e-4.",
    "seed": ". For several seeds write optrun -m seed=0,1,2",
}
"""Key -> end of the message on a value of the wrong type."""


def assign(cfg: DictConfig, key: str, value: object) -> None:
    """Set one value with its type; a mapping is merged into the present one, as Hydra does.

    A value in an open mapping (see `open_prefix`) may have any type.

    Args:
        cfg: Changed in place.
        key: Dotted.
        value: A plain value.

    Raises:
        ConfigError: The message names key, value and the expected type.
    """
    is_open = open_prefix(cfg, key) is not None
    try:
        OmegaConf.update(cfg, key, value, merge=isinstance(value, dict), force_add=is_open)
    except OmegaConfBaseException as error:
        end = _EXAMPLES.get(key, ".")
        raise ConfigError(
            f"{key}={in_yaml(value)}: expected {expected_type(error)}{end}"
        ) from error


def is_hydra(token: str) -> bool:
    """Tell whether an override is for Hydra and not for the run.

    Example:
        >>> is_hydra("hydra/launcher=joblib"), is_hydra("lr=0.1")
        (True, False)
    """
    return token.lstrip("+~").startswith(("hydra.", "hydra/", "hydra="))


def is_search(token: str) -> bool:
    """Tell whether an override is for one optimizer of a sweep.

    Example:
        >>> is_search("search.adamw.lr=1e-3,2e-3"), is_search("lr=1e-3,2e-3")
        (True, False)
    """
    return token.lstrip("+~").startswith(SEARCH)
