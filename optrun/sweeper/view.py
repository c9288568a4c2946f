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
from optrun.sweeper.folder import JobState
from optrun.sweeper.jobs import Job

_SHOWN_RUNNING = 6


@dataclass
class Board:
    """Where every job of the sweep stands.

    Args:
        jobs: All of them, as far as they are known.
    """

    jobs: list[Job] = field(default_factory=list)
    states: dict[str, JobState] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    resting: set[str] = field(default_factory=set)
    """Found too weak at a rung, and stopped there."""
    devices: dict[str, list[str]] = field(default_factory=dict)
    """The CUDA devices that a job was last given; empty: it was not pinned."""
    stalled: dict[str, float] = field(default_factory=dict)
    """Jobs that were killed in this start, and for how many seconds they had made no progress."""
    expected: int = 0
    """Jobs in all, those not proposed yet among them."""

    def count(self, status: str) -> int:
        """Jobs with a status."""
        return sum(state.status == status for state in self.states.values())

    @property
    def total(self) -> int:
        """Jobs in all."""
        return max(self.expected, len(self.jobs))

    @property
    def left(self) -> int:
        """Jobs that are neither ended, running nor stopped at a rung, those not proposed yet among them."""
        return self.total - len(self.jobs) + sum(self._is_left(name) for name in self.states)

    def _is_left(self, name: str) -> bool:
        return not (self.states[name].ended or name in self.running or name in self.resting)

    def device(self, job: Job) -> str:
        """Name the devices of a job; empty where it was not pinned."""
        found = self.devices.get(job.name)
        return f"on {','.join(found)}" if found else ""

    def best(self) -> tuple[Job, JobState] | None:
        """The best job so far."""
        found: tuple[Job, JobState] | None = None
        for job in self.jobs:
            state = self.states.get(job.name)
            if state is None or state.best is None or state.status == "failed":
                continue
            if found is None or found[1].best is None or state.better(state.best, found[1].best):
                found = (job, state)
        return found

    def counts(self) -> str:
        """Write the counts as one line; each job counts once."""
        ended = {name for name, state in self.states.items() if state.ended}
        resting = len(self.resting - ended)
        shown = f" · {resting} stopped at a rung" if resting else ""
        return (
            f"{self.count('finished')} of {self.total} finished · {len(self.running - ended - self.resting)} running · "
            f"{self.count('failed')} failed{shown} · {self.left} left{self._left_as()}"
            + "".join(f" · {job.label} {self.told_of_stall(job)}" for job in self.jobs if job.name in self.stalled)
        )

    def told_of_stall(self, job: Job) -> str:
        """Say for how long a job made no progress before it was killed; empty: it was not."""
        seconds = self.stalled.get(job.name)
        return "" if seconds is None else f"made no progress for {duration(seconds)} and was killed"

    def _left_as(self) -> str:
        """Tell the interrupted among those left from those that have not begun; empty where none was interrupted."""
        stopped = sum(self._is_left(name) and state.status != "new" for name, state in self.states.items())
        if not stopped:
            return ""
        waiting = self.left - stopped
        return f" ({stopped} interrupted{f', {waiting} not started' if waiting else ''})"

    def best_line(self) -> str:
        """Describe the best job so far; empty where there is none."""
        found = self.best()
        if found is None:
            return ""
        job, state = found
        return f"best {state.metric} {state.best:.5g}: {job.label}"


class Eta:
    """How long the rest may take, from how long the jobs of this start took.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.begun = clock()
        self.ended = 0

    def __call__(self, board: Board) -> float | None:
        """Seconds left; None while nothing is known."""
        partial = 0.0
        for name in board.running:
            state = board.states.get(name)
            if state is not None and state.total:
                partial += min(1.0, state.step / state.total)
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

    def ended(self, job: Job, state: JobState, board: Board, log: str) -> None:
        """Print how a job ended."""
        self.eta.ended += 1
        self.note(event_line(job, state, board, self.eta(board), log))

    def update(self, board: Board) -> None:
        """Does nothing: lines are printed as jobs end."""

    def stop(self) -> None:
        """Does nothing: no display is drawn."""


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

    def _draw(self, board: Board) -> Panel:
        done = board.count("finished") + board.count("failed") + len(board.resting)
        left = self.eta(board)
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=max(board.total, 1), completed=done))
        rows: list[Text | Table] = [
            bar,
            Text(board.counts() + (f" · {duration(left)} to go" if left is not None else "")),
        ]
        if board.best_line():
            rows.append(Text(board.best_line(), style="bold green"))
        running = [job for job in board.jobs if job.name in board.running]
        if running:
            rows.append(_running_table(running, board))
        return Panel(Group(*rows), title=escape(self.title), title_align="left", padding=(1, 2))


def _running_table(running: Sequence[Job], board: Board) -> Table:
    table = Table.grid(padding=(0, 3))
    for job in running[:_SHOWN_RUNNING]:
        state = board.states.get(job.name, JobState("new"))
        steps = f"step {state.step:,} of {state.total:,}" if state.total else "starting"
        best = f"{state.metric} {state.best:.5g}" if state.best is not None else ""
        table.add_row(Text(printable(job.label), style="dim"), steps, best, Text(board.device(job)))
    if len(running) > _SHOWN_RUNNING:
        table.add_row(Text(f"and {len(running) - _SHOWN_RUNNING} more", style="dim"))
    return table


def event_line(job: Job, state: JobState, board: Board, left: float | None, log: str) -> str:
    """Write the end of a job as one line."""
    done = board.count("finished") + board.count("failed") + len(board.resting)
    pieces = [f"[{done:>{len(str(board.total))}}/{board.total}] {state.status:<11} {job.label}"]
    if state.status == "failed":
        pieces.append(f"{short(state.message)}  ({log})")
    elif state.best is not None:
        pieces.append(f"best {state.metric} {state.best:.5g}  step {state.step:,}  {duration(state.seconds)}")
    if board.device(job):
        pieces.append(board.device(job))
    if board.left + len(board.running):
        pieces.append(f"{board.left + len(board.running)} to go" + (f", {duration(left)}" if left is not None else ""))
    return "  ".join(pieces)


def short(message: str, limit: int = 160) -> str:
    """The beginning of a message, in whole sentences where that is enough.

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
    return LiveView(console, title) if console.is_terminal and console.is_interactive else PlainView(console)
