"""A checkpoint and a file of rows to a file of predictions: `optrun predict`."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from optrun.artifacts.atomic import storing
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.base.errors import CheckpointError, ConfigError, nearest, refuse_url
from optrun.base.formatting import csv_cell
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.checks import build
from optrun.config.schema.data import ColumnsConfig, DataConfig, FilesConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.files import read_files
from optrun.data.reading import ReadOptions
from optrun.data.source import Source, Split
from optrun.model.forward import lean_forward
from optrun.model.images import load_image_preparation, saved_preparation
from optrun.model.tokenizer import saved_tokenizer
from optrun.runner.model_loading import load_trained_model, refuse_other_vocabulary
from optrun.runner.prediction.base import Predicting, Predictor, Values
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
_READ_KEYS = ("data.eval", "data.format", "data.delimiter", "data.encoding", "data.column_names")
_FIRST = "optrun predict RUN_DIR data.eval=FILE out=FILE"


@dataclass
class Predicted:
    """What was predicted."""

    out: Path
    rows: int
    notes: list[str]


def predict_file(
    config: RunConfig, run: RunDir, checkpoint: Path, typed: PlainMapping
) -> Predicted:
    """Predict every row of a file.

    Args:
        config: Of the run, with the changes that a prediction goes by.
        run: The run it belongs to.
        checkpoint: Whole.
        typed: Keys of the command line to values: `data.eval`, `out`, ...

    Raises:
        ConfigError: Anything asked for that does not fit the task or the rows; the file is there.
        CheckpointError: The checkpoint, or what is read of the run, is damaged.
        StorageError: The disk refused.
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
        Predicting(
            model=model.to(device),
            tokenizer=tokenizer,
            labels=class_names(snapshot.metadata.model_config),
            task=config.task,
            max_length=config.data.max_length,
            precision=Precision(device, config.training.precision.value),
            source=Source(Split(rows, "data.train"), {"": split}, files, notes=notes),
            generation=_below("generation", typed),
        )
    )
    predictions = _predict(predictor, config, device)
    notes += write(out, split, predictions)
    return Predicted(out, len(predictions), notes)


def _below(group: str, typed: PlainMapping) -> PlainDict:
    """Return the keys of a group, without its name."""
    start = f"{group}."
    return {key.removeprefix(start): typed[key] for key in typed if key.startswith(start)}


def _refuse_unknown(typed: PlainMapping, kind: type[Predictor], task: str) -> None:
    """Refuse a key that predictions of the task do not go by.

    Raises:
        ConfigError: Naming the first.
    """
    known_keys = [*RUN_KEYS[:-1], *_READ_KEYS, *(f"data.{name}" for name in kind.columns), "out"]
    if kind.cuts:
        known_keys.append(RUN_KEYS[-1])
    near = [*known_keys]
    if kind.generates:
        near += [f"generation.{name}" for name in vars(GenerationConfig())]
    for key in typed:
        if key not in known_keys and not (kind.generates and key.startswith("generation.")):
            hint = " or ".join(nearest(key, near)) or ", ".join(known_keys)
            raise ConfigError(
                f"{key}={typed[key]}: no key that a prediction of {task} goes by. Did you mean"
                f" {hint}?"
            )


def _files(typed: PlainMapping, data: DataConfig) -> FilesConfig:
    """Return the file of rows, how it is read, and the columns: of the run, or typed.

    Raises:
        ConfigError: The file is not given, or a value is of another type.
    """
    values = _below("data", typed)
    values.pop("max_length", None)
    if not isinstance(values.get("eval"), str | list):
        raise ConfigError(f"optrun predict needs data.eval, the file with the rows: {_FIRST}")
    refuse_url("data.eval", values["eval"])
    of_run: PlainDict = {}
    for column in fields(ColumnsConfig):
        if "_column" in column.name:
            of_run[column.name] = getattr(data, column.name, None)
    if "text_column" in values:
        of_run |= {"eval_text_column": None, "messages_column": None}
    if "messages_column" in values:
        of_run |= {"text_column": None, "eval_text_column": None, "target_column": None}
    values = {"name": "files", "train": values["eval"], **of_run, **values}
    return build(FilesConfig, values, "data")


def _out(typed: PlainMapping) -> Path:
    """Return the file to be written.

    Raises:
        ConfigError: It is not given, has another ending or no folder, or is there already.
    """
    if not isinstance(typed.get("out"), str):
        raise ConfigError(f"optrun predict needs out, the file to be written: {_FIRST}")
    refuse_url("out", typed["out"])
    out = Path(typed["out"]).expanduser()
    if out.suffix.lower() not in ENDINGS:
        ending = out.suffix or "(none)"
        raise ConfigError(
            f"out={out}: unknown ending {ending}. Expected one of {', '.join(ENDINGS)}."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"out={out}: no such folder: {out.parent}. Make it first.")
    if os.path.lexists(out):
        raise _taken(out)
    return out


def _taken(out: Path) -> ConfigError:
    """Make the refusal of a file that is there."""
    return ConfigError(
        f"out={out}: is there already, and nothing is overwritten. Choose a new file, or remove it."
    )


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
    """Predict all rows, in order; random states are left as they were.

    Rows of like length share a batch, the longest come first: a function of the rows alone.
    """
    inputs = predictor.encode()
    order = np.argsort([-predictor.length(row) for row in inputs], kind="stable").tolist()
    size = config.training.per_device_eval_batch_size
    begins = range(0, len(order), size)
    predictions: list[Values] = [{}] * len(inputs)
    keep_cache = nullcontext() if predictor.generates else lean_forward(predictor.predicting.model)
    devices = [device] if device.type == "cuda" else []
    with keep_cache, torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        for begin in watched(begins, len(begins), what="prediction"):
            members = order[begin : begin + size]
            values = predictor.predict([inputs[member] for member in members])
            for member, row in zip(members, values, strict=True):
                predictions[member] = row
    return predictions


def write(out: Path, split: Split, predictions: list[Values]) -> list[str]:
    """Write the rows with their predictions beside, aside first; returns notes.

    Raises:
        ConfigError: A column is called as one of the predictions; the file came there meanwhile.
        StorageError: The disk refused.
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
    rows = rows.remove_columns(binary)
    table = concatenate_datasets([rows, columns], axis=1) if rows.column_names else columns
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with storing(out):
            _write_table(table, aside, out.suffix.lower())
        _put_in_place(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return [f"not written beside the predictions: {', '.join(binary)} (bytes)"] if binary else []


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
    return kind in ("Image", "Audio", "Video") or "binary" in str(getattr(feature, "dtype", ""))


def _write_table(table: Any, path: Path, ending: str) -> None:
    """Write a table of `datasets` as jsonl, csv or parquet."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        if ending == ".jsonl":
            table.to_json(path, force_ascii=False, double_precision=15, date_format="iso")
        elif ending == ".parquet":
            table.to_parquet(path)
        else:
            names = table.column_names
            cells = {str(csv_cell(name)): [_cell(value) for value in table[name]] for name in names}
            Dataset.from_dict(cells).to_csv(path)
    finally:
        enable_progress_bars()


def _cell(value: object) -> object:
    """Write a cell of a csv file: lists and objects are JSON, a formula becomes a text."""
    is_nested = isinstance(value, dict | list)
    return json.dumps(value, ensure_ascii=False) if is_nested else csv_cell(value)
