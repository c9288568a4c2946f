"""A checkpoint and a file of rows to a file of predictions: `optrun predict`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from optrun.artifacts.atomic import storing
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.base.errors import ConfigError, nearest, refuse_existing, refuse_url
from optrun.base.formatting import csv_cell
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.checks import build
from optrun.config.schema.data import ColumnsConfig, DataConfig, FilesConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.files import read_files
from optrun.data.reading import ReadOptions, silence_datasets
from optrun.data.source import Source, Split
from optrun.model.forward import lean_forward
from optrun.model.images import load_image_preparation, saved_preparation
from optrun.model.tokenizer import saved_tokenizer
from optrun.runner.model_loading import load_trained_model, refuse_other_vocabulary
from optrun.runner.prediction.base import Predictor, Values
from optrun.runner.resume.data_position import class_names
from optrun.task.build import predictor_class
from optrun.training.device import pick_device
from optrun.training.display import watched
from optrun.training.step import Precision

ENDINGS = (".jsonl", ".csv", ".parquet")
RUN_KEYS = (
    "seed",
    "training.device",
    "training.per_device_eval_batch_size",
    "training.precision",
    "data.max_length",
)
"""Keys of the run that a prediction goes by; the last one where texts are cut."""
_KEYS = (
    *RUN_KEYS[:-1],
    *("data.eval", "data.format", "data.delimiter", "data.encoding", "data.column_names", "out"),
)
"""Keys that every prediction goes by."""
_INSTEAD_OF = {
    "text_column": ("messages_column",),
    "messages_column": ("text_column", "target_column"),
}
"""Key to the columns of the run that it replaces."""
_FIRST = "optrun predict RUN_DIR data.eval=FILE out=FILE"


@dataclass
class Predicted:
    """The result of a prediction."""

    out: Path
    rows: int
    notes: list[str]


def predict_file(
    config: RunConfig, run: RunDir, checkpoint: Path, typed: PlainMapping
) -> Predicted:
    """Predict every row of a file.

    Args:
        config: Configuration of the run, with the changes for this prediction.
        run: The run of the checkpoint.
        checkpoint: A complete checkpoint.
        typed: Typed key -> value: `data.eval`, `out`, ...

    Raises:
        ConfigError: An option does not fit the task or the rows, or the file exists.
        CheckpointError: The checkpoint or a file of the run is damaged.
        StorageError: The disk refused the write.
    """
    kind = predictor_class(config.task)
    _refuse_unknown(typed, kind, f"task={config.task.name}")
    files = _files(typed, config.data)
    out = _out(typed)
    notes: list[str] = []
    options = ReadOptions(files.format, files.delimiter, files.encoding, files.column_names)
    rows = read_files("data.eval", files.eval, options, notes, documents=False)
    split = Split(rows, "data.eval")
    refuse_damaged(run.tokenizer)
    device = pick_device(config.training.device)
    model, snapshot = load_trained_model(run, checkpoint)
    tokenizer = _tokenizer(config, run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    predictor = kind(
        model=model.to(device),
        tokenizer=tokenizer,
        labels=class_names(snapshot.metadata.model_config),
        task=config.task,
        max_length=config.data.max_length,
        precision=Precision(device, config.training.precision.value),
        source=Source(Split(rows, "data.train"), {"": split}, files, notes=notes),
        generation=_below("generation", typed),
    )
    predictions = _predict(predictor, config, device)
    write(out, split, predictions, notes)
    return Predicted(out, len(predictions), notes)


def _below(group: str, typed: PlainMapping) -> PlainDict:
    """Return the typed keys of a group without the group's prefix."""
    start = f"{group}."
    return {key.removeprefix(start): typed[key] for key in typed if key.startswith(start)}


def _refuse_unknown(typed: PlainMapping, kind: type[Predictor], task: str) -> None:
    """Refuse a key without effect on predictions of the task.

    Raises:
        ConfigError: The message names the first such key.
    """
    known_keys = [*_KEYS, *(f"data.{name}" for name in kind.columns)]
    if kind.cuts:
        known_keys.append("data.max_length")
    if kind.generates:
        known_keys += [f"generation.{name}" for name in vars(GenerationConfig())]
    for key in typed:
        if key not in known_keys:
            hint = " or ".join(nearest(key, known_keys)) or ", ".join(_KEYS)
            raise ConfigError(
                f"{key}={typed[key]}: no key that a prediction of {task} goes by. Did you mean"
                f" {hint}?"
            )


def _files(typed: PlainMapping, data: DataConfig) -> FilesConfig:
    """Build the data configuration of the rows: file, format and columns.

    Raises:
        ConfigError: The file is missing on the command line, or a value has another type.
    """
    values = _below("data", typed)
    values.pop("max_length", None)
    if not isinstance(values.get("eval"), str | list):
        raise ConfigError(f"optrun predict needs data.eval, the file with the rows: {_FIRST}")
    refuse_url("data.eval", values["eval"])
    columns: PlainDict = {}
    for column in fields(ColumnsConfig):
        if "_column" in column.name:
            columns[column.name] = getattr(data, column.name, None)
    for key, others in _INSTEAD_OF.items():
        if key in values:
            columns |= dict.fromkeys(others)
    return build(
        FilesConfig, {"name": "files", "train": values["eval"], **columns, **values}, "data"
    )


