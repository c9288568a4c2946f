"""A checkpoint and a file of rows to a file of predictions: `optrun predict`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from optrun.artifacts.atomic import storage_errors
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.base.errors import ConfigError, refuse_existing
from optrun.base.formatting import csv_cell
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import expand_home
from optrun.config.schema.checks import build
from optrun.config.schema.data import ColumnsConfig, DataConfig, FilesConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.config.schema.task_base import TaskConfig
from optrun.data.files import read_split, resolve
from optrun.data.reading import ReadOptions, silence_datasets
from optrun.data.source import Source, Split
from optrun.model.forward import without_cache_and_padding_check
from optrun.model.images import load_image_preparation, load_saved_preparation
from optrun.model.tokenizer import load_saved_tokenizer
from optrun.runner.model_loading import load_trained_model, refuse_other_vocabulary
from optrun.runner.predictors import Predictor, Values
from optrun.runner.resume.data_position import class_names
from optrun.task.build import predictor_class
from optrun.training.device import pick_device
from optrun.training.display import with_progress_bar

ENDINGS = (".jsonl", ".csv", ".parquet")
RUN_KEYS = (
    "seed",
    "training.device",
    "training.per_device_eval_batch_size",
    "training.precision",
    "data.max_length",
)
"""Keys of the run that a prediction may change; the last one only if the task cuts texts."""
_KEYS = ("out", "data.eval", "data.format", "data.delimiter", "data.encoding", "data.column_names")
_USAGE = "optrun predict RUN_DIR data.eval=FILE out=FILE"


def valid_keys(task: TaskConfig) -> list[str]:
    """List the keys that `optrun predict` takes for a task, such as `out` and `data.text_column`.

    A task that generates text takes `generation.KEY`, except `max_length`, which would count the
    prompt, and `num_return_sequences`, since each row gets one text.

    Raises:
        ConfigError: The task has no predictor.
    """
    kind = predictor_class(task)
    # The last of `RUN_KEYS`, data.max_length, only if texts are cut.
    keys = [*_KEYS, *RUN_KEYS[:-1], *(f"data.{name}" for name in kind.columns)]
    if kind.cuts:
        keys.append("data.max_length")
    if kind.generates:
        names = vars(GenerationConfig()).keys() - {"max_length", "num_return_sequences"}
        keys += [f"generation.{name}" for name in sorted(names)]
    return keys


@dataclass
class Predicted:
    """The result of a prediction."""

    out: Path
    rows: int
    notes: list[str]


def predict_file(
    config: RunConfig, run: RunDir, checkpoint: Path, typed: PlainMapping
) -> Predicted:
    """Predict every row of a file, and write them to another file.

    The input is read, and the output file checked, before the model is loaded.

    Args:
        config: Configuration of the run, with the changes for this prediction.
        run: The run of the checkpoint.
        checkpoint: A complete checkpoint.
        typed: Typed key -> value, such as `data.eval` and `out`.

    Returns:
        The written file, the number of rows, and notes for the user.

    Raises:
        ConfigError: An option does not fit the task or the rows, or the file exists.
        CheckpointError: The checkpoint or a file of the run is damaged.
        StorageError: The disk refused the write.
    """
    files = _rows_config(typed, config.data)
    out = _output_file(typed)
    notes: list[str] = []
    options = ReadOptions(files.format, files.delimiter, files.encoding, files.column_names)
    split = read_split("data.eval", resolve("data.eval", files.eval), options, notes)
    refuse_damaged(run.tokenizer)
    model, snapshot = load_trained_model(run, checkpoint)
    tokenizer = _load_tokenizer(config, run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    predictor = predictor_class(config.task)(
        model=model.to(pick_device(config.training.device)),
        tokenizer=tokenizer,
        labels=class_names(snapshot.metadata.model_config),
        config=config,
        split=split,
        # The same rows for training, which are not used, and as the only evaluation set.
        source=Source(Split(split.rows, "data.train"), {"": split}, files, notes=notes),
        generation=_typed_below("generation.", typed),
    )
    predictions = _predict_rows(predictor)
    write(out, split, predictions, notes)
    return Predicted(out, len(predictions), notes)


def _typed_below(prefix: str, typed: PlainMapping) -> PlainDict:
    """Return the typed keys with a prefix, and remove the prefix."""
    return {key.removeprefix(prefix): typed[key] for key in typed if key.startswith(prefix)}


def _rows_config(typed: PlainMapping, trained: DataConfig) -> FilesConfig:
    """Build the data configuration of the rows: file, format and columns.

    If no column is typed, the columns are those of the training data; if one is, all that are not
    typed are found as for a new file.

    Args:
        typed: Typed key -> value; those that begin with `data.` count.
        trained: The data configuration of the run.

    Raises:
        ConfigError: No file is named, or a value has another type.
    """
    if not isinstance(typed.get("data.eval"), str | list):
        raise ConfigError(f"optrun predict needs data.eval, the file with the rows: {_USAGE}")
    values: PlainDict = {
        "name": "files",
        "train": typed["data.eval"],
        **_typed_below("data.", typed),
    }
    values.pop("max_length", None)  # `data.max_length` goes to the configuration of the run
    columns = [field.name for field in fields(ColumnsConfig) if "_column" in field.name]
    if values.keys().isdisjoint(columns):
        values |= {name: getattr(trained, name, None) for name in columns}
    return build(FilesConfig, values, "data")


def _output_file(typed: PlainMapping) -> Path:
    """Return the file of `out=FILE`, and check that it can be made; nothing is written yet.

    Raises:
        ConfigError: No file is named, its ending is unknown, its folder is missing, or it exists.
    """
    argument = f"out={typed.get('out', 'FILE')}"
    out = expand_home(str(typed.get("out", "")))
    if out.suffix.lower() not in ENDINGS:
        raise ConfigError(f"{argument}: expected a file ending with {', '.join(ENDINGS)}: {_USAGE}")
    if not out.parent.is_dir():
        raise ConfigError(f"{argument}: no such folder: {out.parent}. Make it first.")
    refuse_existing(argument, out)
    return out


def _load_tokenizer(config: RunConfig, run: RunDir) -> Any:
    """Load the tokenizer or image preparation of training; None if the tokenizer is missing.

    Args:
        config: Configuration of the run; a model from a configuration of the user's names its
            image preparation there.
        run: The run, with `tokenizer/`.

    Raises:
        ConfigError: It cannot be loaded.
    """
    if config.task.PROCESSOR != "AutoImageProcessor":
        if run.tokenizer.is_dir():
            return load_saved_tokenizer(run.tokenizer)
        return None
    if isinstance(config.model, FromConfigConfig):
        return load_image_preparation(config.model)
    return load_saved_preparation(run.tokenizer)


def _predict_rows(predictor: Predictor) -> list[Values]:
    """Predict all rows; results keep the order of the rows.

    Rows are batched by length, longest first. Random draws are seeded by the run's `seed`; random
    states are restored at the end.
    """
    # Batches of row numbers, by length. An image has no token ids, so the order stays.
    inputs = predictor.encode()
    lengths = [len(row.get("input_ids", ())) for row in inputs]
    order = np.argsort(np.negative(lengths), kind="stable")
    size = predictor.config.training.per_device_eval_batch_size
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    # Predict them. Generation needs the cache of keys and values, a single forward pass does not.
    predictions: list[Values] = [{}] * len(inputs)
    keep_cache = (
        nullcontext() if predictor.generates else without_cache_and_padding_check(predictor.model)
    )
    device = predictor.model.device
    devices = [device] if device.type == "cuda" else []
    with keep_cache, torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(predictor.config.seed)
        for rows in with_progress_bar(batches, len(batches), what="prediction"):
            values = predictor.predict([inputs[row] for row in rows])
            for row, prediction in zip(rows, values, strict=True):
                predictions[row] = prediction
    return predictions


def write(out: Path, split: Split, predictions: list[Values], notes: list[str]) -> None:
    """Write the rows with their predictions as added columns, through a temporary file.

    Args:
        out: The file; its ending decides the format.
        split: The rows. Columns of bytes are left out.
        predictions: Names of the new columns -> value, for each row.
        notes: Changed in place: a note names the columns that were left out.

    Raises:
        ConfigError: A column has the name of a prediction, or the file appeared meanwhile.
        StorageError: The disk refused the write.
    """
    from datasets import Dataset, concatenate_datasets

    # 1. Refuse a column that would be there twice.
    columns = Dataset.from_list(predictions)
    rows: Any = getattr(split.rows, "dataset", split.rows)
    for name in columns.column_names:
        if name in rows.column_names:
            raise ConfigError(
                f"{split.key} has a column {name}, and so have the predictions. Rename it."
            )
    # 2. Leave columns of bytes out. Images and sounds, too, are bytes to Arrow.
    binary = [field.name for field in rows.features.arrow_schema if "binary" in str(field.type)]
    if binary:
        notes.append(f"not written beside the predictions: {', '.join(binary)} (bytes)")
        rows = rows.remove_columns(binary)
    # 3. Write. The outer `storage_errors` also covers the deletion of the temporary folder.
    table = concatenate_datasets([rows, columns], axis=1) if rows.column_names else columns
    with storage_errors(out), TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        temporary = Path(folder) / out.name
        with storage_errors(out), silence_datasets():
            _write_table(table, temporary)
        _rename_to_new(temporary, out)


def _rename_to_new(temporary: Path, out: Path) -> None:
    """Rename the finished file; raise ConfigError if `out` has appeared meanwhile."""
    refuse_existing(f"out={out}", out)
    temporary.rename(out)


def _write_table(table: Any, path: Path) -> None:
    """Write a table of `datasets` as jsonl, csv or parquet, by the ending of the path.

    For CSV `csv_cell` converts each value and heading: a list becomes JSON, and no text is taken
    for a formula.
    """
    from datasets import Dataset

    ending = path.suffix.lower()
    if ending == ".jsonl":
        table.to_json(path, force_ascii=False, double_precision=15, date_format="iso")
    elif ending == ".parquet":
        table.to_parquet(path)
    else:
        names = table.column_names
        cells = {str(csv_cell(name)): list(map(csv_cell, table[name])) for name in names}
        Dataset.from_dict(cells).to_csv(path)
