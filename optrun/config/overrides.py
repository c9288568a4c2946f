"""The command line's `key=value`, checked by name before Hydra composes anything."""

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
    node_at,
    open_prefix,
    unknown_hydra_group,
    unknown_hydra_key,
    unknown_key,
)
from optrun.config.literal import parse_token, quote_path
from optrun.config.schema.optimizer_base import refuse_few_bits
from optrun.config.types import expected_type, in_yaml

SEARCH = "search."
"""Begins what a sweep tries for one optimizer alone: `search.NAME.KEY=VALUES`."""


def parse(tokens: Sequence[str]) -> list[Override]:
    """Parse `key=value` tokens.

    Raises:
        ConfigError: For a token that is none, with what to quote.
    """
    parsed: list[Override] = []
    for token in tokens:
        if "=" not in token and not token.startswith("~"):
            raise ConfigError(f"{token!r}: expected key=value.")
        try:
            parsed.append(parse_token(token))
        except HydraException as error:
            key, _, value = token.partition("=")
            text = shell.quote(f"{key.strip()}={quoted(value)}")
            raise ConfigError(
                f"{token!r} cannot be read: expected key=value without blanks. A list is"
                f" {key.strip()}=[A,B], a mapping {{KEY:VALUE}}, a text with other signs {text}."
            ) from error
        if not parsed[-1].key_or_group:
            raise ConfigError(f"{token!r}: expected key=value, and there is no key.")
        if parsed[-1].value_type is ValueType.GLOB_CHOICE_SWEEP:
            raise ConfigError(f"{token!r}: not offered. List the values: KEY=A,B.")
        if parsed[-1].package is not None:
            name, _, value = token.partition("=")
            raise ConfigError(
                f"{token!r}: a key keeps its place. Write {name.partition('@')[0]}={value}."
            )
    return parsed


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar."""
    mark = "'" if '"' in text and "'" not in text else '"'
    return quote_path(text, mark)


@dataclass(frozen=True)
class Checked:
    """Overrides with checked names and types."""

    tokens: list[str]
    """The overrides for Hydra. Keys below an open mapping, such as `model.config.n_layer`, need no
    `+`."""
    choices: DictConfig
    """What the choices among them compose to, before their values; Hydra's node in it."""


def parse_checked(
    hydra: Hydra, config_name: str, tokens: Sequence[str], *, sweep: bool
) -> list[str]:
    """Parse overrides and check them by name; see `check`."""
    parsed = parse(tokens)
    refuse_twice(parsed)
    return check(hydra, config_name, parsed, sweep=sweep).tokens


def check(hydra: Hydra, config_name: str, overrides: list[Override], *, sweep: bool) -> Checked:
    """Check overrides by name: Hydra would refuse some at length, and others not at all.

    Args:
        hydra: Composes the choices.
        config_name: The primary configuration.
        overrides: Parsed; no key stands twice.
        sweep: True under `-m`, where a value may be a list of values.

    Raises:
        ConfigError: For a key or choice that does not exist, with the nearest names; for a value of
            the wrong type; for a list of values without `-m`; for the same key twice.
    """
    branch = next((item for item in overrides if item.key_or_group == "branch_from"), None)
    if branch is None or branch.value() is None:
        refuse_names(overrides)  # those of a trunk stand among the overrides of a branch
    groups = [override for override in overrides if override.key_or_group in store.GROUPS]
    for override in groups:
        _check_choice(hydra, override, sweep=sweep)
    of_hydra = [override for override in overrides if override.key_or_group.startswith("hydra/")]
    for override in of_hydra:
        _check_hydra_choice(hydra, override)
    choices = [*groups, *of_hydra]
    settled = [f"{override.key_or_group}={values_of(override)[0]}" for override in choices]
    composed = store.compose(hydra, config_name, settled)
    base = store.without_hydra(composed)
    with_hydra = base
    if any(item.is_hydra_override() for item in overrides):
        with_hydra = copy.deepcopy(composed)
        OmegaConf.set_struct(with_hydra, False)
        OmegaConf.set_readonly(with_hydra, False)
    tokens = []
    for override in overrides:
        token = str(override.input_line)
        if override.key_or_group == "hydra":
            raise ConfigError(f"{token}: expected a key of Hydra's, such as hydra.run.dir=DIR.")
        if override.key_or_group.startswith("hydra."):
            _check_hydra_key(with_hydra, override)
        elif override not in choices:
            token = _check_value(base, token, override, sweep=sweep)
        tokens.append(token)
    return Checked(tokens, composed)


