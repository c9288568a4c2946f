"""`optrun evaluate`: metrics of a checkpoint on the evaluation split."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, CheckpointError, printable
from optrun.cli.parser import VerbArguments, VerbParser
from optrun.config.registry.origins import require

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from optrun.artifacts.run_dir import RunDir
    from optrun.runner.evaluate import Evaluated

_KEYS = (
    "data",
    "model",
    "task",
    "seed",
    "training.dataloader_num_workers",
    "training.device",
    "training.per_device_eval_batch_size",
    "training.precision",
)
"""Keys and whole groups that change an evaluation."""


def parser() -> VerbParser:
    """Build the parser of `optrun evaluate RUN_DIR|CHECKPOINT`, with --json."""
    verb_parser = VerbParser(
        "evaluate",
        ["RUN_DIR|CHECKPOINT"],
        """
Evaluates a checkpoint, or the newest one of a run, on its evaluation split. Keys change that, such
as data.eval=other.tsv; tokenizer and classes stay those of the training. Shows precision, recall
and f1 of each class or kind of entity, and which classes are confused. Writes nothing; --json
prints all figures.
""",
        overrides="KEY",
        instead={
            "out": "Nothing is written; --json prints every figure, and optrun predict RUN out=FILE"
            " writes a prediction for each row."
        },
    )
    verb_parser.add_config_dir()
    verb_parser.add_argument("--json", action="store_true", help="print one JSON object")
    return verb_parser


def run(arguments: VerbArguments) -> int:
    """Evaluate a checkpoint, and print its metrics as tables, or with `--json` as one object.

    Notes on rows that were left out, and a warning, go to stderr.

    Returns:
        0.
    """
    checkpoint, evaluated = evaluate(
        arguments.positional[0], arguments.overrides, arguments.options.config_dir
    )
    from optrun.data.cache import pop_discard_messages
    from optrun.runner.class_tables import as_values

    for note in filter(None, [*pop_discard_messages(), evaluated.warning]):
        sys.stderr.write(f"optrun: {note}\n")
    numbers = {
        "checkpoint": str(checkpoint),
        "step": evaluated.step,
        "examples": evaluated.examples,
        **evaluated.metrics,
    }
    if arguments.options.json:
        from optrun.artifacts.metrics import to_json

        numbers["tables"] = {name: as_values(table) for name, table in evaluated.tables.items()}
        sys.stdout.write(json.dumps(to_json(numbers)) + "\n")
        return EXIT_DONE
    _show(checkpoint, evaluated)
    return EXIT_DONE


def evaluate(
    path: str, overrides: list[str], config_dir: str | None = None
) -> tuple[Path, Evaluated]:
    """Evaluate a checkpoint with the configuration it was trained with.

    Args:
        path: A checkpoint, or a run directory, whose newest complete checkpoint is used.
        overrides: Changes to the configuration of the run.
        config_dir: A folder with the user's own choices.

    Returns:
        The checkpoint, and the result.

    Raises:
        ConfigError: An override or the data does not fit, or an override has no effect on an
            evaluation.
        CheckpointError: The run has no complete checkpoint.
    """
    from optrun.config import saved, store
    from optrun.config.overrides import parse, refuse_meaningless
    from optrun.config.safety import refuse_stored_trust

    refuse_meaningless(parse(overrides), _KEYS, "an evaluation")
    hydra = store.open_hydra(config_dir)
    with open_saved(path) as (run_dir, checkpoint, saved_config):
        after = saved.changed(hydra, saved_config, overrides)
        refuse_stored_trust(after, overrides)
        config = store.typed(after)

        from optrun.runner.evaluate import evaluate_checkpoint

        return checkpoint, evaluate_checkpoint(config, run_dir, checkpoint)


@contextmanager
def open_saved(path: str) -> Iterator[tuple[RunDir, Path, DictConfig]]:
    """Open a checkpoint, with the plugins and the configuration it was trained with.

    The run cannot delete it within the block.

    Args:
        path: A checkpoint, or a run directory, whose newest complete checkpoint is used.

    Raises:
        ConfigError: A plugin of the run is not loaded.
        CheckpointError: The run has no complete checkpoint.
    """
    from optrun.artifacts.checkpoint import read_state
    from optrun.artifacts.target import locate
    from optrun.config import saved
    from optrun.config.original_cwd import original_cwd, rebase_paths

    target = locate(path)
    with target.locked_checkpoint() as checkpoint:
        state = read_state(checkpoint)
        for note in require(state.get("plugins", ()), str(checkpoint)):
            sys.stderr.write(f"optrun: {note}\n")
        if not isinstance(state.get("config"), dict):
            raise CheckpointError(
                f"{checkpoint}: state.json holds no configuration: it is damaged."
            )
        config = saved.with_schemas(state["config"], str(checkpoint))
        rebase_paths(config, original_cwd(target.run.hydra))
        yield target.run, checkpoint, config


def _show(checkpoint: Path, evaluated: Evaluated) -> None:
    """Print the metrics, then figures and confusions of the classes of each evaluation set.

    No confusion matrix for more than 12 classes.
    """
    from rich.console import Console
    from rich.table import Table

    from optrun.base.formatting import number
    from optrun.report.table import to_rich
    from optrun.runner.class_tables import confusion_table, explain_f1, figures_table

    sys.stdout.write(
        printable(f"{checkpoint} · step {evaluated.step:,} · {evaluated.examples:,} examples")
        + "\n"
    )
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in evaluated.metrics.items():
        table.add_row(name, number(value))
    console = Console()
    console.print(table)
    for name, classes in evaluated.tables.items():
        figures = figures_table(classes)
        console.print(to_rich(figures, title=name or None))
        if "eval/f1" in evaluated.metrics:
            console.print(printable(explain_f1(figures)), highlight=False, markup=False)
        confusion = confusion_table(classes)
        if confusion is not None:
            console.print(to_rich(confusion))
