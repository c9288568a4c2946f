"""What a person sees of a sweep: a live table on a terminal, one line per event everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from optrun.base.errors import printable
from optrun.base.formatting import duration
from optrun.sweeper.folder import JobState, Record
from optrun.sweeper.jobs import Job

_SHOWN_RUNNING = 6


@dataclass
class JobRow:
    """Where a job stands in this start of the sweep."""

    job: Job
    state: JobState
    record: Record = field(default_factory=Record)
    running: bool = False
    resting: bool = False
    """Whether it was found too weak at a rung, and stopped there."""
    stalled: float | None = None
    """For how many seconds it had made no progress when it was killed in this start; None: it was
    not."""
    stalled_now: bool = False
    """Whether its launch has not come back since."""
    suspect: bool = False
    """Whether its worker died, and it is tried once more, alone."""
    retry: int | None = None
    """The attempts it had when it failed, if it is to be tried again."""
    out_of_time: bool = False
    """Whether its `training.max_seconds` is spent; the next start goes on with it."""
    told: bool = False
    """Whether its end was shown."""

    @property
    def left(self) -> bool:
        """Whether it is neither ended, running nor stopped at a rung."""
        return not (self.state.ended or self.running or self.resting)

    @property
    def told_of_stall(self) -> str:
        """For how long it made no progress before it was killed; empty: it was not."""
        return (
            ""
            if self.stalled is None
            else f"made no progress for {duration(self.stalled)} and was killed"
        )

    @property
    def on_devices(self) -> str:
        """The CUDA devices that it was last given; empty where it was not pinned."""
        return f"on {','.join(self.record.devices)}" if self.record.devices else ""


@dataclass
class Board:
    """Where every job of the sweep stands."""

    rows: dict[str, JobRow] = field(default_factory=dict)
    """All jobs that are known, by name."""
    expected: int = 0
    """Jobs in all, those not proposed yet among them."""

    def row(self, job: Job) -> JobRow:
        """Find the row of a job."""
        return self.rows[job.name]

    def count(self, *status: str) -> int:
        """Count the jobs with one of some statuses."""
        return sum(row.state.status in status for row in self.rows.values())

    @property
    def done(self) -> int:
        """Jobs that have ended, or were stopped at a rung."""
        return sum(row.state.ended or row.resting for row in self.rows.values())

    @property
    def total(self) -> int:
        """Jobs in all."""
        return max(self.expected, len(self.rows))

    @property
    def left(self) -> int:
        """Jobs that are neither ended, running nor stopped at a rung."""
        return self.total - len(self.rows) + sum(row.left for row in self.rows.values())

    @property
    def running(self) -> list[JobRow]:
        """Jobs that a process is at work on."""
        return [
            row
            for row in self.rows.values()
            if row.running and not (row.state.ended or row.resting)
        ]

    def counts(self) -> str:
        """Write the counts as one line; each job counts once."""
        rows = self.rows.values()
        resting = sum(row.resting and not row.state.ended for row in rows)
        stopped, left = sum(row.left and row.state.status != "new" for row in rows), self.left
        shown = f" · {resting} stopped at a rung" if resting else ""
        waiting = f", {left - stopped} not started" if left > stopped else ""
        return (
            f"{self.count('finished')} of {self.total} finished · {len(self.running)} running · "
            f"{self.count('failed')} failed{shown} · {left} left"
            + (f" ({stopped} interrupted{waiting})" if stopped else "")
            + "".join(
                f" · {row.job.label} {row.told_of_stall}" for row in rows if row.stalled is not None
            )
        )

    def steps(self) -> tuple[int, int]:
        """Count optimizer steps done, and those that all jobs would take to their end."""
        states = [row.state for row in self.rows.values()]
        return sum(state.step for state in states), sum(
            state.total or state.step for state in states
        )

    def best_line(self) -> str:
        """Describe the best job so far; empty where there is none."""
        best: JobRow | None = None
        for row in self.rows.values():
            value = row.state.best if row.state.status != "failed" else None
            if value is not None and (
                best is None or row.state.better(value, best.state.best or 0.0)
            ):
                best = row
        return (
            ""
            if best is None
            else f"best {best.state.metric} {best.state.best:.5g}: {best.job.label}"
        )


@dataclass
class Eta:
    """How long the rest may take, from how long the jobs of this start took."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, monotonic."""
    ended: int = 0

    def __post_init__(self) -> None:
        """Begin to measure."""
        self.begun = self.clock()

    def __call__(self, board: Board) -> float | None:
        """Seconds left; None while nothing is known."""
        states = [row.state for row in board.running]
        partial = sum(min(1.0, state.step / state.total) for state in states if state.total)
        done = self.ended + partial
        if done <= 0.2:
            return None
        return (self.clock() - self.begun) / done * (board.left + len(board.running) - partial)


