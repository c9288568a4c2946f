"""Resolve `lr=auto lr_from=SWEEP_DIR`: the learning rate found by a sweep of the same recipe."""

from dataclasses import replace

from omegaconf import DictConfig
from rich.console import Console

from optrun.base.errors import ConfigError, refuse_url
from optrun.base.formatting import rate
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config import saved, store
from optrun.config.compose import compose_line
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine
from optrun.config.schema.parametrization import merged
from optrun.runner.forks.command_line import add_trunk_config


def resolve(hydra: Hydra, command_line: CommandLine) -> tuple[CommandLine, str | None]:
    """Replace `lr=auto` by a prediction from the sweep in `lr_from`.

    Args:
        hydra: Composes configurations.
        command_line: The command line of one run; with `branch_from` it includes the overrides of
            the run that it branches from.

    Returns:
        The command line with a number for `lr` and without `lr_from`, and a sentence for `lr_from`
        in the run's configuration: the origin of the number and its interval. The sentence is None
        without `lr=auto`.

    Raises:
        ConfigError: Only one of `lr=auto` and `lr_from` is given, or the sweep has another
            configuration or cannot predict the size.
    """
    lr = command_line.override("lr")
    lr_from = command_line.override("lr_from")
    is_automatic = lr is not None and lr.value() == "auto"
    if lr_from is None and not is_automatic:
        return command_line, None
    if lr_from is None:
        raise ConfigError("lr=auto: add lr_from=SWEEP_DIR, a sweep over lr of the same recipe.")
    if not is_automatic:
        raise ConfigError(f"{lr_from.input_line}: add lr=auto, or leave it out.")
    sweep = str(lr_from.value())
    refuse_url("lr_from", sweep)
    from optrun.report.lr_scaling.predict import find_lr_for_run

    remaining = command_line.without("lr", "lr_from")
    _, cfg = compose_line(hydra, remaining)
    values = saved.plain(store.without_hydra(cfg))
    try:
        number, sentence = find_lr_for_run(sweep, values, _values_at_base(values))
    except ConfigError as error:
        raise ConfigError(f"lr=auto lr_from={sweep}: {error}") from error
    return replace(command_line, overrides=[*remaining.overrides, f"lr={rate(number)}"]), sentence


def _values_at_base(values: PlainMapping) -> PlainDict | None:
    """Return the configuration of the base model of muP, with the standard parametrization.

    At the base sizes both parametrizations are the same, so a sweep of that configuration may stand
    for one under muP. None for a run without muP, or whose model takes no `model.config`.
    """
    parametrization = values["parametrization"]
    model = values["model"]
    if parametrization["name"] != "mup" or "config" not in model:
        return None
    config = merged(model["config"] or {}, parametrization["base"])
    return {**values, "model": {**model, "config": config}, "parametrization": {"name": "standard"}}


def compose_new(
    hydra: Hydra, command_line: CommandLine, console: Console
) -> tuple[list[str], DictConfig]:
    """Compose a new run; replace `lr=auto` by a number, and print where it comes from.

    With `branch_from` the overrides of the run that it branches from, its trunk, come first.

    Args:
        hydra: Composes configurations.
        command_line: The command line, not checked yet.
        console: Where the origin of the lr is printed, for `lr=auto`.

    Returns:
        The checked overrides, and the composed configuration with the node `hydra`.

    Raises:
        ConfigError: A key or value is unknown or does not fit.
        CheckpointError: The trunk is damaged or gone.
    """
    with_trunk = add_trunk_config(hydra, command_line)
    resolved, origin_of_lr = resolve(hydra, with_trunk)
    checked, cfg = compose_line(hydra, resolved)
    if origin_of_lr is not None:
        console.print(f"lr=auto: {origin_of_lr}", markup=False, highlight=False, soft_wrap=True)
        cfg.lr_from = origin_of_lr
    return checked, cfg
