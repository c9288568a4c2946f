"""Runs that branch from a trunk: what they left where, and what they cannot tell apart.

Branches of one trunk share its luck: they are one observation of it, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts.run_dir import CHECKPOINTS
from optrun.artifacts.trunk import Trunk
from optrun.base.formatting import plain
from optrun.report.collect import Run, Setting

KEY = "branch_from"
ADVICE = "train trunks of more seeds and branch from each: branch_from=TRUNK_0,TRUNK_1,TRUNK_2"


@dataclass(frozen=True)
class Fork:
    """Where a run left its trunk."""

    folder: Path
    """The checkpoint."""
    trunk: str
    """Identity of the trunk's run, or its checkpoint where it has none."""
    kind: str
    """Digest of the trunk's configuration but for the seed."""
    step: int

    @property
    def run(self) -> Path:
        """Where the trunk lies, or lay."""
        return self.folder.parents[1] if self.folder.parent.name == CHECKPOINTS else self.folder

    @property
    def name(self) -> str:
        """The trunk's directory and the step."""
        return plain(f"{self.run.name} step {self.step:,}")


def fork_of(run: Run) -> Fork | None:
    """Read where a run left its trunk; None for one that has none."""
    said = run.summary.get("branch")
    if not isinstance(said, dict) or not isinstance(said.get("step"), int) or "folder" not in said:
        return None
    trunk = said.get("run_id") or said.get("digest")
    return Fork(Path(str(said["folder"])), str(trunk), str(said.get("trunk_config")), said["step"])


def note(run: Run) -> str:
    """Name trunk and step of a branch; empty for any other run."""
    fork = fork_of(run)
    return "" if fork is None else f"branch of {fork.name}"


def name_trunks(runs: Sequence[Run]) -> None:
    """Compare branches by where they left a trunk, not by the seed of the trunk.

    Args:
        runs: Their `respelt` is filled.
    """
    forks = [(run, fork) for run in runs if (fork := fork_of(run)) is not None]
    kinds = {fork.kind: plain(fork.run.name) for _, fork in reversed(forks)}
    for run, fork in forks:
        several = f"{kinds[fork.kind]} " if len(kinds) > 1 else ""
        run.respelt[KEY] = f"{several}step {fork.step:,}"


def planned_step(trunk: Setting) -> Setting:
    """Name where planned branches leave their trunks, whichever seeds' trunks these are.

    Example:
        >>> planned_step("/runs/oak/checkpoints/step-00000100@0123456789abcdef"), planned_step(None)
        ('step-00000100', None)
    """
    pinned = Trunk.parse(trunk) if isinstance(trunk, str) else None
    return trunk if pinned is None else pinned.folder.name


def shared_luck(runs: Iterable[Run]) -> str:
    """Say which ranked branches share a trunk, where no seeds of it are left to test by.

    Empty where none do.
    """
    forks = [fork for run in runs if (fork := fork_of(run)) is not None]
    trunks = {fork.trunk: fork.name for fork in forks}
    if len(forks) < 2 or len(trunks) > 1:
        return ""
    return (
        f"{len(forks)} runs branch from one trunk ({next(iter(trunks.values()))}) and share its"
        " luck: they may be compared with each other, and count as one seed. For a verdict"
        f" {ADVICE}."
    )
