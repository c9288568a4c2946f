"""`optrun predict`: labels, entities, texts for the rows of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, printable
from optrun.cli.evaluate import open_saved
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from optrun.runner.predict import Predicted


def parser() -> VerbParser:
    """Build the parser of `optrun predict RUN_DIR|CHECKPOINT`; `out` is the file to write."""
    return VerbParser(
        "predict",
        ["RUN_DIR|CHECKPOINT"],
        """
Predicts each row of a file, in order, with a checkpoint or the newest one of a run: labels with
probabilities, entities, numbers, vectors, or generated texts. The rows need no
labels. out=FILE ends with .jsonl, .csv or .parquet.

Keys: data.eval=FILE; data.text_column and the other columns, data.delimiter, data.encoding,
data.format and data.column_names, if the file differs from the training data;
generation.max_new_tokens=N and every other name of transformers' GenerationConfig;
data.max_length, seed, training.device, training.per_device_eval_batch_size, training.precision.
""",
        keys={"out": "FILE"},
        overrides="KEY",
    )


def run(arguments: VerbArguments) -> int:
    """Write the predictions; print their file and the number of rows on stderr.

    Returns:
        0.
    """
    typed = [f"{key}={value}" for key, value in arguments.key_values.items()]
    checkpoint, predicted = predict(arguments.positional[0], [*typed, *arguments.overrides])
    for note in predicted.notes:
        sys.stderr.write(f"optrun: {printable(note)}\n")
    written = f"{checkpoint} -> {predicted.out}: {predicted.rows:,} rows"
    sys.stderr.write(f"{printable(written)}\n")
    return EXIT_DONE


def predict(path: str, overrides: list[str]) -> tuple[Path, Predicted]:
    """Predict the rows of a file with the configuration a checkpoint was trained with.

    Args:
        path: A checkpoint, or a run directory, whose newest complete checkpoint is used.
        overrides: `data.eval=FILE`, `out=FILE` and options; each key at most once.

    Returns:
        The checkpoint, and what was written.

    Raises:
        ConfigError: A key that does not exist, has several values or no effect on a prediction;
            rows that do not fit.
        CheckpointError: The run has no complete checkpoint.
    """
    from optrun.config import saved, store
    from optrun.config.overrides import parse_single, plain_value, refuse_meaningless

    parsed = parse_single(overrides)
    with open_saved(path) as (run_dir, checkpoint, saved_config):
        from optrun.runner.predict import RUN_KEYS, predict_file, valid_keys

        # Keys of the run change the saved configuration; the others are for `predict_file` alone.
        run_changes = [str(item.input_line) for item in parsed if item.key_or_group in RUN_KEYS]
        config = store.typed(saved.changed(store.open_hydra(), saved_config, run_changes))
        action = f"a prediction of task={config.task.name}"
        refuse_meaningless(parsed, valid_keys(config.task), action)
        values = {item.key_or_group: plain_value(item.value()) for item in parsed}
        return checkpoint, predict_file(config, run_dir, checkpoint, values)
