"""A checkpoint and a file of rows to a file of predictions: `optrun predict`."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.artifacts.trunk import checkpoint_digest
from optrun.base import garbage
from optrun.base.errors import CheckpointError, ConfigError, StoppedEarly, did_you_mean
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.data import ColumnsConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.data.cache import digest_files
from optrun.data.files import every_file, read_files, resolve
from optrun.data.loader import Batch
from optrun.data.reading import ReadOptions
from optrun.data.source import Split
from optrun.model.forward import lean_forward
from optrun.model.images import load_image_preparation, saved_preparation
from optrun.model.tokenizer import saved_tokenizer
from optrun.runner.prediction.base import Inputs, Predicting, Predictor, Rows, Values
from optrun.runner.prediction.generation import OPTIONS
from optrun.runner.prediction.partial import Partial, finished_before, folder_of, forget, taken
from optrun.runner.prediction.writer import ending_of, kept_columns, write
from optrun.runner.reference import start_of
from optrun.runner.resume.data_position import class_names
from optrun.runner.trained import load_trained, refuse_other_vocabulary
from optrun.task.build import predictor_class
from optrun.training.device import pick_device
from optrun.training.display import watched
from optrun.training.failures import of_memory_in_evaluation
from optrun.training.state import RandomStates, seed_of_micro_batch, seed_random_states
from optrun.training.step import Precision

BATCHES_OF_A_WINDOW = 16
"""Batches whose rows are sorted by length together, and are kept or lost together."""
GENERATION_OPTIONS = OPTIONS
"""Names that are meant by `generation.NAME`, those most used."""


@dataclass
class Asked:
    """What is to be predicted, and where to."""

    data: str | list[str]
    """`data.eval`: a path, a list of them, or a glob."""
    out: Path
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """Keys such as `text_column` to names of columns, as far as the command line gives them."""
    keep: Sequence[str] | None = None
    """Columns of the file that stand beside the predictions; None: all."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the predictor."""
    generation: Mapping[str, object] = field(default_factory=dict)
    """`generation.KEY`."""
    cut: bool = False
    """Whether the command line gives `data.max_length`."""
    read: PlainMapping = field(default_factory=dict)
    """How the file is read: fields of `ReadOptions`, as far as the command line gives them."""


@dataclass
class Predicted:
    """What was predicted."""

    out: Path
    step: int
    rows: int
    continued: int
    """Rows of these that an earlier process had predicted."""
    seconds: float
    notes: list[str]


