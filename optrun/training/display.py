"""Progress on the screen: a live display on a terminal, plain lines everywhere else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from optrun.base.errors import printable
from optrun.base.formatting import duration, number, size
from optrun.base.plain import PlainMapping
from optrun.training.callback import Callback, TrainingContext
from optrun.training.step import StepResult

log = logging.getLogger("optrun")
Item = TypeVar("Item")
_WIDTH = 100
"""Characters of a plain line, before the time that is left."""


class Display(Callback):
    """Shows progress, from the begin of training to its end, and one-line notes.

    This one shows nothing.
    """

    hears_late = True

    def start(self, step: int, total: int) -> None:
        """Show the begin of training, after `step` of `total` steps."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the figures of a step."""

    def evaluating(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done; of no batches it has ended."""

    def record(self, record: PlainMapping) -> None:
        """Show what was logged at a step."""

    def note(self, text: str) -> None:
        """Show one line."""

    def stop(self) -> None:
        """Take it away."""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Show it."""
        self.start(training.global_step, training.total_steps)

    def on_step(self, training: TrainingContext, result: StepResult) -> None:
        """Show the step's figures."""
        figures = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            **training.setup.state.lrs,
        }
        self.step(training.global_step, figures)

    def on_log(self, training: TrainingContext, record: PlainMapping) -> None:
        """Show the line."""
        self.step(training.global_step, record)
        self.record(record)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Take it away."""
        self.stop()


class PlainDisplay(Display):
    """One line per record: for pipes, files and logs.

    Args:
        console: Where the lines go.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.begun = time.monotonic()
        self.first = 0
        self.main_metric = ""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Note the metric that no line leaves out."""
        self.main_metric = training.setup.ranking.metric
        super().on_train_begin(training)

    def start(self, step: int, total: int) -> None:
        """Take the time from here on."""
        self.total = total
        self.first = step
        self.begun = time.monotonic()

    def record(self, record: PlainMapping) -> None:
        """Show one line with everything that was logged at a step."""
        line = plain_line(record, self.total, width=_WIDTH, main_metric=self.main_metric)
        done = int(record["step"]) - self.first
        if done == 0:
            self.begun = time.monotonic()
        elif record["step"] < self.total:
            seconds_left = (
                (time.monotonic() - self.begun) / done * (self.total - int(record["step"]))
            )
            line += f"  left {duration(seconds_left)}"
        self.note(line)

    def note(self, text: str) -> None:
        """Print one line."""
        log.info(text)
        console = self.console
        line = printable(text)
        if console.quiet or console.record or console.is_terminal or console.is_jupyter:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        try:  # what rich writes into a file after a tenth of a millisecond of layout
            console.file.write(f"{line.expandtabs()}\n")
            console.file.flush()
        except BrokenPipeError:
            console.on_broken_pipe()


def plain_line(
    record: PlainMapping, total: int, width: int | None = None, main_metric: str = ""
) -> str:
    """Write a record as one line.

    Args:
        record: As it stands in `metrics.jsonl`.
        total: Steps of the run.
        width: Characters for loss, lr and evaluations, as many as fit; None: every number, however
            many.
        main_metric: The first of the evaluations.

    Example:
        >>> record = {"step": 10, "epoch": 0.5, "train/loss": 2.5}
        >>> record |= {"train/grad_norm": 1.0, "train/lr": 0.001}
        >>> plain_line(record, 20)
        'step 10/20  epoch 0.50  train/loss 2.5  train/grad_norm 1  train/lr 0.001'
        >>> plain_line(record, 20, width=60)
        'step 10/20  epoch 0.50  train/loss 2.5  train/lr 0.001'
    """
    columns = [f"step {record['step']}/{total}", f"epoch {record.get('epoch', 0):.2f}"]
    names = sorted(record, key=lambda name: (name.startswith("eval/"), name != main_metric))
    for name in names:
        value = record[name]
        if name in ("step", "epoch", "time", "unscheduled") or name.startswith("lr/"):
            continue
        if width is not None and not name.startswith(("train/loss", "train/lr", "eval/")):
            continue
        if isinstance(value, int | float):
            columns.append(f"{name} {size(value) if name.endswith('_bytes') else number(value)}")
    while width is not None and len("  ".join(columns)) > width:
        columns.pop()
    return "  ".join(columns)


class LiveDisplay(Display):
    """A progress bar and the main figures, drawn in place.

    Args:
        console: A terminal.
        title: What is being run.
    """

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.values: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}
        self.total = 0
        self.progress = Progress(*_columns(), console=console, expand=True)
        self.task = self.progress.add_task("step", total=None)
        self.evaluation = self.progress.add_task("evaluation", total=None, visible=False)
        self.live = Live(
            console=console, get_renderable=self._draw_panel, refresh_per_second=4, transient=True
        )

    def start(self, step: int, total: int) -> None:
        """Show the display."""
        self.total = total
        self.progress.reset(self.task, total=total, completed=step)
        self.live.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show new figures."""
        self.values.update(values)
        self.progress.update(self.task, completed=step)

    def evaluating(self, done: int, total: int) -> None:
        """Show a second bar while the model is evaluated; of no batches it goes away."""
        if done == 0:
            self.progress.reset(self.evaluation, total=total, visible=total > 0)
        self.progress.update(self.evaluation, completed=done)

    def record(self, record: PlainMapping) -> None:
        """Keep evaluations on the screen; everything goes to the log."""
        log.info(plain_line(record, self.total))
        evaluated = {name: value for name, value in record.items() if name.startswith("eval/")}
        if evaluated:
            self.evaluated = evaluated
            metrics = "  ".join(
                f"{escape(name)} [bold]{number(value)}[/]" for name, value in evaluated.items()
            )
            self.console.print(f"[dim]step {record['step']:>6,}[/]  {metrics}", highlight=False)

    def note(self, text: str) -> None:
        """Print one line above the display."""
        log.info(text)
        self.console.print(Text(printable(text), style="dim"))

    def stop(self) -> None:
        """Take the display away; the result table has its last figures."""
        self.live.stop()

    def _draw_panel(self) -> Group:
        """Draw the panel with the progress bar and the latest figures."""
        table = Table.grid(padding=(0, 3))
        figures: list[tuple[str, str, Callable[[float], str]]] = [
            ("loss", "train/loss", number),
            ("grad norm", "train/grad_norm", number),
            ("lr", "train/lr", number),
            ("tokens/s", "perf/tokens_per_second", number),
            ("samples/s", "perf/samples_per_second", number),
            ("memory", "perf/peak_memory_bytes", size),
        ]
        present = [
            (label, draw(self.values[name])) for label, name, draw in figures if name in self.values
        ]
        table.add_row(*(Text(label, style="dim") for label, _ in present))
        table.add_row(*(Text(value, style="bold") for _, value in present))
        panel = Panel(
            Group(self.progress, Padding(table, (1, 0, 0, 0))),
            title=escape(self.title),
            title_align="left",
            padding=(1, 2),
        )
        # The terminal shows ^C where the panel ends: behind a full line it would begin another one,
        # which stays.
        return Group(panel, "")


def _columns() -> list[ProgressColumn]:
    """List a bar's name, count, bar, share and times."""
    return [
        TextColumn("[bold]{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]


def watched(
    items: Iterable[Item], total: int, *, console: Console | None = None, what: str = "evaluation"
) -> Iterator[Item]:
    """Yield items as they come, with a bar on a terminal while they do.

    Args:
        items: What is worked through, such as batches.
        total: How many there are.
        console: Where the bar is drawn; None: standard error, so that what a verb prints can be
            piped.
        what: What is done, beside the bar.
    """
    console = console or Console(stderr=True)
    if not (console.is_terminal and console.is_interactive):
        yield from items
        return
    with Progress(*_columns(), console=console, transient=True) as progress:
        yield from progress.track(items, total=total, description=what)


def make_display(console: Console, title: str) -> Display:
    """Make a display: live on a terminal, plain elsewhere."""
    if console.is_terminal and console.is_interactive:
        return LiveDisplay(console, title)
    return PlainDisplay(console)
