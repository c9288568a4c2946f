"""`optrun predict`: labels, entities, texts for the rows of a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, ConfigError, printable
from optrun.base.plain import PlainDict
from optrun.cli.evaluate import open_saved
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from optrun.runner.predict import Predicted


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "predict",
        ["RUN_DIR|CHECKPOINT"],
        """
Predictions of a checkpoint (of a run: its newest) for each row of a file, in its order:
labels with probabilities, entities, masked tokens, numbers, vectors, or generated texts.
FILE of out ends with .jsonl, .csv or .parquet. Labels are not needed.

Keys: data.text_column=NAME and its kin, data.delimiter, data.encoding, data.format and
data.column_names (how the file is read), generation.max_new_tokens=N and every other name of
transformers' generation, data.max_length, seed, training.device,
training.per_device_eval_batch_size, training.precision.
""",
        keys={"out": "FILE"},
        overrides="KEY",
        instead={
            "keep": "Every column of the file stands beside the predictions; leave it out.",
            "top_k": "Five tokens are written for each mask; leave it out.",
            "json": "Read the predictions from the file that out names.",
        },
    )


def run(arguments: VerbArguments) -> int:
    """Write the predictions, and print their file and count.

    Returns:
        0.
    """
    typed = [f"{key}={value}" for key, value in arguments.key_values.items()]
    checkpoint, predicted = predict(arguments.positional[0], [*typed, *arguments.overrides])
    for note in predicted.notes:
        sys.stderr.write(f"optrun: {note}\n")
    sys.stdout.write(printable(f"{checkpoint} -> {predicted.out}: {predicted.rows:,} rows") + "\n")
    return EXIT_DONE


def predict(path: str, overrides: list[str]) -> tuple[Path, Predicted]:
    """Predict the rows of a file with the configuration a checkpoint was trained with.

    Args:
        path: A checkpoint, or a run directory, whose newest complete checkpoint is used.
        overrides: The typed keys.

    Returns:
        The checkpoint, and what was written.

    Raises:
        ConfigError: A key that does not exist, or has no effect on a prediction; rows that do not
            fit.
        CheckpointError: The run has no complete checkpoint.
    """
    from optrun.config import saved, store
    from optrun.config.overrides import parse, plain_value, refuse_twice

    parsed = parse(overrides)
    refuse_twice(parsed)
    for override in parsed:
        if override.is_sweep_override() or override.is_delete():
            raise ConfigError(
                f"{override.input_line}: expected one value. A list is written"
                f" {override.key_or_group}=[a,b]."
            )
    with open_saved(path) as (run_dir, checkpoint, before):
        from optrun.runner.predict import RUN_KEYS, predict_file

        of_run = [
            str(override.input_line) for override in parsed if override.key_or_group in RUN_KEYS
        ]
        config = store.typed(saved.changed(store.open_hydra(), before, of_run))
        typed: PlainDict = {
            override.key_or_group: plain_value(override.value()) for override in parsed
        }
        return checkpoint, predict_file(config, run_dir, checkpoint, typed)
