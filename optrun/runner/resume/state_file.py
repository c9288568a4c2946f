"""`state.json` of a checkpoint, looked through by key before a run goes on from it.

Checksums say that a file is what was written, not that a person's script wrote something sensible and sealed it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import from_json
from optrun.artifacts.run_dir import CHECKPOINT_STATE
from optrun.base.errors import CheckpointError
from optrun.config.registry.origins import unrecorded
from optrun.training.early_stopping import EarlyStopping
from optrun.training.state import RandomStates, TrainState

_COUNT, _NUMBER = "a whole number, 0 or more", "a number"
_NAMES = [str]
_SHAPE: dict[str, Any] = {
    "global_step": _COUNT,
    "train": dict,
    "random": dict,
    "scheduler": {"name": str, "global_step": _COUNT, "last_lr": [_NUMBER], "plateaus": list},
    "scaler": dict,
    "optimizer": {
        "optimizer": str,
        "params": dict,
        "state": dict,
        "shared": list,
        "attributes": dict,
        "groups": [{"param_names": _NAMES}],
    },
    "plan": {"examples": 1, "batch_size": 1, "accumulation": 1, "seed": int, "fingerprint": str},
    "config": dict,
    "model_class": str,
    "model_config": dict,
}
_EXPECTED: dict[Any, str] = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    1: "a whole number, 1 or more",
}
_OPTIONAL: dict[str, Any] = {
    "trainable": _NAMES,
    "environment": dict,
    "tokenizer": str,
    "split_by": str,
    "plugins": [{"names": _NAMES}],
    "callbacks": dict,
    "stop": {"by": str, "reason": str, "step": _COUNT},
    "branch": {"folder": str, "digest": str, "step": _COUNT, "schedule_from": _COUNT},
}
_EARLY_STOPPING = {"metric": str, "mode": str, "counter": _COUNT}
_PLATEAU = {"multiplier": _NUMBER, "num_bad": _COUNT, "cooling": _COUNT}


def refuse_garbage(folder: Path, metadata: CheckpointMetadata) -> None:
    """Look through what a checkpoint says besides its tensors.

    Args:
        folder: The checkpoint, for the message.
        metadata: Its `state.json`.

    Raises:
        CheckpointError: With the first key whose value is none that a run saves.
    """
    for fault in _faults(from_json(metadata.to_dict())):
        raise CheckpointError(f"{folder / CHECKPOINT_STATE}: {fault}. Its checksums are right, but no run saved this.")


def _faults(state: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong, key by key; what comes first is what the next relies on."""
    optional = {key: shape for key, shape in _OPTIONAL.items() if key in state}
    if fault := _wrong("", state, _SHAPE | optional):
        yield fault
        return
    for name, entries in state["optimizer"]["state"].items():
        shape: dict[str, Any] = {
            key: {"tensor": list} for key, entry in _mapping(entries).items() if "tensor" in _mapping(entry)
        }
        if fault := _wrong(f"optimizer.state.{name}", entries, shape):
            yield fault
    yield from _wrong_counters(state["train"], state["global_step"])
    if not state["scheduler"]["last_lr"]:
        yield _expected("scheduler.last_lr", [], "a learning rate for each group")
    for plateau in state["scheduler"]["plateaus"]:
        if plateau is not None and (fault := _wrong("scheduler.plateaus", plateau, _PLATEAU)):
            yield fault
    if EarlyStopping.key in state.get("callbacks", {}):
        counted = state["callbacks"][EarlyStopping.key]
        none_yet = isinstance(counted, dict) and counted.get("best", 0) is None
        shape = _EARLY_STOPPING | ({} if none_yet else {"best": _NUMBER})
        if fault := _wrong(f"callbacks.{EarlyStopping.key}", counted, shape):
            yield fault
    if fault := _wrong("scaler", state["scaler"], dict.fromkeys(state["scaler"], _NUMBER)):
        yield fault
    classes = state["model_config"].get("id2label") or {}
    if fault := _wrong("model_config.id2label", classes, dict):
        yield fault
    elif not all(number.isdecimal() for number in classes):
        yield f"model_config.id2label: {_shown(min(classes))} is no number of a class"
    for name in unrecorded(state["config"], state.get("plugins", ())):
        yield f"plugins: no record of {name}, which its config chooses"
    if "-" not in state["plan"]["fingerprint"]:
        yield f"plan.fingerprint: {_shown(state['plan']['fingerprint'])}, expected two joined by a dash"
    try:
        RandomStates.unpack(state["random"], torch.device("cpu"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        yield f"random: no states of generators: {type(error).__name__}: {str(error)[:100]}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


_BY_STEP = ("ranking", "ranking_losses")


def _wrong(key: str, value: Any, shape: Any) -> str | None:
    """Describe what is wrong with a value; None: it has the shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return _expected(key, value, "a mapping")
        missing = [name for name in shape if name not in value]
        if missing:
            return f"{key}{'.' if key else ''}{missing[0]}: missing"
        below = (_wrong(f"{key}{'.' if key else ''}{name}", value[name], inner) for name, inner in shape.items())
        return next(filter(None, below), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _expected(key, value, "a list")
        return next(filter(None, (_wrong(f"{key}[{index}]", item, shape[0]) for index, item in enumerate(value))), None)
    if isinstance(shape, type):
        good = type(value) is shape
    elif shape == _NUMBER:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        good = type(value) is int and (shape if shape == 1 else 0) <= value < 2**63
    return None if good else _expected(key, value, _EXPECTED.get(shape, shape))


def _metric_shapes(held: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes of the mappings from metrics, or from steps, to numbers."""
    keys = ("last", "before_training", "lrs", *_BY_STEP)
    shapes: dict[str, Any] = {key: dict.fromkeys(held[key], _NUMBER) for key in keys if isinstance(held.get(key), dict)}
    if isinstance(held.get("best"), dict):
        also = {"loss": _NUMBER, "tied": _COUNT}
        shapes["best"] = {
            name: {"value": _NUMBER, "step": _COUNT, **{key: also[key] for key in also if key in _mapping(entry)}}
            for name, entry in held["best"].items()
        }
    return shapes


def _steps(held: dict[str, Any]) -> list[str]:
    """List keys of rankings that are no steps."""
    return [step for key in _BY_STEP for step in held.get(key, {}) if not step.isdecimal()]


def _wrong_counters(train: dict[str, Any], step: int) -> Iterator[str]:
    shapes: dict[str, Any] = {}
    for entry in fields(TrainState):
        default = getattr(TrainState(), entry.name)
        shapes[entry.name] = {float: _NUMBER, int: _COUNT}.get(type(default), type(default))
    shapes["data_shift"] = int
    shapes |= _metric_shapes(train)
    ended = train.get("without_end")
    if isinstance(ended, dict):
        shapes["without_end"] = {**dict.fromkeys(ended, dict), **_metric_shapes(ended)}
    if fault := _wrong("train", train, {key: shape for key, shape in shapes.items() if key in train}):
        yield fault
    elif train.get("global_step") != step:
        yield _expected("train.global_step", train.get("global_step"), str(step))
    elif foreign := [key for key in train.get("without_end", {}) if key not in ("best", "last", *_BY_STEP)]:
        yield f"train.without_end: {_shown(foreign[0])} is none of best, last, {', '.join(_BY_STEP)}"
    elif other := [step for held in (train, train.get("without_end", {})) for step in _steps(held)]:
        yield f"train.ranking: {_shown(min(other))} is no step"
    elif not 0 <= train["global_step"] + train.get("data_shift", 0) + train.get("passed_steps", 0) < 2**63:
        yield _expected("train.data_shift", train["data_shift"], "a position in the data")


def _expected(key: str, value: Any, what: str) -> str:
    return f"{key}: {_shown(value)}, expected {what}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
