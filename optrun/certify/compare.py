"""Two runs held against each other, bit by bit, at their last checkpoint and along the way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import Snapshot, load_checkpoint
from optrun.artifacts.metrics import read_metrics
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import tensor_digest

_CLOCKED = ("time", "unscheduled")


@dataclass
class Section:
    """One kind of thing that was compared."""

    name: str
    count: int
    """Tensors, values or lines."""
    digest: str
    """sha256 over all of them in the undisturbed run, 16 digits."""
    difference: str | None
    """The first that differs; None: none does."""


def compare(straight: RunDir, other: RunDir, step: int) -> list[Section]:
    """Compare everything the next step depends on, and everything that was logged.

    Args:
        straight: A run that nobody disturbed.
        other: One that was killed and resumed.
        step: Where both have a checkpoint.

    Raises:
        CheckpointError: A checkpoint is missing or damaged.
    """
    one, two = load_checkpoint(straight.checkpoint(step)), load_checkpoint(other.checkpoint(step))
    train_one, train_two = _counters(one), _counters(two)
    return [
        _tensors("weights", names.CHECKPOINT_MODEL, one.model, two.model),
        _tensors("optimizer state", names.CHECKPOINT_OPTIMIZER, one.optimizer, two.optimizer),
        _values("optimizer counters and groups", one.metadata.optimizer, two.metadata.optimizer),
        _values("schedule", one.metadata.scheduler, two.metadata.scheduler),
        _values("loss scale", one.metadata.scaler, two.metadata.scaler),
        _values("random states", one.metadata.random, two.metadata.random),
        _values(
            "sample order",
            {key: train_one.pop(key) for key in ("batches_digest", "samples", "tokens")},
            {key: train_two.pop(key) for key in ("batches_digest", "samples", "tokens")},
        ),
        _values("counters", train_one, train_two),
        _values("callbacks", one.metadata.callbacks or {}, two.metadata.callbacks or {}),
        _values("metrics lines", _lines(straight), _lines(other)),
    ]


def _counters(snapshot: Snapshot) -> dict[str, object]:
    """Select the counters that do not depend on the clock."""
    train = {key: value for key, value in snapshot.metadata.train.items() if key != "seconds"}
    train["without_end"] = dict(train.get("without_end", {}))
    for counters in (train, train["without_end"]):
        if "last" in counters:
            counters["last"] = {
                key: value for key, value in counters["last"].items() if not key.startswith("perf/")
            }
    return train


def _lines(run: RunDir) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, record in enumerate(read_metrics(run.metrics).records):
        kept = {
            key: value
            for key, value in record.items()
            if key not in _CLOCKED and not key.startswith("perf/")
        }
        found[f"line {number + 1}"] = kept
    return found


def _tensors(
    name: str, file: str, one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]
) -> Section:
    difference = None
    for key in {**one, **two}:
        if key not in one or key not in two:
            difference = (
                f"{file}: tensor {key} is only in"
                f" {'the undisturbed' if key in one else 'the resumed'} run"
            )
        elif one[key].dtype != two[key].dtype or one[key].shape != two[key].shape:
            difference = f"{file}: tensor {key}: {_kind(one[key])} against {_kind(two[key])}"
        elif tensor_digest(one[key]) != tensor_digest(two[key]):
            apart = (one[key].double() - two[key].double()).abs()
            count, most = int((apart != 0).sum()), float(apart.max())
            difference = (
                f"{file}: tensor {key}: {count:,} of {apart.numel():,} values differ, by {most:g}"
                " at most"
            )
        if difference is not None:
            break
    return Section(
        name,
        len(one),
        _digest({key: tensor_digest(tensor) for key, tensor in one.items()}),
        difference,
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _values(name: str, one: object, two: object) -> Section:
    return Section(name, len(_flat(one)), _digest(one), first_difference(one, two, name))


def first_difference(one: object, two: object, where: str) -> str | None:
    """Find the first place where two nested values differ, with both values; None: nowhere.

    Example:
        >>> first_difference({"a": [1, 2]}, {"a": [1, 3]}, "counters")
        'counters.a[1]: 2 against 3'
    """
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return _first_difference_of_mappings(one, two, where)
    if isinstance(one, list) and isinstance(two, list):
        return _first_difference_of_lists(one, two, where)
    both_nan = one != one and two != two
    if one == two or both_nan:
        return None
    return f"{where}: {str(one)[:40]} against {str(two)[:40]}"


def _first_difference_of_mappings(
    one: Mapping[str, object], two: Mapping[str, object], where: str
) -> str | None:
    for key in {**one, **two}:
        if key not in two:
            return f"{where}.{key}: only in the undisturbed run"
        if key not in one:
            return f"{where}.{key}: only in the resumed run"
        difference = first_difference(one[key], two[key], f"{where}.{key}")
        if difference is not None:
            return difference
    return None


def _first_difference_of_lists(one: list[object], two: list[object], where: str) -> str | None:
    if len(one) != len(two):
        return f"{where}: {len(one)} entries against {len(two)}"
    for index, (left, right) in enumerate(zip(one, two, strict=True)):
        difference = first_difference(left, right, f"{where}[{index}]")
        if difference is not None:
            return difference
    return None


def _flat(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _flat(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
