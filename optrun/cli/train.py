"""`optrun` without a verb: one of Hydra's services, a run, a run that goes on, or a sweep."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra.types import RunMode

from optrun.base import shell
from optrun.base.errors import EXIT_DONE, EXIT_STOPPED_EARLY, EXIT_STORAGE, ConfigError
from optrun.cli import auto_lr, hydra_options, hydra_services
from optrun.cli.messages import guarded
from optrun.config import overrides, store
from optrun.config.groups import default_values
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine
from optrun.distributed.join import Launched, launched
from optrun.runner.forks.command_line import Forks, add_trunk_config
from optrun.sweeper.command import is_sweep as is_sweep

if TYPE_CHECKING:
    from optrun.cli.sweep import SweepOutcome
    from optrun.launch.leader import Leader
    from optrun.launch.single_run import Caller
    from optrun.runner.outcome import Outcome

_OF_SWEEPS = (
    "hydra.sweep.",
    "hydra.sweeper.",
    "hydra.launcher.",
    "hydra/sweeper",
    "hydra/launcher",
    overrides.SEARCH,
)
"""Beginnings of overrides that would have no effect on a single run."""


def run(argv: list[str]) -> int:
    """Train a run or a sweep, or answer an option such as `--help` or `--cfg`.

    In a process of a launcher such as torchrun, only rank 0 reads the configuration; the other
    ranks receive their work from it.

    Args:
        argv: Arguments after `optrun`.

    Returns:
        The exit code.
    """
    # 1. The launcher: ranks above 0 follow. `rank_info` is None if no launcher started this
    # process.
    parser = hydra_options.parser()
    args = hydra_options.parse(parser, argv)
    rank_info = launched(os.environ)
    if rank_info is not None:
        _refuse_alone(rank_info, args)
        if rank_info.rank > 0:
            # Rank 0 alone answers options such as `--help`.
            if any((args.help, args.hydra_help, args.shell_completion, args.cfg, args.info)):
                return EXIT_DONE
            return _join(rank_info, argv, args.overrides)
    # 2. Options that print an answer.
    command_line = CommandLine.of(argv, args.overrides, args.config_name, args.config_dir)
    hydra = store.open_hydra(command_line.config_dir)
    if hydra_services.answer(hydra, parser, args, command_line):  # True: it has printed an answer
        return EXIT_DONE
    resumes = command_line.resume is not None
    sweeps = args.multirun or (not resumes and is_sweep(hydra, command_line))
    if args.cfg or args.info:
        _show(hydra, command_line, args, sweeps=sweeps)
        return EXIT_DONE

    # 3. The run or the sweep.
    def train_or_sweep(leader: Leader | None = None) -> int:
        from rich.console import Console

        from optrun.launch.single_run import Caller

        caller = Caller(Console(), leader=leader)
        if sweeps:
            return start_sweep(hydra, command_line, caller).exit_code
        train(hydra, command_line, caller)
        return EXIT_DONE

    if rank_info is not None:  # rank 0 of a launcher: it sends the other ranks their work
        return _join(rank_info, argv, args.overrides, train_or_sweep)
    if sys.stderr.isatty():
        # Nothing else appears for seconds.
        sys.stderr.write("optrun: reading configuration, libraries and data ...\n")
    return train_or_sweep()


def _show(
    hydra: Hydra, command_line: CommandLine, args: argparse.Namespace, *, sweeps: bool
) -> None:
    """Print the answer to `--cfg` or `--info`.

    Raises:
        ConfigError: The command line resumes a run or starts a sweep, so there is no single
            configuration.
    """
    if command_line.resume is not None:
        raise ConfigError(
            f"resume: --{'cfg' if args.cfg else 'info'} shows what a command line composes, and"
            " no run. Leave it out; the configuration of a run is in its config.yaml."
        )
    if sweeps:
        common = [token for token in command_line.overrides if not overrides.is_search(token)]
        line = replace(command_line, overrides=common)
    else:
        line, _ = auto_lr.resolve(hydra, add_trunk_config(hydra, command_line))
    checked = overrides.check(hydra, line.config_name, line.parsed, sweep=sweeps).tokens
    sweeps_of_line = (item.input_line for item in line.parsed if item.is_sweep_override())
    several = next(sweeps_of_line, None)
    if args.cfg and several:
        raise ConfigError(
            f"--cfg {args.cfg}: shows one run, and {several} is several. Give one of its values."
        )
    hydra_services.show(hydra, line.config_name, checked, args)


def _refuse_alone(rank_info: Launched, args: argparse.Namespace) -> None:
    """Refuse several processes if each would train alone, before anything is composed.

    Overrides `distributed=` and `resume=`, a recipe and a folder of choices may ask for distributed
    training. With one of them, and under torchrun, this is checked after composition.
    """
    if rank_info.size == 1:
        return
    for token in args.overrides:
        if token.lstrip("+").startswith(("distributed=", "resume=")):
            return
    if args.config_name or args.config_dir or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    from optrun.launch.rank_checks import refuse_one_process

    refuse_one_process(rank_info)


def _join(
    rank_info: Launched,
    argv: list[str],
    overrides: Sequence[str],
    lead: Callable[[Leader], int] | None = None,
) -> int:
    """Run as a rank of a launcher.

    Args:
        rank_info: Rank and addresses from the launcher.
        argv: Arguments after `optrun`.
        overrides: The overrides in `argv`.
        lead: Run on rank 0; None on another rank, which receives its work.
    """
    from optrun.launch.leader import Leader, follow_leader
    from optrun.launch.rank import begin, leave

    def take_part(argv: list[str]) -> int:
        rank = begin(rank_info)
        rendezvous = rank.join_rendezvous(_timeout(overrides), {"command line": shell.join(argv)})
        if lead is None:
            return follow_leader(rank, rendezvous)
        with Leader(rank, rendezvous) as leader:
            return lead(leader)

    return leave(guarded(take_part, argv))


def _timeout(tokens: Sequence[str]) -> float:
    """Read the timeout for the other ranks from the overrides, before anything is composed.

    A value that is no number counts as the default; rank 0 refuses it later.
    """
    timeouts = [token for token in tokens if token.startswith("distributed.timeout_seconds=")]
    try:
        return float(timeouts[-1].partition("=")[2])
    except (IndexError, ValueError):  # rank 0 refuses what is no number
        return float(default_values("distributed", "ddp")["timeout_seconds"])


def train(hydra: Hydra, command_line: CommandLine, caller: Caller) -> Outcome:
    """Start a run, or resume one if the command line or the recipe has `resume`.

    Args:
        hydra: Composes configurations, also from the user's folders.
        command_line: The command line, not checked yet.
        caller: The command line or a Python program, and where it prints.

    Raises:
        ConfigError: An override is for sweeps only, or several processes call this from Python.
        OptrunError: The run is refused or fails.
    """
    from optrun.cli.resume import resume
    from optrun.launch.single_run import start

    _refuse_call_in_rank(caller)
    for token in command_line.overrides:
        if token.lstrip("+~").startswith(_OF_SWEEPS):
            raise ConfigError(
                f"{token}: has no effect on a single run. Add -m for a sweep, or leave it out."
            )
    value = command_line.resume
    if value is None:
        checked, cfg = auto_lr.compose_new(hydra, command_line, caller.console)
        if cfg.resume is None:
            return start(hydra, replace(command_line, overrides=checked), cfg, caller)
        value = str(cfg.resume)  # a recipe of the user's says so
    return resume(hydra, command_line, value, caller)


def start_sweep(hydra: Hydra, command_line: CommandLine, caller: Caller) -> SweepOutcome:
    """Start or continue a sweep, then its confirmation if `hydra.sweeper.confirm` asks for one.

    Args:
        hydra: Composes configurations, also from the user's folders.
        command_line: The command line, not checked yet.
        caller: The command line or a Python program, and where it prints.

    Raises:
        OptrunError: The sweep is refused; no job was started.
    """
    from optrun.cli.sweep import sweep

    _refuse_call_in_rank(caller)
    if caller.launched is not None and caller.launched.size > 1:
        raise ConfigError(
            f"{caller.launched.size_variable}: under {caller.launched.launcher} rank 0 alone would"
            f" start the sweep. Start it without {caller.launched.launcher}; its jobs may have"
            " distributed=ddp."
        )
    # 1. The overrides of all jobs; those of one optimizer are checked with its contender.
    search_tokens = [token for token in command_line.overrides if overrides.is_search(token)]
    common = [token for token in command_line.overrides if not overrides.is_search(token)]
    forks = Forks(hydra, command_line)
    checked = forks.check(common, sweep=True)
    for token in checked:
        if token.startswith("hydra.run."):
            raise ConfigError(
                f"{token}: has no effect on a sweep; hydra.sweep.dir=DIR names the folder of its"
                " jobs."
            )
        if token.startswith("hydra.sweep.subdir="):
            raise ConfigError(
                f"{token}: optrun names the folders of jobs itself; hydra.sweep.dir=DIR moves all."
            )
    cfg = store.compose(hydra, command_line.config_name, forks.complete(checked), RunMode.MULTIRUN)
    if cfg.resume is not None or command_line.resume is not None:
        raise ConfigError("resume continues one run; to continue a sweep, repeat its command.")
    # 2. The sweep.
    command_line = replace(command_line, overrides=[*checked, *search_tokens])
    outcome = sweep(hydra, command_line, cfg, caller, forks)
    was_cut_short = outcome.exit_code in (EXIT_STOPPED_EARLY, EXIT_STORAGE)
    if outcome.confirm is None or was_cut_short:
        return outcome
    # 3. Its confirmation.
    from optrun.cli.confirm_sweep import confirm
    from optrun.cli.values import read_request

    seconds_left = outcome.seconds_left  # one limit for the whole command
    request = read_request(**vars(outcome.confirm))
    confirmation = confirm(
        outcome.folder, request, caller, command_line.overrides, seconds=seconds_left
    )
    return replace(
        outcome,
        exit_code=confirmation.exit_code or outcome.exit_code,
        verdict=confirmation.verdict or outcome.verdict,
    )


def _refuse_call_in_rank(caller: Caller) -> None:
    """Refuse a call from Python in one of several processes.

    Each would train alone, in the same directory.

    Raises:
        ConfigError: A launcher such as torchrun started this process.
    """
    rank_info = launched(os.environ)
    if caller.leader is None and rank_info is not None and rank_info.size > 1:
        raise ConfigError(
            f"{rank_info.size_variable}: optrun.run and optrun.sweep start their ranks themselves,"
            f" with distributed=ddp; they are no part of {rank_info.launcher}'s. Call them in one"
            f" process, or start the command: {rank_info.launcher} ... -m optrun distributed=ddp."
        )
