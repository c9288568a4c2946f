"""A checkpoint and a file of rows to a file of predictions: `optrun predict`."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optrun.artifacts.atomic import storing
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.base.errors import CheckpointError, ConfigError
from optrun.base.formatting import csv_cell
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.data import ColumnsConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.files import read_files
from optrun.data.reading import ReadOptions
from optrun.data.source import Split
from optrun.model.forward import lean_forward
from optrun.model.images import load_image_preparation, saved_preparation
from optrun.model.tokenizer import saved_tokenizer
from optrun.runner.prediction.base import Inputs, Predicting, Predictor, Values
from optrun.runner.reference import start_of
from optrun.runner.resume.data_position import class_names
from optrun.runner.trained import load_trained, refuse_other_vocabulary
from optrun.task.build import predictor_class
from optrun.training.device import pick_device
from optrun.training.display import watched
from optrun.training.failures import of_memory_in_evaluation
from optrun.training.state import RandomStates, seed_of_micro_batch, seed_random_states
from optrun.training.step import Precision

if TYPE_CHECKING:
    from datasets import Dataset

BATCHES_OF_A_WINDOW = 16
"""Batches whose rows are sorted by length together."""
ENDINGS = (".jsonl", ".csv", ".parquet")


@dataclass
class PredictionRequest:
    """What is to be predicted, and where to."""

    data: str | list[str]
    """`data.eval`: a path, a list of them, or a glob."""
    out: Path
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """Keys such as `text_column` to names of columns, as far as the command line gives them."""
    generation: Mapping[str, object] = field(default_factory=dict)
    """`generation.KEY`."""
    max_length: bool = False
    """Whether the command line gives `data.max_length`."""
    read: PlainMapping = field(default_factory=dict)
    """How the file is read: fields of `ReadOptions`, as far as the command line gives them."""


@dataclass
class Predicted:
    """What was predicted."""

    out: Path
    step: int
    rows: int
    seconds: float
    notes: list[str]


def predict_file(
    config: RunConfig, run: RunDir, checkpoint: Path, request: PredictionRequest
) -> Predicted:
    """Predict every row of a file.

    Args:
        config: Of the run, with the changes that a prediction goes by.
        run: The run it belongs to.
        checkpoint: Whole.
        request: Rows, options, and the file to write.

    Raises:
        ConfigError: Anything asked for that does not fit the task or the rows; the file is there.
        CheckpointError: The checkpoint, or what is read of the run, is damaged.
        StorageError: The disk refused.
    """
    begin = time.monotonic()
    kind = predictor_class(config.task)
    _refuse_out(request.out)
    _refuse_without_effect(kind, config, request)
    notes: list[str] = []
    options = ReadOptions(**request.read)
    rows = read_files("data.eval", request.data, options, notes, documents=False)
    split = Split(rows, "data.eval")
    refuse_damaged(run.tokenizer)
    device = pick_device(config.training.device)
    model, snapshot = load_trained(run, checkpoint)
    tokenizer = _tokenizer(config, run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    precision = Precision(device, config.training.precision.value)
    predictor = kind(
        Predicting(
            model=model.to(device),
            tokenizer=tokenizer,
            labels=class_names(snapshot.metadata.model_config),
            task=config.task,
            max_length=config.data.max_length,
            to_device=precision.to_device,
            autocast=precision.autocast,
            reference_model=functools.partial(start_of, config, model, snapshot.metadata, device),
            split=split,
            columns=_columns(config, request.columns),
            generation=request.generation,
            notes=notes,
        )
    )
    predictions = _predict(predictor, config, device)
    write(request.out, split, predictions, notes)
    seconds = time.monotonic() - begin
    return Predicted(request.out, snapshot.global_step, len(predictions), seconds, notes)


def _refuse_out(out: Path) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ConfigError: Another ending, no such folder, or it is there already.
    """
    if out.suffix.lower() not in ENDINGS:
        ending = out.suffix or "(none)"
        raise ConfigError(
            f"out={out}: unknown ending {ending}. Expected one of {', '.join(ENDINGS)}."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: no such folder: {out.parent}. Make it first.")
    if out.exists() or out.is_symlink():
        raise _taken(out)


def _taken(out: Path) -> ConfigError:
    """Make the refusal of a file that is there."""
    return ConfigError(
        f"out={out}: is there already, and nothing is overwritten. Choose a new file, or remove it."
    )


def _refuse_without_effect(
    kind: type[Predictor], config: RunConfig, request: PredictionRequest
) -> None:
    """Refuse options and columns that the predictions of the task do not go by.

    Raises:
        ConfigError: Naming the first.
    """
    task = f"task={config.task.name}"
    for key, column in request.columns.items():
        if key not in kind.columns:
            keys = ", ".join(f"data.{name}" for name in kind.columns) or "none"
            raise ConfigError(
                f"data.{key}={column}: {task} predicts from no such column. It reads: {keys}."
            )
    if request.max_length and not kind.cuts:
        raise ConfigError(
            f"data.max_length={config.data.max_length}: predictions of {task} cut no rows. Leave it"
            " out."
        )
    for key, value in request.generation.items():
        if not kind.generates:
            raise ConfigError(
                f"generation.{key}={value}: {task} generates no text, so it has no effect. Leave it"
                " out."
            )


def _columns(config: RunConfig, given: Mapping[str, str | None]) -> ColumnsConfig:
    """Return the columns of the run, but for those that are named now."""
    names: PlainDict = {}
    if isinstance(config.data, ColumnsConfig):
        for column in fields(ColumnsConfig):
            if column.name.endswith(("_column", "_columns")):
                names[column.name] = getattr(config.data, column.name)
    if "text_column" in given:
        names["eval_text_column"] = names["messages_column"] = None
    if "messages_column" in given:
        names["text_column"] = names["eval_text_column"] = names["target_column"] = None
    return ColumnsConfig(name="files", **{**names, **given})


def _tokenizer(config: RunConfig, run: RunDir) -> Any:
    """Load what prepares the inputs, as it was in use when the run was trained.

    Raises:
        CheckpointError: The run has none.
        ConfigError: It cannot be loaded.
    """
    images = config.task.PROCESSOR == "AutoImageProcessor"
    if images and isinstance(config.model, FromConfigConfig):
        return load_image_preparation(config.model)
    if not run.tokenizer.is_dir():
        raise CheckpointError(
            f"{run.tokenizer}: missing: how the inputs were prepared is not known. Restore it."
        )
    return saved_preparation(run.tokenizer) if images else saved_tokenizer(run.tokenizer)


def _predict(predictor: Predictor, config: RunConfig, device: torch.device) -> list[Values]:
    """Predict all rows, some batches at a time; random states are left as they were."""
    total = len(predictor.split.rows)
    batch_size = config.training.per_device_eval_batch_size
    window = batch_size * BATCHES_OF_A_WINDOW
    begins = range(0, total, window)
    predictions: list[Values] = []
    states = RandomStates(device)
    keep_cache = nullcontext() if predictor.generates else lean_forward(predictor.predicting.model)
    try:
        with keep_cache, torch.no_grad():
            for begin in watched(begins, len(begins), what="prediction"):
                numbers = range(begin, min(begin + window, total))
                predictions += predict_rows(predictor, numbers, batch_size, config.seed, device)
    finally:
        states.restore()
    return predictions


def predict_rows(
    predictor: Predictor, numbers: range, batch_size: int, seed: int, device: torch.device
) -> list[Values]:
    """Predict some rows in batches of like length, which are a function of these rows alone.

    Args:
        predictor: Of the task.
        numbers: Indices of the rows.
        batch_size: Rows of a batch.
        seed: Of what is drawn by chance.
        device: Where the model is.

    Returns:
        A prediction for each row, in order.
    """
    inputs = predictor.encode(numbers)
    order = np.argsort([-predictor.length(row) for row in inputs], kind="stable")
    predictions: list[Values] = [{}] * len(inputs)
    for number, begin in enumerate(range(0, len(inputs), batch_size)):
        members = order[begin : begin + batch_size].tolist()
        batch = [inputs[member] for member in members]
        seed_random_states(seed_of_micro_batch(seed, numbers.start, number), device)
        with of_memory_in_evaluation(_tensors(batch[0]), "prediction"):
            values = predictor.predict(batch)
        for member, row in zip(members, values, strict=True):
            predictions[member] = row
    return predictions


def _tensors(row: Inputs) -> dict[str, torch.Tensor]:
    """Collect the arrays of a row, for the message of what takes too much memory."""
    arrays = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def write(out: Path, split: Split, predictions: list[Values], notes: list[str]) -> None:
    """Write the rows with their predictions beside, aside first.

    Args:
        out: A new file.
        split: The rows.
        predictions: Of each row, in order.
        notes: Takes which columns are left out.

    Raises:
        ConfigError: A column is called as one of the predictions; the file came there meanwhile.
        StorageError: The disk refused.
    """
    from datasets import Dataset, concatenate_datasets

    columns = Dataset.from_list(predictions)
    for name in columns.column_names:
        if name in split.rows.column_names:
            raise ConfigError(
                f"{split.key} has a column {name}, and so have the predictions. Rename it."
            )
    rows: Any = getattr(split.rows, "dataset", split.rows)
    binary = [name for name, feature in rows.features.items() if _is_binary(feature)]
    if binary:
        notes.append(f"not written beside the predictions: {', '.join(binary)} (bytes)")
        rows = rows.remove_columns(binary)
    table = concatenate_datasets([rows, columns], axis=1) if rows.column_names else columns
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with storing(out):
            _write_table(table, aside, out.suffix.lower())
        _put_in_place(aside, out)
    finally:
        aside.unlink(missing_ok=True)


def _put_in_place(aside: Path, out: Path) -> None:
    """Give a finished file its name.

    Raises:
        ConfigError: The name is taken.
    """
    try:
        os.link(aside, out)
    except OSError:  # the name is taken, or the file system has no hard links
        if os.path.lexists(out):
            raise _taken(out) from None
        aside.rename(out)


def _is_binary(feature: object) -> bool:
    """Tell whether a column holds bytes: images, sounds, binary."""
    kind = type(feature).__name__
    return kind in ("Image", "Audio", "Video", "Pdf", "Nifti") or "binary" in str(
        getattr(feature, "dtype", "")
    )


def _write_table(table: Dataset, path: Path, ending: str) -> None:
    """Write a table as jsonl, csv or parquet."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        if ending == ".jsonl":
            table.to_json(path, force_ascii=False, double_precision=15, date_format="iso")
        elif ending == ".parquet":
            table.to_parquet(path)
        else:
            cells: PlainDict = {}
            for name in table.column_names:
                cells[str(csv_cell(name))] = [_cell(value) for value in table[name]]
            Dataset.from_dict(cells).to_csv(path)
    finally:
        enable_progress_bars()


def _cell(value: object) -> object:
    """Write a cell of a csv file: lists and objects are JSON, a formula becomes a text."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return csv_cell(value)
