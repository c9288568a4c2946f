"""Resolve `lr=auto lr_from=SWEEP_DIR`: the learning rate found by a sweep of the same recipe."""

from __future__ import annotations

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
from optrun.runner.forks.command_line import whole_command_line


def resolve(hydra: Hydra, command_line: CommandLine) -> tuple[CommandLine, str | None]:
    """Replace `lr=auto` by the learning rate of a sweep.

    Args:
        hydra: Composes.
        command_line: Of one run, its trunk's overrides among its own.

    Returns:
        The command line with the number and without `lr_from`, and what `lr_from` of the run's
        configuration says: where the number came from, with its interval. None if nobody asked.

    Raises:
        ConfigError: One of both keys alone; the sweep is of another recipe or does not tell.
    """
    lr = command_line.override("lr")
    lr_from = command_line.override("lr_from")
    automatic = lr is not None and lr.value() == "auto"
    if lr_from is None and not automatic:
        return command_line, None
    if lr_from is None:
        raise ConfigError(
            "lr=auto: takes its number from a sweep over lr of the same recipe: add"
            " lr_from=SWEEP_DIR."
        )
    if not automatic:
        raise ConfigError(
            f"{lr_from.input_line}: says where lr=auto takes its number from: add it."
        )
    sweep = str(lr_from.value())
    refuse_url("lr_from", sweep)
    from optrun.report.lr_scaling.predict import find_lr_for_run

    remaining = command_line.without("lr", "lr_from")
    _, cfg = compose_line(hydra, remaining)
    values = saved.plain(store.without_hydra(cfg))
    lr_of_sweep, sentence = find_lr_for_run(sweep, values, _base_of(values))
    tokens = [*remaining.overrides, f"lr={rate(lr_of_sweep)}"]
    return replace(command_line, overrides=tokens), sentence


def _base_of(values: PlainMapping) -> PlainDict | None:
    """Return the configuration of the base of muP, in the standard parametrization; else None."""
    parametrization = values["parametrization"]
    model = values["model"]
    if parametrization["name"] != "mup" or "config" not in model:
        return None
    config = merged(model["config"] or {}, parametrization["base"])
    return {
        **values,
        "model": {**model, "config": config},
        "parametrization": {"name": "standard"},
    }


def compose_new(
    hydra: Hydra, command_line: CommandLine, console: Console
) -> tuple[list[str], DictConfig]:
    """Compose a new run.

    A branch is composed on its trunk; `lr=auto` becomes a number.

    Args:
        hydra: Composes.
        command_line: Not checked yet.
        console: Where the learning rate is said.

    Returns:
        The checked overrides, and what they compose to, Hydra's node in it.

    Raises:
        ConfigError: A key or value that does not exist or does not fit.
        CheckpointError: The trunk is damaged or gone.
    """
    with_trunk = whole_command_line(hydra, command_line)
    resolved, learnt = resolve(hydra, with_trunk)
    checked, cfg = compose_line(hydra, resolved)
    if learnt is not None:
        console.print(f"lr=auto: {learnt}", markup=False, highlight=False, soft_wrap=True)
        cfg.lr_from = learnt
    return checked, cfg
