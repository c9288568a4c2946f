"""Progress on the screen: a live display on a terminal, plain lines everywhere else."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from optrun.base.errors import printable
from optrun.base.formatting import duration, number, size
from optrun.base.plain import PlainMapping
from optrun.training.callback import Callback, TrainingContext
from optrun.training.step import StepResult

log = logging.getLogger("optrun")
Item = TypeVar("Item")
_WIDTH = 100
"""Most characters of a plain line, without the remaining time."""


class Display(Callback):
    """Shows the progress of training, and notes of one line; this base class shows nothing."""

    accepts_late_results = True

    def start(self, step: int, total: int) -> None:
        """Show the start of training, after `step` of `total` optimizer steps."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the latest metrics, by name such as `train/loss`, after a step."""

    def evaluating(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done; a total of 0 ends it."""

    def record(self, record: PlainMapping) -> None:
        """Show a line of `metrics.jsonl`."""

    def note(self, text: str) -> None:
        """Show one line of text."""

    def stop(self) -> None:
        """Remove the progress bar."""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Show the start of training."""
        self.start(training.global_step, training.total_steps)

    def on_step(self, training: TrainingContext, result: StepResult) -> None:
        """Show loss, gradient norm and learning rates of the step."""
        figures = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            **training.setup.state.lrs,
        }
        self.step(training.global_step, figures)

    def on_log(self, training: TrainingContext, record: PlainMapping) -> None:
        """Show the record, and its metrics as the latest ones."""
        self.step(training.global_step, record)
        self.record(record)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Remove the progress bar."""
        self.stop()


class PlainDisplay(Display):
    """Prints one line for each record: for pipes, files and logs.

    Args:
        console: Where the lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.begun = time.monotonic()
        self.first = 0
        self.main_metric = ""

    def on_train_begin(self, training: TrainingContext) -> None:
        """Set the first metric of each line: the metric of the ranking of checkpoints."""
        self.main_metric = training.setup.ranking.metric
        super().on_train_begin(training)

    def start(self, step: int, total: int) -> None:
        """Start the clock of the remaining time."""
        self.total = total
        self.first = step
        self.begun = time.monotonic()

    def record(self, record: PlainMapping) -> None:
        """Print one line of about 100 characters, with the remaining time of training.

        The time is estimated from the steps of this start; it is left out before its first step and
        after the last step. A record before the first step restarts the clock.
        """
        line = plain_line(record, self.total, width=_WIDTH, main_metric=self.main_metric)
        step = int(record["step"])
        steps_of_this_start = step - self.first
        if steps_of_this_start == 0:
            self.begun = time.monotonic()
        elif step < self.total:
            seconds_per_step = (time.monotonic() - self.begun) / steps_of_this_start
            line += f"  left {duration(seconds_per_step * (self.total - step))}"
        self.note(line)

    def note(self, text: str) -> None:
        """Print one line, and write it to the log."""
        log.info(text)
        console = self.console
        line = printable(text)
        # 1. By rich, on a terminal and where it does more than write.
        if console.quiet or console.record or console.is_terminal or console.is_jupyter:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            return

        # 2. Into a file or pipe, where rich would write the same after 0.1 ms of layout.
        try:
            console.file.write(f"{line.expandtabs()}\n")
            console.file.flush()
        except BrokenPipeError:
            console.on_broken_pipe()


def _figure(name: str, value: float) -> str:
    """Format a metric: a number, or for a name in `_bytes` a size such as 1.2 GB."""
    if name.endswith("_bytes"):
        return size(value)
    return number(value)


def plain_line(
    record: PlainMapping, total: int, width: int | None = None, main_metric: str = ""
) -> str:
    """Format a record as one line.

    Args:
        record: A line of `metrics.jsonl`.
        total: Optimizer steps of the run.
        width: Most characters; only loss, lr and evaluations are shown, and the last ones are
            dropped if they do not fit. None: all numbers are shown, except `time` and the `lr/` of
            layers.
        main_metric: The evaluation metric that comes first.

    Example:
        >>> record = {"step": 10, "epoch": 0.5, "train/loss": 2.5}
        >>> record |= {"train/grad_norm": 1.0, "train/lr": 0.001}
        >>> plain_line(record, 20)
        'step 10/20  epoch 0.50  train/loss 2.5  train/grad_norm 1  train/lr 0.001'
        >>> plain_line(record, 20, width=60)
        'step 10/20  epoch 0.50  train/loss 2.5  train/lr 0.001'
    """
    columns = [f"step {record['step']}/{total}", f"epoch {record.get('epoch', 0):.2f}"]
    # Evaluations come last, the main metric first among them.
    names = sorted(record, key=lambda name: (name.startswith("eval/"), name != main_metric))
    for name in names:
        value = record[name]
        if name in ("step", "epoch", "time", "unscheduled") or name.startswith("lr/"):
            continue
        if width is not None and not name.startswith(("train/loss", "train/lr", "eval/")):
            continue
        if isinstance(value, int | float):
            columns.append(f"{name} {_figure(name, value)}")
    while width is not None and len("  ".join(columns)) > width:
        columns.pop()  # the last one
    return "  ".join(columns)