class PlainView:
    """One line per event.

    Args:
        console: Where they go.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.eta = Eta()

    def note(self, text: str) -> None:
        """Print a note."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def ended(self, row: JobRow, board: Board, log: str) -> None:
        """Print how a job ended."""
        self.eta.ended += 1
        self.note(event_line(row, board, self.eta(board), log))

    def update(self, board: Board) -> None:
        """Draw nothing: lines are printed as jobs end."""

    def stop(self) -> None:
        """Leave the lines."""


class LiveView(PlainView):
    """Counts, running jobs, best so far and time left, drawn in place.

    Args:
        console: A terminal.
        title: What is being swept.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console)
        self.title = title
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()

    def update(self, board: Board) -> None:
        """Draw the board."""
        self.live.update(self._draw(board), refresh=True)

    def stop(self) -> None:
        """Take the display away; the events stay."""
        self.live.stop()

    def _draw(self, board: Board) -> Group:
        left = self.eta(board)
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=max(board.total, 1), completed=board.done))
        rows: list[Text | Table] = [
            bar,
            Text(board.counts() + (f" · {duration(left)} to go" if left is not None else "")),
        ]
        if board.best_line():
            rows.append(Text(board.best_line(), style="bold green"))
        if board.running:
            rows.append(_running_table(board.running))
        panel = Panel(Group(*rows), title=escape(self.title), title_align="left", padding=(1, 2))
        # The terminal shows ^C where the panel ends: behind a full line it would begin another one,
        # which stays.
        return Group(panel, "")


def _running_table(running: Sequence[JobRow]) -> Table:
    table = Table.grid(padding=(0, 3))
    for row in running[:_SHOWN_RUNNING]:
        state = row.state
        steps = f"step {state.step:,} of {state.total:,}" if state.total else "starting"
        best = f"{state.metric} {state.best:.5g}" if state.best is not None else ""
        table.add_row(
            Text(printable(row.job.label), style="dim"), steps, best, Text(row.on_devices)
        )
    if len(running) > _SHOWN_RUNNING:
        table.add_row(Text(f"and {len(running) - _SHOWN_RUNNING} more", style="dim"))
    return table


def event_line(row: JobRow, board: Board, left: float | None, log: str) -> str:
    """Write the end of a job as one line."""
    state, to_go = row.state, board.left + len(board.running)
    pieces = [
        f"[{board.done:>{len(str(board.total))}}/{board.total}] {state.status:<11} {row.job.label}"
    ]
    if state.status == "failed":
        pieces.append(f"{short(state.message)}  ({log})")
    elif state.best is not None:
        pieces.append(
            f"best {state.metric} {state.best:.5g}  step {state.step:,}  {duration(state.seconds)}"
        )
    pieces += [row.on_devices] if row.on_devices else []
    if to_go:
        pieces.append(f"{to_go} to go" + (f", {duration(left)}" if left is not None else ""))
    return "  ".join(pieces)


def short(message: str, limit: int = 160) -> str:
    """Cut a message to its beginning, in whole sentences where that is enough.

    Example:
        >>> short("step 2: loss nan. Try a smaller lr.", 20)
        'step 2: loss nan.'
    """
    if len(message) <= limit:
        return message
    cut = message[:limit].rfind(". ")
    return message[: cut + 1] if cut > 0 else message[: limit - 3] + "..."


def make_view(console: Console, title: str) -> PlainView:
    """Make the view that suits a console: live on a terminal, plain elsewhere."""
    return (
        LiveView(console, title)
        if console.is_terminal and console.is_interactive
        else PlainView(console)
    )
