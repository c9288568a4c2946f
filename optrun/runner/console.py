"""Lines on the terminal before and after a run, and its log file."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from optrun.artifacts.generalisation import sentence_of
from optrun.artifacts.retention import pointed, step_of
from optrun.artifacts.run_dir import RunDir
from optrun.base import shell
from optrun.base.errors import StorageError, printable
from optrun.base.formatting import duration, number, rate, size
from optrun.base.reading import kind_of
from optrun.config.registry.plugins import options
from optrun.config.schema.data import DataConfig
from optrun.config.schema.run import RunConfig
from optrun.report.table import to_rich
from optrun.runner.best_checkpoint import describe_best
from optrun.runner.class_tables import F1_MEANING, tables_of
from optrun.runner.outcome import Outcome, SummaryValues
from optrun.training.display import Display

_PIPED = 120
"""Characters of a line that goes into a file."""


class _Lines(logging.Formatter):
    """Formats log lines without control characters, since a terminal may show the file."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Format as everywhere, without control characters."""
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """Log file of a run. A full disk neither ends the run nor hides why it ended."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Print no traceback for each line if it is the disk."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file; a refused last write is ignored."""
        with contextlib.suppress(OSError):
            super().close()


@contextmanager
def run_log(run: RunDir) -> Iterator[None]:
    """Send optrun's log to `optrun.log` of the run, and an error of the block, too.

    Logger level and propagation are restored at the end.

    Raises:
        StorageError: The path exists and is no regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = kind_of(run.log)
        if kind:
            raise StorageError(
                f"{run.log}: {kind}; expected a regular file, which this run writes. Remove it."
            )
    logger = logging.getLogger("optrun")
    handler = _LogFile(run.log, encoding="utf-8")
    handler.setFormatter(_Lines())
    before = (logger.level, logger.propagate)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


def introduce(display: Display, config: RunConfig, run: RunDir, ranks: int = 1) -> None:
    """Introduce a run on one line.

    It says what runs, on how many ranks if several, and where the files are written.
    """
    distributed = f" distributed={config.distributed.name} on {ranks} ranks" if ranks > 1 else ""
    display.note(
        f"task={config.task.name} data={config.data.name} model={config.model.name}"
        f" optimizer={config.optimizer.name} lr={rate(config.lr)} scheduler={config.scheduler.name}"
        f" seed={config.seed}{distributed} -> {shown_path(run.path)}"
    )


def shown_path(path: Path) -> str:
    """Write a path relative to the current folder if it lies beneath it, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def show(console: Console, outcome: Outcome, data: DataConfig) -> None:
    """Print the sample, the result table and the next commands of a run that ended well.

    The sample is left out if there is none, and all commands if the run saved no checkpoint.

    Args:
        console: Where it is printed.
        outcome: The run and its summary.
        data: Names the key of evaluation rows, for a run that held none out.
    """
    summary = outcome.summary
    stopped = summary.get("stopped")  # by a patience of one's own, or a callback
    if outcome.sample is not None:
        prompt, continuation = outcome.sample
        continuation = re.sub(
            r"\n(\s*\n){2,}", "\n\n", continuation
        ).rstrip()  # a model may write line breaks alone
        console.print(
            Panel(
                f"[bold]{escape(printable(prompt))}[/]{escape(printable(continuation))}",
                title="what it learnt: a continuation",
                title_align="left",
            )
        )
    _results(console, summary)
    for line in (
        sentence_of(summary),
        describe_best(summary),
        summary["message"] if stopped else "",
    ):
        if line:  # broken between words, which a terminal does not do
            width = console.width if console.is_terminal else _PIPED
            parts = textwrap.wrap(
                printable(line), width, break_long_words=False, break_on_hyphens=False
            )
            console.print(escape("\n".join(parts)), highlight=False, soft_wrap=True)
    path = shown_path(outcome.run.path)
    best = pointed(outcome.run.best)
    chosen = "best" if best is not None else "last"
    optrun = shell.join(["optrun", *options(summary.get("plugins", ()))])
    if stopped:
        longer = f"{stopped['by']}=..."
    else:
        longer = f"training.max_steps={2 * int(summary['max_steps'])}"
    held_out = bool(summary.get("main_metric"))  # else all rows of its source were trained on
    rows_of = "" if held_out else data.EVALUATION_ROWS
    rows = [
        ("written", path),
        ("resume", f"{optrun} resume={shell.quote(path)} {longer}"),
    ]
    if held_out or rows_of:
        rows.append(("evaluate", f"{optrun} evaluate {shell.quote(path)} {rows_of}".rstrip()))
    checkpoint = shell.quote(str(Path(path) / "checkpoints" / chosen))
    rows.append(("export", f"optrun export {checkpoint} DEST"))
    if best is not None and step_of(best) != summary["global_step"]:
        rows.append(("best", f"{checkpoint}; {path} alone means its newest checkpoint"))
    if not outcome.run.checkpoints.is_dir():
        rows = rows[:1]
    for label, text in rows:
        console.print(
            f"[dim]{label:>9}[/]  {escape(printable(text))}", highlight=False, soft_wrap=True
        )


def _results(console: Console, summary: SummaryValues) -> None:
    """Print speed, memory, and a table of the best and last metrics of a run.

    Only `train/loss...` and `eval/...` are shown; the main metric is bold. Tables of more than 12
    classes are left to `optrun evaluate`.
    """
    perf = summary.get("perf", {})
    rate = perf.get("tokens_per_second") or perf.get("samples_per_second", 0.0)
    unit = "tokens/s" if perf.get("tokens_per_second") else "examples/s"
    title = (
        f"{summary['global_step']:,} steps in {duration(summary['wall_seconds'])} ·"
        f" {number(rate, 3)} {unit} · {summary['model']['parameters'] / 1e6:.2f} M parameters ·"
        f" peak memory {size(perf.get('peak_memory_bytes', 0))}"
    )
    console.print(f"[dim]{title}[/]", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("metric")
    for name in ("best", "at step", "last"):
        table.add_column(name, justify="right")
    metrics = summary["metrics"]
    main = (summary.get("main_metric") or {}).get("name")
    names = [name for name in metrics["last"] if name.startswith("train/loss")]
    names += [name for name in metrics["last"] if name.startswith("eval/")]
    for name in names:
        best = metrics["best"].get(name)
        table.add_row(
            name,
            number(best["value"]) if best else "",
            f"{int(best['step']):,}" if best else "",
            number(metrics["last"][name]),
            style="bold" if name == main else "",
        )
    console.print(table)
    for name, classes in tables_of(summary):
        console.print(to_rich(classes, title=name or None))
    if "eval/f1" in names:
        console.print(F1_MEANING, highlight=False)
