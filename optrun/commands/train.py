"""`optrun` without a verb: one of Hydra's services, a run, a run that goes on, or a sweep."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra.types import RunMode

from optrun.commands import hydra_options, hydra_services
from optrun.commands.resume import resume, resume_value
from optrun.commands.single_run import Caller, start
from optrun.config import overrides, store
from optrun.config.hydra_internals import Hydra
from optrun.config.request import DEFAULT_CONFIG, CommandLine
from optrun.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from optrun.commands.sweep import SweepOutcome
    from optrun.runner.train import Outcome

_OF_SWEEPS = ("hydra.sweep.", "hydra.sweeper.", "hydra.launcher.", "hydra/sweeper", "hydra/launcher")
"""Begin the overrides that a single run would ignore."""


def run(argv: list[str]) -> int:
    """Train, or show what would be trained.

    Args:
        argv: Arguments after `optrun`.

    Returns:
        The exit code.
    """
    parser = hydra_options.parser()
    args = hydra_options.parse(parser, argv)
    hydra = store.open_hydra(args.config_dir)
    if hydra_services.answer(hydra, parser, args):
        return EXIT_DONE
    command_line = CommandLine(
        argv=argv,
        config_name=args.config_name or DEFAULT_CONFIG,
        names_config=args.config_name is not None,
        config_dir=args.config_dir,
        overrides=args.overrides,
    )
    overrides.refuse_twice(overrides.parse(args.overrides))
    resumes = resume_value(args.overrides) is not None
    sweeps = args.multirun or (not resumes and is_sweep(hydra, command_line))
    if args.cfg or args.info:
        checked = overrides.checked(hydra, command_line.config_name, command_line.overrides, sweep=sweeps)
        hydra_services.show(hydra, command_line.config_name, checked, args)
        return EXIT_DONE
    from rich.console import Console

    caller = Caller(Console())
    if sweeps:
        return start_sweep(hydra, command_line, caller).exit_code
    train(hydra, command_line, caller)
    return EXIT_DONE


def train(hydra: Hydra, command_line: CommandLine, caller: Caller) -> Outcome:
    """Start a run, or go on with one where the command line or a recipe says `resume`.

    Args:
        hydra: Over the user's folders.
        command_line: Not checked yet.
        caller: Who asked for it.

    Raises:
        OptrunError: It is refused, or comes to a bad end.
    """
    refuse_ranks()
    for token in command_line.overrides:
        if token.lstrip("+~").startswith(_OF_SWEEPS):
            raise ConfigError(f"{token}: has no effect on a single run. Add -m for a sweep, or leave it out.")
    overrides.refuse_twice(overrides.parse(command_line.overrides))
    value = resume_value(command_line.overrides)
    if value is None:
        checked = overrides.checked(hydra, command_line.config_name, command_line.overrides, sweep=False)
        cfg = store.compose(hydra, command_line.config_name, checked)
        if cfg.resume is None:
            return start(hydra, replace(command_line, overrides=checked), cfg, caller)
        value = str(cfg.resume)  # a recipe of the user's says so
    return resume(hydra, command_line, value, caller)


def start_sweep(hydra: Hydra, command_line: CommandLine, caller: Caller) -> SweepOutcome:
    """Start a sweep, or go on with one.

    Args:
        hydra: Over the user's folders.
        command_line: Not checked yet.
        caller: Who asked for it.

    Raises:
        OptrunError: It is refused; no job was started.
    """
    from optrun.commands.sweep import sweep

    refuse_ranks()
    checked = overrides.checked(hydra, command_line.config_name, command_line.overrides, sweep=True)
    for token in checked:
        if token.startswith("hydra.run."):
            raise ConfigError(f"{token}: has no effect on a sweep; hydra.sweep.dir=DIR says where its jobs lie.")
    cfg = store.compose(hydra, command_line.config_name, checked, RunMode.MULTIRUN)
    if cfg.resume is not None or resume_value(command_line.overrides) is not None:
        raise ConfigError("resume goes on with one run; a sweep is taken up by repeating its own command.")
    own = is_sweep(hydra, replace(command_line, overrides=()))
    return sweep(hydra, replace(command_line, overrides=checked), cfg, caller, sweeps_by_itself=own)


def is_sweep(hydra: Hydra, command_line: CommandLine) -> bool:
    """Whether a recipe, or an override, says that this is a sweep without `-m`."""
    mode = [token for token in command_line.overrides if token.startswith("hydra.mode=")]
    if command_line.config_name == DEFAULT_CONFIG and not mode:
        return False
    return bool(store.compose(hydra, command_line.config_name, mode).hydra.mode == RunMode.MULTIRUN)


def refuse_ranks() -> None:
    """Refuse to be one of several processes: each would train alone, in the same directory.

    Raises:
        ConfigError: `WORLD_SIZE` says that there are more, as under torchrun.
    """
    ranks = os.environ.get("WORLD_SIZE", "1").strip()
    if ranks not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE={ranks}: optrun trains in one process; expected WORLD_SIZE=1. Start it once, without "
            "torchrun; a sweep (-m) uses several devices side by side."
        )
