"""Runs that branch from a trunk: what they left where, its curve up to there, and what they cannot tell apart.

Branches of one trunk share its luck: they are one observation of it, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optrun.artifacts.metrics import MetricsLog
from optrun.artifacts.run_dir import CHECKPOINTS, RunDir
from optrun.artifacts.trunk import Trunk
from optrun.formatting import plain
from optrun.report.collect import Run, load_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optrun.report.theme import Theme

Array = NDArray[np.float64]
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
        inside = self.folder.parent.name == CHECKPOINTS
        return self.folder.parent.parent if inside else self.folder

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


def facts(run: Run) -> list[tuple[str, str | None]]:
    """List what the run said of its branching, a name and a value each."""
    fork, said = fork_of(run), run.summary.get("branch")
    if fork is None or not isinstance(said, dict):
        return []
    return [
        ("trunk", f"{fork.folder} (step {fork.step:,})"),
        ("optimizer state", str(said.get("optimizer_state", ""))),
        ("schedule", str(said.get("schedule", ""))),
    ]


def name_trunks(runs: Sequence[Run]) -> None:
    """Let branches be compared by where they left a trunk, not by which of the seeds' trunks it was.

    Args:
        runs: Their `respelt` is filled; those of before there were branches get the keys.
    """
    forks = {id(run): fork for run in runs if (fork := fork_of(run)) is not None}
    kinds: dict[str, str] = {}
    for fork in forks.values():
        kinds.setdefault(fork.kind, plain(fork.run.name))
    for run in runs:
        run.config.setdefault("branch_schedule", "continue")
        run.config.setdefault(KEY, None)
        found = forks.get(id(run))
        if found is not None:
            several = f"{kinds[found.kind]} " if len(kinds) > 1 else ""
            run.respelt[KEY] = f"{several}step {found.step:,}"


def planned_step(trunk: object) -> object:
    """Name where planned branches leave their trunks, whichever seeds' trunks these are.

    Example:
        >>> planned_step("/runs/oak-0/checkpoints/step-00000100@0123456789abcdef"), planned_step(None)
        ('step-00000100', None)
    """
    pinned = Trunk.parse(trunk) if isinstance(trunk, str) else None
    return trunk if pinned is None else pinned.folder.name


def shared_luck(runs: Iterable[Run]) -> str:
    """Say which ranked branches share a trunk, where no seeds of it are left to test by; empty where none do."""
    forks = [fork for run in runs if (fork := fork_of(run)) is not None]
    trunks = {fork.trunk: fork.name for fork in forks}
    if len(forks) < 2 or len(trunks) > 1:
        return ""
    return (
        f"{len(forks)} runs branch from one trunk ({next(iter(trunks.values()))}) and share its luck: they may be "
        f"compared with each other, and count as one seed. For a verdict {ADVICE}."
    )


def trunk_log(run: Run) -> Run | None:
    """Read the trunk of a branch up to where it was left; None where it is gone, or another run lies there now."""
    fork = fork_of(run)
    return None if fork is None else _trunk(fork)


@lru_cache(maxsize=64)
def _trunk(fork: Fork) -> Run | None:
    if not RunDir(fork.run).is_run():
        return None
    trunk = load_run(fork.run)
    if trunk.summary.get("run_id") not in (None, fork.trunk):
        return None
    records = [record for record in trunk.log.records if record.get("step", 0) <= fork.step]
    before = trunk_log(trunk)  # a branch of a branch
    trunk.log = MetricsLog([*(before.log.records if before is not None else ()), *records])
    return trunk


def trunk_line(run: Run, metric: str, axis: str) -> tuple[Array, Array]:
    """A metric of the trunk up to where a run left it; both empty where there is none.

    Args:
        run: A branch.
        metric: What was logged.
        axis: `step`, `epoch` or `time`.

    Returns:
        Places and finite values; shapes (n,) and (n,).
    """
    trunk = trunk_log(run)
    if trunk is None:
        return np.empty(0), np.empty(0)
    steps, values = trunk.series(metric)
    x = trunk.elapsed(steps) if axis == "time" else trunk.epochs(steps) if axis == "epoch" else steps
    keep = np.isfinite(x) & np.isfinite(values)
    return x[keep], values[keep]


def joined(
    run: Run,
    metric: str,
    axis: str,
    line: tuple[Array, Array],
    smoothed: Callable[[Array], Array] = np.asarray,
) -> tuple[Array, Array]:
    """Begin the line of a branch where its trunk's ends; any other line stays as it is.

    Args:
        run: A branch, or not.
        metric: What is drawn.
        axis: As for `trunk_line`.
        line: Of the run, smoothed.
        smoothed: What was done to it, to be done to the trunk's.
    """
    x, y = trunk_line(run, metric, axis)
    if not len(x) or not len(line[0]) or x[-1] >= line[0][0]:
        return line
    return np.concatenate([x[-1:], line[0]]), np.concatenate([smoothed(y)[-1:], line[1]])


def draw_trunks(
    ax: Axes,
    runs: Iterable[Run],
    metric: str,
    axis: str,
    theme: Theme,
    *,
    scale: float = 1.0,
    smoothed: Callable[[Array], Array] = np.asarray,
    mode: str = "",
) -> None:
    """Draw each trunk once, up to the last branch, with a dot where each leaves it.

    Args:
        ax: Where the branches are drawn.
        runs: Branches, and others.
        metric: What is drawn.
        axis: Against what.
        theme: Colours.
        scale: Seconds in the unit of the axis.
        smoothed: What is done to the lines of the branches.
        mode: "min" or "max" where the limits show the branches: they are moved so that they show the fork.
    """
    style: dict[str, Any] = {"color": theme.muted, "linewidth": 2.2, "solid_capstyle": "round", "zorder": 1.9}
    longest: dict[str, tuple[Array, Array]] = {}
    forks: dict[tuple[str, float], float] = {}
    for run in runs:
        fork = fork_of(run)
        x, y = trunk_line(run, metric, axis)
        if fork is None or not len(x):
            continue
        x, y = x / scale, smoothed(y)
        forks[fork.trunk, float(x[-1])] = float(y[-1])
        if len(x) > len(longest.get(fork.trunk, (np.empty(0),))[0]):
            longest[fork.trunk] = x, y
    if not longest:
        return
    end = ax.dataLim.x1
    for number, (x, y) in enumerate(longest.values()):
        label = None if number else "trunk" if len(longest) == 1 else f"{len(longest)} trunks"
        ax.plot(x, y, label=label, **style)
    places = [(x, y) for (_, x), y in forks.items()]
    ax.plot(*zip(*places, strict=True), marker="o", markersize=6, color=theme.muted, linewidth=0, zorder=1.95)
    if mode:
        _show_fork(ax, min(x for x, _ in places), end, list(longest.values()), mode)


def _show_fork(ax: Axes, fork: float, end: float, trunks: Sequence[tuple[Array, Array]], mode: str) -> None:
    """Let a picture of branches begin as far before the first fork as they reach, with what of the trunk is near."""
    begin = max(fork - (end - fork), min(float(x[0]) for x, _ in trunks))
    ax.set_xlim(begin - 0.03 * (end - begin), end + 0.03 * (end - begin))
    near = np.concatenate([y[x >= begin] for x, y in trunks])
    low, high = ax.get_ylim()
    room = high - low
    if mode == "min":
        ax.set_ylim(low, max(high, min(float(near.max()) + 0.05 * room, high + room)))
    else:
        ax.set_ylim(min(low, max(float(near.min()) - 0.05 * room, low - room)), high)