def refuse_twice(parsed: list[Override]) -> None:
    """Refuse a repeated key, and two keys for the length of a run.

    Raises:
        ConfigError: Naming it.
    """
    seen: set[str] = set()
    for override in parsed:
        if override.key_or_group in seen:
            raise ConfigError(f"{override.key_or_group} is given twice; leave one out.")
        seen.add(override.key_or_group)
    if {"training.max_steps", "training.num_train_epochs"} <= seen and not any(
        override.key_or_group == "training.max_steps" and override.value() is None
        for override in parsed
    ):
        raise ConfigError(
            "training.max_steps and training.num_train_epochs are both given: max_steps would"
            " decide alone. Give one."
        )


def parse_single(tokens: Sequence[str]) -> list[Override]:
    """Parse overrides that set one value each, such as the changes of a saved configuration.

    Raises:
        ConfigError: A token cannot be read, has several values or takes a key away (`~key`), or a
            key stands twice.
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
    """Refuse `GROUP.name=...`, a new label without a new choice.

    Raises:
        ConfigError: With the choice of that name.
    """
    for override in parsed:
        group, _, name = override.key_or_group.rpartition(".")
        if name == "name" and group in store.GROUPS:
            raise ConfigError(
                f"{override.input_line}: the name of a choice is no key: it would be written down,"
                f" and the same would be trained. {_choice_meant(group, override)}"
            )


def _choice_meant(group: str, override: Override) -> str:
    """Suggest what was meant by a `group=value` that is no valid choice.

    Suggests the value itself if the group has it, else the closest name, else the choice that
    other programs call so; without any of these, lists all names. Never empty.
    """
    value = str(override.input_line).partition("=")[2]
    if value in store.GROUPS[group]:
        return f"Did you mean {group}={value}?"
    close = nearest(value, store.GROUPS[group])
    answer = f"{group}={close[0]}" if close else translate_choice(group, value)
    if answer is None or answer.startswith(NOT_OFFERED):
        return f"A choice is {group}=NAME: {', '.join(store.GROUPS[group])}."
    return f"Did you mean {answer}?"


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
    if isinstance(swept, IntervalSweep):
        # Hydra reads them as floats, also where a key takes whole numbers.
        ends = [float(end) for end in (swept.start, swept.end) if end is not None]
        return [int(end) if end.is_integer() else end for end in ends]
    return list(override.sweep_iterator())


def _check_choice(hydra: Hydra, override: Override, *, sweep: bool) -> None:
    """Refuse an override of a group that does not choose among its names.

    Raises:
        ConfigError: A list without `-m`, a range, `+group` or `~group`, or a name that the group
            does not have; 4- and 8-bit optimizers are refused with what to use instead.
    """
    group = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: {group} is a choice of names, not a range of numbers."
        )
    if override.is_delete() or override.is_add():
        options = hydra.config_loader.get_group_options(group)
        raise ConfigError(
            f"{override.input_line}: a run needs one {group}. Write {group}=NAME;"
            f" {did_you_mean('', options)}"
        )
    unknown = [value for value in values_of(override) if value not in store.GROUPS[group]]
    options = hydra.config_loader.get_group_options(group) if unknown else []
    for value in unknown:
        if value not in options:
            if group == "optimizer":
                refuse_few_bits(group, str(value))
            raise no_such_choice(group, value, options)


def _check_hydra_choice(hydra: Hydra, override: Override) -> None:
    """Refuse a choice of Hydra's, such as `hydra/launcher=joblib`, that is not installed.

    Of a deletion (`~hydra/launcher`) the value is None, of a sweep the object of Hydra's grammar:
    neither is the name of a choice, so both are refused as well.

    Raises:
        ConfigError: An unknown group, with the nearest ones; or an unknown name, with all names of
            the group.
    """
    key = override.key_or_group
    value = str(override.value())
    options = hydra.config_loader.get_group_options(key)
    if not options:
        raise unknown_hydra_group(hydra.config_loader.list_groups("hydra"), key)
    if value not in options:
        raise ConfigError(
            f"{key}={value}: not installed, or no such name. {did_you_mean(value, options)} Here"
            f" are: {', '.join(sorted(options))}. Launchers come with the extras optrun[joblib] and"
            " optrun[slurm]."
        )


def _check_hydra_key(full: DictConfig, override: Override) -> None:
    """Refuse an unknown key, several values or a wrong type below `hydra.`.

    A key with `+` or inside an open mapping is not checked.

    Args:
        full: The composition with Hydra's node; the value is put into it.
        override: An override of a key that begins with `hydra.`.

    Raises:
        ConfigError: The message names the nearest keys, or the form in which a list is one value.
    """
    key = override.key_or_group
    is_open = override.is_add() or override.is_force_add() or open_prefix(full, key) is not None
    if not is_open and node_at(full, key) is None:
        raise unknown_hydra_key(all_keys(full), key)
    if override.is_sweep_override():
        text = str(override.input_line).partition("=")[2]
        if key.startswith("hydra.sweeper.params"):
            single_value = f"{key}='{text}'"
        else:
            single_value = f"{key}=[{text}]"
        raise ConfigError(
            f"{override.input_line}: {key} is not swept over. Expected one value; a list is"
            f" {single_value}."
        )
    if not is_open and not override.is_delete():
        assign(full, key, plain_value(override.value()))


def _refuse_list_without_sweep(override: Override, *, sweep: bool) -> None:
    """Refuse several values or an interval without `-m`.

    Raises:
        ConfigError: With `-m`, and for several values with how to write a list or a text instead.
    """
    if override.is_sweep_override() and not sweep:
        key, _, text = str(override.input_line).partition("=")
        if isinstance(override.value(), IntervalSweep):
            raise ConfigError(
                f"{key}={text}: an interval is searched. Add -m hydra/sweeper=optuna."
            )
        raise ConfigError(
            f"{key}={text}: several values are a sweep. Add -m to run one job for each. One value"
            f" is {shell.quote(f'{key}=[{text}]')}, or as a text"
            f" {shell.quote(f'{key}={quoted(text)}')}."
        )


def _check_value(base: DictConfig, token: str, override: Override, *, sweep: bool) -> str:
    """Check the key and the type of an override that sets a value.

    Args:
        base: The composed choices; the value is put into it, so that its type is checked.
        token: The override as typed.
        override: The same, parsed.
        sweep: Whether a list of values is allowed.

    Returns:
        The override for Hydra, with `++` if its key is in an open mapping.

    Raises:
        ConfigError: The key does not exist, or a value has the wrong type.
    """
    key = override.key_or_group
    _refuse_list_without_sweep(override, sweep=sweep)
    prefix = open_prefix(base, key)
    if prefix is not None:
        has_sign = override.is_add() or override.is_force_add() or override.is_delete()
        if has_sign:
            return token
        return f"++{token}"
    if node_at(base, key) is None:
        raise unknown_key(base, key)
    if override.is_delete():
        raise ConfigError(
            f"{token}: {key} cannot be taken away; give it a value, or null where the comment"
            " allows it."
        )
    parsed_values = _typed_values(override)
    if override.is_range_sweep() and len(parsed_values) == 1:
        raise ConfigError(
            f"{token}: it holds {parsed_values[0]} alone: range() goes in steps of 1. List the"
            f" values: {key}=A,B,C."
        )
    for value in parsed_values:
        assign(base, key, plain_value(value))
    node = node_at(base, key)
    is_open = (
        isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict
    )  # open: Hydra adds to it, or refuses
    return f"{'++' if is_open else ''}{key}={token.split('=', 1)[1]}"


def refuse_meaningless(overrides: Sequence[Override], valid: Sequence[str], action: str) -> None:
    """Refuse overrides that would change nothing about an action.

    Args:
        overrides: Parsed.
        valid: Keys that the action uses, and groups of which it uses any key.
        action: Its name with an article, for the message, such as `an evaluation`.

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
    """Strip the quotes of Hydra's grammar from a parsed value."""
    text = getattr(value, "text", None)  # a quoted string of Hydra's grammar
    if text is not None and not isinstance(value, str):
        return text
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {plain_value(name): plain_value(item) for name, item in value.items()}
    return value


