"""The command line of a sweep, which every job of it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.types import RunMode

from optrun.base.plain import PlainMapping
from optrun.config import store
from optrun.config.hydra_internals import Hydra
from optrun.config.registry.plugins import options
from optrun.config.request import DEFAULT_CONFIG, CommandLine

_ALONE = "hydra.mode=RUN"
"""Makes one run of a recipe that is a sweep."""


@dataclass(frozen=True, kw_only=True)
class SweepCommand(CommandLine):
    """The command line of a sweep, with checked overrides.

    It is sent to other processes, so it holds plain values only.
    """

    plugins: Sequence[PlainMapping] = ()
    """Records of the plugins that were loaded for it."""
    plugins_may_change: bool = False
    """Whether jobs may go on with plugins that changed since they were trained with them."""
    sweeps_by_itself: bool = False
    """Whether the recipe is a sweep without `-m`."""

    def job_argv(self, overrides: Sequence[str]) -> list[str]:
        """Return the arguments of `optrun` for a single job.

        Example:
            >>> SweepCommand(config_name="mine", config_dir="conf").job_argv(["lr=0.1"])
            ['-cn', 'mine', '--config-dir', 'conf', 'lr=0.1']
        """
        arguments = list(options(self.plugins))
        if self.config_name != DEFAULT_CONFIG:
            arguments += ["-cn", self.config_name]
        if self.config_dir is not None:
            arguments += ["--config-dir", self.config_dir]
        if self.sweeps_by_itself:
            arguments.append(_ALONE)
        return [*arguments, *overrides]


@dataclass
class Launch:
    """The jobs of one launcher call; written as JSON for the process that makes the call."""

    folder: str
    """The sweep directory."""
    token: str
    """Names the sweep process that asked, in records and in its stop file."""
    command: SweepCommand
    jobs: dict[str, list[str]]
    """Name of each job -> its overrides."""
    stop_at: dict[str, int]
    """Jobs that pause, and after how many optimizer steps; the others go to their end."""
    retry: dict[str, int]
    """Failed jobs to try again, with the attempts they had."""
    devices: list[str]
    """What `CUDA_VISIBLE_DEVICES` of its process names; empty: nothing was set for this sweep."""


def is_sweep(hydra: Hydra, command_line: CommandLine) -> bool:
    """Tell whether a recipe or an override starts a sweep without `-m`."""
    mode = [token for token in command_line.overrides if token.startswith("hydra.mode=")]
    if command_line.config_name == DEFAULT_CONFIG and not mode:
        return False
    return bool(store.compose(hydra, command_line.config_name, mode).hydra.mode == RunMode.MULTIRUN)
