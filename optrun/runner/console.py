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

from optrun.artifacts.generalisation import Verdict, sentence_of
from optrun.artifacts.retention import step_of
from optrun.artifacts.run_dir import RunDir, read_pointer
from optrun.base import shell
from optrun.base.errors import StorageError, printable
from optrun.base.formatting import duration, number, rate, size
from optrun.base.plain import lookup
from optrun.base.reading import kind_of
from optrun.config.registry.plugins import options
from optrun.config.schema.run import RunConfig
from optrun.report.table import to_rich
from optrun.runner.best_checkpoint import describe_best
from optrun.runner.class_tables import explain_f1, tables_of
from optrun.runner.outcome import Outcome, SummaryValues
from optrun.task.build import task_class
from optrun.training.display import Display

_NEXT_STEPS = {
    Verdict.no_better: "it has learnt nothing yet: train longer (resume, above), try another lr, or"
    " another model, such as a pretrained one: model=pretrained model.path=NAME",
    Verdict.memorised: "it learnt its rows by heart: train on more rows, or start from another"
    " model, such as a pretrained one: model=pretrained model.path=NAME",
    Verdict.seen: "evaluate on rows that it was not trained on: data.eval=FILE",
}
"""What to try after a run that learnt nothing for other rows."""
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
    """Write optrun's log to `optrun.log` of the run, and an error of the block, too.

    Inside the block the logger passes on INFO, to this file only; its level and propagation are
    restored at the end.

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
    level = logger.level
    propagate = logger.propagate
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
        logger.setLevel(level)
        logger.propagate = propagate


def introduce(display: Display, config: RunConfig, ranks: int) -> None:
    """Print one line with the main choices of a run; its folder follows once it trains."""
    distributed = f" distributed={config.distributed.name} on {ranks} ranks" if ranks > 1 else ""
    display.note(
        f"task={config.task.name} data={config.data.name} model={config.model.name}"
        f" optimizer={config.optimizer.name} lr={rate(config.lr)} scheduler={config.scheduler.name}"
        f" seed={config.seed}{distributed}"
    )


def shown_path(path: Path) -> str:
    """Write a path relative to the current folder if it lies beneath it, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def show(console: Console, outcome: Outcome, config: RunConfig) -> None:
    """Print the result of a finished run.

    In this order: a generated sample if there is one, speed, the table of metrics, sentences on
    generalisation, on the best checkpoint and on an early end, and the next commands.

    Args:
        console: Where it is printed.
        outcome: The run and its summary.
        config: Names the key of evaluation rows, for a run that held none out, and the task.
    """
    summary = outcome.summary
    if outcome.sample is not None:
        prompt, continuation = outcome.sample
        # A model may write nothing but line breaks.
        continuation = re.sub(r"\n(\s*\n){2,}", "\n\n", continuation).rstrip()
        console.print(
            Panel(
                f"[bold]{escape(printable(prompt))}[/]{escape(printable(continuation))}",
                title="what it learnt: a continuation",
                title_align="left",
            )
        )
    _print_metrics(console, summary)
    early_end = summary["message"] if summary.get("stopped") else ""
    for line in (sentence_of(summary), describe_best(summary), early_end):
        if line:  # a terminal would break it within words
            width = console.width if console.is_terminal else _PIPED
            wrapped = textwrap.fill(
                printable(line), width, break_long_words=False, break_on_hyphens=False
            )
            console.print(escape(wrapped), highlight=False, soft_wrap=True)
    for label, text in _next_commands(outcome, config):
        console.print(
            f"[dim]{label:>9}[/]  {escape(printable(text))}", highlight=False, soft_wrap=True
        )


def _next_commands(outcome: Outcome, config: RunConfig) -> list[tuple[str, str]]:
    """List what can be done with a finished run, as pairs of a label and a command.

    The first pair is the run directory. Without checkpoints it is the only one. The last pair is
    the next step: what to try if the run learnt nothing; else predictions; an evaluation if the
    task predicts no rows; an export if there are no rows to evaluate on either.

    Args:
        outcome: The run and its summary.
        config: Names the key of evaluation rows, for a run that held none out, and the task.
    """
    summary = outcome.summary
    path = shown_path(outcome.run.path)
    best = read_pointer(outcome.run.best)
    chosen = "best" if best else "last"
    optrun = shell.join(["optrun", *options(summary.get("plugins", ()))])
    longer = f"training.max_steps={2 * int(summary['max_steps'])}"
    if summary.get("stopped"):  # early stopping or a callback ended training: change that option
        longer = f"{summary['stopped']['by']}=..."
    rows = [("written", path)]
    if outcome.run.checkpoints.is_dir():
        rows.append(("resume", f"{optrun} resume={shell.quote(path)} {longer}"))
        checkpoint = shell.quote(str(Path(path) / "checkpoints" / chosen))
        export = f"optrun export {checkpoint} DEST"
        usual_step = export
        if summary.get("main_metric") or config.data.EVALUATION_ROWS:
            usual_step = f"{optrun} evaluate {shell.quote(path)}"
            if not summary.get("main_metric"):  # the run was trained on all rows: name others
                usual_step += f" {config.data.EVALUATION_ROWS}"
            rows.append(("evaluate", usual_step))
        rows.append(("export", export))
        if best and step_of(best) != summary["global_step"]:
            rows.append(("best", f"{checkpoint}; {path} alone means its newest checkpoint"))
        if task_class(config.task).predictor:
            usual_step = f"{optrun} predict {shell.quote(path)} data.eval=FILE out=FILE.jsonl"
        # A verdict that nothing was learnt, if the summary has one, names its own next step.
        next_step = _NEXT_STEPS.get(lookup(summary, "generalisation", "verdict"), usual_step)
        rows.append(("next:", next_step))
    return rows


def _print_metrics(console: Console, summary: SummaryValues) -> None:
    """Print speed, memory, and a table of the best and last metrics of a run.

    The table has the training loss and the evaluation metrics, the main one in bold. Metrics by
    class follow for sets with at most 12 classes, and what f1 means if there is one.
    """
    # 1. A line on the run: "30 steps in 12 s, 4,100 tokens/s, ...".
    perf = summary.get("perf", {})
    rate = perf.get("tokens_per_second") or perf.get("samples_per_second", 0.0)
    unit = "tokens/s" if perf.get("tokens_per_second") else "examples/s"
    title = (
        f"{summary['global_step']:,} steps in {duration(summary['wall_seconds'])} ·"
        f" {number(rate, 3)} {unit} · {summary['model']['parameters'] / 1e6:.2f} M parameters ·"
        f" peak memory {size(perf.get('peak_memory_bytes', 0))}"
    )
    console.print(f"[dim]{title}[/]", highlight=False, soft_wrap=True)
    # 2. The metrics.
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
    # 3. The metrics by class.
    for name, classes in tables_of(summary):
        console.print(to_rich(classes, title=name or None))
        if "eval/f1" in names:
            console.print(escape(printable(explain_f1(classes))), highlight=False)