def assign(cfg: DictConfig, key: str, value: object) -> None:
    """Set one value, with type; a mapping is laid over what stands there, as Hydra does.

    Args:
        cfg: Is changed.
        key: Dotted.
        value: Plain.

    Raises:
        ConfigError: With key, value and the type that was expected.
    """
    is_open = open_prefix(cfg, key) is not None
    try:
        OmegaConf.update(cfg, key, value, merge=isinstance(value, dict), force_add=is_open)
    except OmegaConfBaseException as error:
        message = f"{key}={in_yaml(value)}: expected {expected_type(error)}."
        if key == "seed":
            message += " For several seeds write optrun -m seed=0,1,2"
        raise ConfigError(message) from error


def is_hydra(token: str) -> bool:
    """Tell whether an override is for Hydra and not for the run.

    Example:
        >>> is_hydra("hydra/launcher=joblib"), is_hydra("lr=0.1")
        (True, False)
    """
    return token.lstrip("+~").startswith(("hydra.", "hydra/", "hydra="))


def is_search(token: str) -> bool:
    """Tell whether an override is of a sweep's space for one optimizer.

    Example:
        >>> is_search("search.adamw.lr=1e-3,2e-3"), is_search("lr=1e-3,2e-3")
        (True, False)
    """
    return token.lstrip("+~").startswith(SEARCH)