def _out(typed: PlainMapping) -> Path:
    """Return the output file.

    Raises:
        ConfigError: The file is not given, has an unknown ending or no folder, or exists.
    """
    if not isinstance(typed.get("out"), str):
        raise ConfigError(f"optrun predict needs out, the file to be written: {_FIRST}")
    out = Path(typed["out"]).expanduser()
    if out.suffix.lower() not in ENDINGS:
        ending = out.suffix or "(none)"
        raise ConfigError(
            f"out={out}: unknown ending {ending}. Expected one of {', '.join(ENDINGS)}."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: no such folder: {out.parent}. Make it first.")
    refuse_existing(f"out={out}", out)
    return out


def _tokenizer(config: RunConfig, run: RunDir) -> Any:
    """Load the tokenizer or image processor of training; None if the tokenizer is gone.

    Raises:
        ConfigError: It cannot be loaded.
    """
    if config.task.PROCESSOR != "AutoImageProcessor":
        if run.tokenizer.is_dir():
            return saved_tokenizer(run.tokenizer)
        return None
    if isinstance(config.model, FromConfigConfig):
        return load_image_preparation(config.model)
    return saved_preparation(run.tokenizer)


def _predict(predictor: Predictor, config: RunConfig, device: torch.device) -> list[Values]:
    """Predict all rows; results keep the order of the rows.

    Rows of like length share a batch, longest first, so that batches depend on the rows alone.
    Draws are seeded by `config.seed`; random states are restored at the end.
    """
    inputs = predictor.encode()
    order = np.argsort([-predictor.length(row) for row in inputs], kind="stable").tolist()
    size = config.training.per_device_eval_batch_size
    begins = range(0, len(order), size)
    predictions: list[Values] = [{}] * len(inputs)
    keep_cache = nullcontext() if predictor.generates else lean_forward(predictor.model)
    devices = [device] if device.type == "cuda" else []
    with keep_cache, torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        for begin in watched(begins, len(begins), what="prediction"):
            members = order[begin : begin + size]
            values = predictor.predict([inputs[member] for member in members])
            for member, row in zip(members, values, strict=True):
                predictions[member] = row
    return predictions


def write(out: Path, split: Split, predictions: list[Values], notes: list[str]) -> None:
    """Write the rows with their predictions as added columns, through a temporary file.

    Args:
        out: The file; its ending decides the format.
        split: The rows. Columns of bytes are not written.
        predictions: New columns and values for each row.
        notes: Changed in place: a note about columns that are not written.

    Raises:
        ConfigError: A column has the name of a prediction, or the file appeared meanwhile.
        StorageError: The disk refused the write.
    """
    from datasets import Dataset, concatenate_datasets

    columns = Dataset.from_list(predictions)
    rows: Any = getattr(split.rows, "dataset", split.rows)
    for name in columns.column_names:
        if name in rows.column_names:
            raise ConfigError(
                f"{split.key} has a column {name}, and so have the predictions. Rename it."
            )
    binary = [name for name, feature in rows.features.items() if _is_binary(feature)]
    if binary:
        notes.append(f"not written beside the predictions: {', '.join(binary)} (bytes)")
        rows = rows.remove_columns(binary)
    table = concatenate_datasets([rows, columns], axis=1) if rows.column_names else columns
    with storing(out), TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        aside = Path(folder) / out.name
        with storing(out), silence_datasets():
            _write_table(table, aside)
        _put_in_place(aside, out)


def _put_in_place(aside: Path, out: Path) -> None:
    refuse_existing(f"out={out}", out)
    aside.rename(out)


def _is_binary(feature: object) -> bool:
    """Tell whether a column holds bytes: images, sounds, binary."""
    kind = type(feature).__name__
    return kind in ("Image", "Audio", "Video") or "binary" in str(getattr(feature, "dtype", ""))


def _write_table(table: Any, path: Path) -> None:
    """Write a table of `datasets` as jsonl, csv or parquet."""
    from datasets import Dataset

    ending = path.suffix.lower()
    if ending == ".jsonl":
        table.to_json(path, force_ascii=False, double_precision=15, date_format="iso")
    elif ending == ".parquet":
        table.to_parquet(path)
    else:
        names = table.column_names
        cells = {str(csv_cell(name)): [_cell(value) for value in table[name]] for name in names}
        Dataset.from_dict(cells).to_csv(path)


def _cell(value: object) -> object:
    """Convert a value for a CSV cell: lists and objects to JSON, a formula to text."""
    is_nested = isinstance(value, dict | list)
    if is_nested:
        return json.dumps(value, ensure_ascii=False)
    return csv_cell(value)