class LiveDisplay(Display):
    """Draws a progress bar with the latest figures in place, and evaluations as lines above it.

    Args:
        console: A terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = 0
        self.progress = _Bars(
            *_columns(), console=console, refresh_per_second=4, transient=True, expand=True
        )
        self.task = self.progress.add_task("step", total=None)
        self.evaluation = self.progress.add_task("evaluation", total=None, visible=False)

    def start(self, step: int, total: int) -> None:
        """Show the bar, at `step` of `total` steps."""
        self.total = total
        self.progress.reset(self.task, total=total, completed=step)
        self.progress.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar to a step, and update the figures; they are drawn four times a second."""
        self.progress.values.update(values)
        self.progress.update(self.task, completed=step)

    def evaluating(self, done: int, total: int) -> None:
        """Move the second bar, of an evaluation; 0 batches done reset it, a total of 0 hides it."""
        if done == 0:
            self.progress.reset(self.evaluation, total=total, visible=total > 0)
        self.progress.update(self.evaluation, completed=done)

    def record(self, record: PlainMapping) -> None:
        """Print the evaluation metrics of a record above the bar; log the whole record."""
        log.info(plain_line(record, self.total))
        metrics = [
            f"{escape(name)} [bold]{number(value)}[/]"
            for name, value in record.items()
            if name.startswith("eval/")
        ]
        if metrics:
            line = "  ".join(metrics)
            self.console.print(f"[dim]step {record['step']:>6,}[/]  {line}", highlight=False)

    def note(self, text: str) -> None:
        """Print one line above the bar."""
        log.info(text)
        self.console.print(Text(printable(text), style="dim"))

    def stop(self) -> None:
        """Remove the bar; the result table has its last figures."""
        self.progress.stop()


class _Bars(Progress):
    """Progress bars, and a line with the latest figures below them."""

    _FIGURES: ClassVar[Mapping[str, str]] = {
        "train/loss": "loss",
        "train/grad_norm": "grad norm",
        "train/lr": "lr",
        "perf/tokens_per_second": "tokens/s",
        "perf/samples_per_second": "samples/s",
        "perf/peak_memory_bytes": "memory",
    }

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        self.values: dict[str, float] = {}
        """Latest metrics by name, such as `train/loss`; only some of them are shown."""
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bars, the figures and an empty line.

        After Ctrl-C the terminal prints ^C at the end of the last line. After a full line it would
        wrap, and leave a line behind when the bars are removed.
        """
        yield from super().get_renderables()
        yield "  ".join(
            f"[dim]{label}[/] [bold]{_figure(name, self.values[name])}[/]"
            for name, label in self._FIGURES.items()
            if name in self.values
        )
        yield ""


def _columns() -> list[ProgressColumn]:
    """List the columns of a bar: name, count, bar, percentage and times."""
    return [
        TextColumn("[bold]{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]


def with_progress_bar(
    items: Iterable[Item], total: int, *, console: Console | None = None, what: str = "evaluation"
) -> Iterator[Item]:
    """Yield items unchanged, and on a terminal draw a progress bar meanwhile.

    Args:
        items: Such as batches.
        total: Number of items.
        console: Where the bar is drawn; None: standard error, so that standard output can be piped.
        what: Name of the bar.
    """
    console = console or Console(stderr=True)
    if not (console.is_terminal and console.is_interactive):
        yield from items
        return
    with Progress(*_columns(), console=console, transient=True) as progress:
        yield from progress.track(items, total=total, description=what)


def make_display(console: Console) -> Display:
    """Make a display: bars on a terminal, plain lines elsewhere."""
    if console.is_terminal and console.is_interactive:
        return LiveDisplay(console)
    return PlainDisplay(console)