def predict_file(config: RunConfig, run: RunDir, checkpoint: Path, asked: Asked) -> Predicted:
    """Predict every row of a file; one that was begun before is continued.

    Args:
        config: Of the run, with the changes that a prediction goes by.
        run: The run it belongs to.
        checkpoint: Whole.
        asked: Rows, options, and the file to write.

    Raises:
        ConfigError: Anything asked for that does not fit the task or the rows; the file is there
            already, or was begun with another model, other rows or options.
        CheckpointError: The checkpoint, or what is read of the run, is damaged.
        StoppedEarly: Ctrl-C; what was predicted is kept.
        StorageError: The disk refused.
    """
    kind = predictor_class(config.task)
    ending = ending_of(asked.out)
    _refuse_strange(kind, config, asked)
    finished = finished_before(asked.out)
    if not finished and (asked.out.exists() or asked.out.is_symlink()):
        raise taken(asked.out)
    if not asked.out.parent.is_dir():
        raise ConfigError(f"out={asked.out}: no such folder: {asked.out.parent}. Make it first.")
    told: list[str] = []
    options = ReadOptions(**asked.read)
    split = Split(read_files("data.eval", asked.data, options, told, documents=False), "data.eval")
    refuse_damaged(run.tokenizer)
    device = pick_device(config.training.device)
    model, snapshot = load_trained(run, checkpoint)
    tokenizer = _tokenizer(config, run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    precision = Precision(device, config.training.precision.value)
    rows = Rows(split, _columns(config, asked.columns))
    rows.notes += told
    predictor = kind(
        Predicting(
            model=model.to(device),
            tokenizer=tokenizer,
            labels=class_names(snapshot.metadata.model_config),
            task=config.task,
            max_length=config.data.max_length,
            to_device=precision.to_device,
            autocast=precision.autocast,
            start=functools.partial(start_of, config, model, snapshot.metadata, device),
        ),
        rows,
        {**asked.options, **asked.generation},
    )
    names = kept_columns(split, asked.keep, predictor.shape, rows.notes)
    batch_size = config.training.per_device_eval_batch_size
    header = {
        "model": checkpoint_digest(checkpoint),
        "file": digest_files(every_file(resolve("data.eval", asked.data)))[:16],
        "rows": len(split.rows),
        "options": {**predictor.options, **asked.options},
        "generation": dict(asked.generation),
        "columns": {
            name: value for name, value in _named(rows.columns).items() if value is not None
        },
        **({"read": dict(asked.read)} if asked.read else {}),
        "data.max_length": config.data.max_length,
        "seed": config.seed,
        "training.per_device_eval_batch_size": batch_size,
        "training.precision": config.training.precision.value,
        "device": device.type,
    }
    partial = Partial(asked.out, header, len(split.rows), batch_size * BATCHES_OF_A_WINDOW)
    begun = time.monotonic()
    with partial.open():
        continued = partial.done
        if not finished:
            _predict(predictor, partial, batch_size, config.seed, device)
            write(partial.result, ending, split, names, predictor.shape, partial.predictions())
            partial.put_in_place()
    forget(asked.out)
    seconds = time.monotonic() - begun
    return Predicted(
        asked.out, snapshot.global_step, len(split.rows), continued, seconds, rows.notes
    )


def options_of(config: RunConfig) -> Mapping[str, object]:
    """Return the keys of its own that the predictor of a task takes, with their defaults.

    Raises:
        ConfigError: The task has no predictor.
    """
    options: Mapping[str, object] = predictor_class(config.task).options
    return options


def _named(columns: ColumnsConfig) -> PlainDict:
    """Map keys of columns to their names."""
    return {
        one.name: getattr(columns, one.name)
        for one in fields(ColumnsConfig)
        if one.name.endswith(("_column", "_columns"))
    }


def _columns(config: RunConfig, given: Mapping[str, str | None]) -> ColumnsConfig:
    """Return the columns of the run, with those that are named now in place of what held the text there."""
    own = _named(config.data) if isinstance(config.data, ColumnsConfig) else {}
    if "text_column" in given:
        own["eval_text_column"] = own["messages_column"] = None
    if "messages_column" in given:
        own["text_column"] = own["eval_text_column"] = own["target_column"] = None
    return ColumnsConfig(name="files", **{**own, **given})


def _refuse_strange(kind: type[Predictor], config: RunConfig, asked: Asked) -> None:
    """Refuse options and columns that the predictions of the task do not go by.

    Raises:
        ConfigError: Naming the first.
    """
    task = f"task={config.task.name}"
    for key in asked.columns:
        if key not in kind.columns:
            known = ", ".join(f"data.{name}" for name in kind.columns) or "none"
            raise ConfigError(
                f"data.{key}={asked.columns[key]}: {task} predicts from no such column. It reads:"
                f" {known}."
            )
    if asked.cut and not kind.cuts:
        raise ConfigError(
            f"data.max_length={config.data.max_length}: predictions of {task} cut no rows. Leave it"
            " out."
        )
    for key, value in asked.generation.items():
        if not kind.generates:
            raise ConfigError(
                f"generation.{key}={value}: {task} generates no text, so it has no effect. Leave it"
                " out."
            )
    for key, value in asked.options.items():
        if key not in kind.options:
            hint = did_you_mean(key, kind.options) if kind.options else "Leave it out."
            raise ConfigError(f"{key}={value}: predictions of {task} have no such option. {hint}")


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


def _predict(
    predictor: Predictor, partial: Partial, batch_size: int, seed: int, device: torch.device
) -> None:
    """Predict the rows that are left, a window at a time; random states are left as they were.

    Raises:
        StoppedEarly: Ctrl-C.
    """
    total = partial.rows
    states = RandomStates(device)
    garbage.resume()
    begins = range(partial.done, total, partial.window)
    windows = (range(begin, min(begin + partial.window, total)) for begin in begins)
    try:
        for window in watched(windows, len(begins), what="prediction"):
            with nullcontext() if predictor.generates else lean_forward(predictor.predicting.model):
                found = predict_window(predictor, window, batch_size, seed, device)
            partial.append(found)
    except KeyboardInterrupt:
        if not partial.done:
            raise
        raise StoppedEarly(
            f"after {partial.done:,} of {total:,} rows, which are kept in {folder_of(partial.out)}:"
            " run the same again to go on."
        ) from None
    finally:
        states.restore()


def predict_window(
    predictor: Predictor, window: range, batch_size: int, seed: int, device: torch.device
) -> list[Values]:
    """Predict some rows in batches of like length.

    Which rows share a batch is a function of these rows alone.

    Args:
        predictor: Of the task.
        window: Indices of the rows.
        batch_size: Rows of a batch.
        seed: Of what is drawn by chance.
        device: Where the model is.

    Returns:
        A prediction for each row, in order.
    """
    inputs = predictor.encode(window)
    order = np.argsort([-predictor.length(one) for one in inputs], kind="stable")
    found: list[Values] = [{}] * len(inputs)
    with torch.no_grad():
        for number, begin in enumerate(range(0, len(inputs), batch_size)):
            members = order[begin : begin + batch_size].tolist()
            seed_random_states(seed_of_micro_batch(seed, window.start, number), device)
            batch = [inputs[member] for member in members]
            with of_memory_in_evaluation(_tensors(batch), "prediction"):
                values = predictor.predict(batch)
            for member, one in zip(members, values, strict=True):
                found[member] = one
    return found


def _tensors(batch: list[Inputs]) -> Batch:
    """Collect the arrays of the longest row, for the message of what takes too much."""
    return {
        name: torch.from_numpy(value)
        for name, value in batch[0].items()
        if isinstance(value, np.ndarray)
    }
