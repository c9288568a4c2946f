"""Compare two runs bit by bit, at a checkpoint and in everything that they logged."""

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
"""Keys of a metrics line that depend on the clock, besides `perf/...`."""
_ORDER_KEYS = ("batches_digest", "samples", "tokens")
"""Counters that say which examples were seen, and in which order."""


@dataclass
class Section:
    """The result of a comparison for one kind of state, such as weights."""

    name: str
    count: int
    """Number of tensors or values that were compared."""
    digest: str
    """First 16 hex digits of a sha256 over all of them, in the undisturbed run."""
    difference: str | None
    """Describes the first that differs; None: the runs are equal."""


def compare(straight: RunDir, other: RunDir, step: int) -> list[Section]:
    """Compare the checkpoints of two runs at a step, and all that they logged.

    Args:
        straight: The undisturbed run.
        other: The run that was killed and resumed.
        step: A step at which both have a checkpoint.

    Returns:
        One section for each kind of state, differences included.

    Raises:
        CheckpointError: A checkpoint is missing or damaged.
    """
    undisturbed = load_checkpoint(straight.checkpoint(step))
    resumed = load_checkpoint(other.checkpoint(step))
    resumed_values = _recorded_values(resumed, other)
    return [
        _compare_tensors("weights", names.CHECKPOINT_MODEL, undisturbed.model, resumed.model),
        _compare_tensors(
            "optimizer state", names.CHECKPOINT_OPTIMIZER, undisturbed.optimizer, resumed.optimizer
        ),
        *(
            _compare_values(name, values, resumed_values[name])
            for name, values in _recorded_values(undisturbed, straight).items()
        ),
    ]


def _recorded_values(snapshot: Snapshot, run: RunDir) -> dict[str, object]:
    """Collect all that a run has recorded besides tensors: section -> values from JSON."""
    state = snapshot.metadata
    counters = _counters(snapshot)
    order = {key: counters.pop(key) for key in _ORDER_KEYS}
    return {
        "optimizer counters and groups": state.optimizer,
        "schedule": state.scheduler,
        "loss scale": state.scaler,
        "random states": state.random,
        "sample order": order,
        "counters": counters,
        "callbacks": state.callbacks or {},
        "metrics lines": _metrics_lines(run),
    }


def _counters(snapshot: Snapshot) -> dict[str, object]:
    """Copy the counters of a checkpoint, except all measures of time.

    Those are `seconds`, and `perf/...` among the metrics under `last`. `without_end` holds the
    counters as they would be without an evaluation at the end, and loses the same.

    {"step": 3, "seconds": 9.1, "last": {"train/loss": 2.0, "perf/mfu": 0.4}} becomes {"step": 3,
    "last": {"train/loss": 2.0}, "without_end": {}}.
    """
    # New mappings on both levels, so that the checkpoint's own stay.
    train = dict(snapshot.metadata.train)
    train.pop("seconds", None)
    train["without_end"] = dict(train.get("without_end", {}))
    for counters in (train, train["without_end"]):
        if "last" not in counters:
            continue
        counters["last"] = {
            name: value for name, value in counters["last"].items() if not name.startswith("perf/")
        }
    return train


def _metrics_lines(run: RunDir) -> dict[str, object]:
    """Map `line 1`, `line 2`, ... to their metrics, except all measures of time."""
    lines: dict[str, object] = {}
    for number, record in enumerate(read_metrics(run.metrics).records, 1):
        lines[f"line {number}"] = {
            key: value
            for key, value in record.items()
            if key not in _CLOCKED and not key.startswith("perf/")
        }
    return lines


def _compare_tensors(
    name: str,
    file: str,
    one: Mapping[str, torch.Tensor],
    two: Mapping[str, torch.Tensor],
) -> Section:
    """Compare named tensors bit by bit.

    Args:
        name: Name of the section.
        file: Name of the checkpoint's file, for the message.
        one: Tensors of the undisturbed run; their count and digest are reported.
        two: Tensors of the other run.
    """
    digests = {key: tensor_digest(tensor) for key, tensor in one.items()}
    difference = _first_tensor_difference(one, two)
    if difference is not None:
        difference = f"{file}: tensor {difference}"
    return Section(name, len(one), _digest(digests), difference)


def _first_tensor_difference(
    one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]
) -> str | None:
    """Describe the first missing or different tensor, by dtype, shape or bits; None: none."""
    for key in {**one, **two}:
        if key not in two:
            return f"{key} is only in the undisturbed run"
        if key not in one:
            return f"{key} is only in the resumed run"
        before = one[key]
        after = two[key]
        if before.dtype != after.dtype or before.shape != after.shape:
            return f"{key}: {_kind(before)} against {_kind(after)}"
        if tensor_digest(before) != tensor_digest(after):
            distances = (before.double() - after.double()).abs()
            count = int((distances != 0).sum())
            return (
                f"{key}: {count:,} of {distances.numel():,} values differ,"
                f" by {float(distances.max()):g} at most"
            )
    return None


def _kind(tensor: torch.Tensor) -> str:
    """Write dtype and shape: `float32[2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _compare_values(name: str, one: object, two: object) -> Section:
    """Compare values from JSON; `one` is the undisturbed run."""
    return Section(name, _count(one), _digest(one), first_difference(one, two, name))


def first_difference(one: object, two: object, where: str) -> str | None:
    """Describe the first difference of two nested values; None if there is none.

    NaN equals NaN. `one` is called the undisturbed run, `two` the resumed one. A value is cut to 40
    characters.

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
    one: Mapping[str, object],
    two: Mapping[str, object],
    where: str,
) -> str | None:
    """Describe the first difference of two mappings, see `first_difference`."""
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
    """Describe the first difference of two lists, see `first_difference`."""
    if len(one) != len(two):
        return f"{where}: {len(one)} entries against {len(two)}"
    for index, (entry_one, entry_two) in enumerate(zip(one, two, strict=True)):
        difference = first_difference(entry_one, entry_two, f"{where}[{index}]")
        if difference is not None:
            return difference
    return None


def _count(value: object) -> int:
    """Count the values in nested mappings and lists; any other object is one value."""
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    if isinstance(value, list):
        return sum(map(_count, value))
    return 1


def _digest(value: object) -> str:
    """Return the first 16 hex digits of the sha256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
