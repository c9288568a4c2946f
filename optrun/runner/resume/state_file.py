"""`state.json` of a checkpoint, looked through by key before a run goes on from it.

Checksums say that a file is what was written, not that a person's script wrote something sensible
and sealed it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints

import torch

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import from_json
from optrun.artifacts.run_dir import CHECKPOINT_STATE
from optrun.base.errors import CheckpointError
from optrun.base.plain import PlainDict
from optrun.config.registry.origins import unrecorded
from optrun.training.callback import StopRequest
from optrun.training.early_stopping import EarlyStopping
from optrun.training.state import Count, Ended, RandomStates, TrainState

_Positive = Annotated[int, 1]


class _Plateau(TypedDict):
    multiplier: float
    num_bad: Count
    cooling: Count


class _Schedule(TypedDict):
    name: str
    global_step: Count
    last_lr: list[float]
    plateau: _Plateau | None


class _Group(TypedDict):
    param_names: list[str]


class _Optimizer(TypedDict):
    optimizer: str
    params: dict[str, object]
    state: dict[str, dict[str, object]]
    shared: list[object]
    attributes: dict[str, object]
    groups: list[_Group]


class _Tensor(TypedDict):
    tensor: list[object]


class _Plan(TypedDict):
    examples: _Positive
    batch_size: _Positive
    accumulation: _Positive
    seed: int
    grouped: bool
    ordering: str
    fingerprint: str


class _Counted(TypedDict):
    """State of early stopping."""

    metric: str
    mode: str
    counter: Count
    best: float | None


class _Plugin(TypedDict):
    names: list[str]


class _Branch(TypedDict):
    folder: str
    digest: str
    step: Count
    schedule_from: Count


class _State(TypedDict):
    """What has to be right for a run to go on."""

    global_step: Count
    train: TrainState
    random: dict[str, object]
    scheduler: _Schedule
    scaler: dict[str, float]
    optimizer: _Optimizer
    plan: _Plan
    config: dict[str, object]
    model_class: str
    model_config: dict[str, object]
    generation_config: NotRequired[dict[str, object]]
    trainable: NotRequired[list[str]]
    environment: NotRequired[dict[str, object]]
    tokenizer: NotRequired[str]
    plugins: NotRequired[list[_Plugin]]
    callbacks: NotRequired[dict[str, object]]
    stop: NotRequired[StopRequest]
    branch: NotRequired[_Branch]


_EXPECTED: dict[object, str] = {
    float: "a number",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
}


def read_checkpoint(folder: Path, *, lazy: bool = False) -> Snapshot:
    """Load a checkpoint of a run, and verify its checksums.

    Args:
        folder: The checkpoint.
        lazy: Leave the tensors in their files until one is asked for.

    Raises:
        CheckpointError: It is damaged, or says what no run saves.
    """
    snapshot = load_checkpoint(folder, lazy=lazy)
    refuse_garbage(folder, snapshot.metadata)
    return snapshot


def refuse_garbage(folder: Path, metadata: CheckpointMetadata) -> None:
    """Check everything in a checkpoint beside its tensors.

    Args:
        folder: The checkpoint, for the message.
        metadata: Its `state.json`.

    Raises:
        CheckpointError: With the first key whose value is none that a run saves.
    """
    for fault in _faults(from_json(metadata.to_dict())):
        raise CheckpointError(
            f"{folder / CHECKPOINT_STATE}: {fault}. Its checksums are right, but no run saved this."
        )


def _faults(state: PlainDict) -> Iterator[str]:
    """Yield what is wrong, key by key; what comes first is what the next relies on."""
    fault = _wrong("", state, _State)
    if fault:
        yield fault
        return
    yield from _wrong_tensors(state["optimizer"]["state"])
    yield from _wrong_counters(state["train"], state["global_step"])
    if not state["scheduler"]["last_lr"]:
        yield _expected("scheduler.last_lr", [], "a learning rate for each group")
    counted = state.get("callbacks", {}).get(
        EarlyStopping.key, {"metric": "", "mode": "", "counter": 0, "best": None}
    )
    fault = _wrong(f"callbacks.{EarlyStopping.key}", counted, _Counted)
    if fault:
        yield fault
    yield from _wrong_classes(state["model_config"].get("id2label") or {})
    for name in unrecorded(state["config"], state.get("plugins", ())):
        yield f"plugins: no record of {name}, which its config chooses"
    if "-" not in state["plan"]["fingerprint"]:
        yield (
            f"plan.fingerprint: {_shown(state['plan']['fingerprint'])}, expected two joined by a"
            " dash"
        )
    try:
        RandomStates.unpack(state["random"], torch.device("cpu"))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        yield f"random: no states of generators: {type(error).__name__}: {str(error)[:100]}"


def _wrong_tensors(states: PlainDict) -> Iterator[str]:
    """Yield the faults of the optimizer's tensors."""
    for name, entries in states.items():
        for key, entry in entries.items():
            if not isinstance(entry, dict) or "tensor" not in entry:
                continue
            fault = _wrong(f"optimizer.state.{name}.{key}", entry, _Tensor)
            if fault:
                yield fault


def _wrong_classes(classes: object) -> Iterator[str]:
    """Yield the faults of the class names."""
    fault = _wrong("model_config.id2label", classes, dict[str, object])
    if fault or not isinstance(classes, dict):
        yield fault or ""
        return
    if not all(number.isdecimal() for number in classes):
        yield f"model_config.id2label: {_shown(min(classes))} is no number of a class"


def _wrong_counters(train: PlainDict, step: int) -> Iterator[str]:
    ended = train.get("without_end", {})
    ranked_steps: list[str] = []
    for section in (train, ended):
        ranked_steps += [*section.get("ranking", {}), *section.get("ranking_losses", {})]
    unknown_keys = [key for key in ended if key not in get_type_hints(Ended)]
    strange_steps = [key for key in ranked_steps if not key.isdecimal()]
    if train.get("global_step") != step:
        yield _expected("train.global_step", train.get("global_step"), str(step))
    elif unknown_keys:
        keys = ", ".join(get_type_hints(Ended))
        yield f"train.without_end: {_shown(unknown_keys[0])} is none of {keys}"
    elif strange_steps:
        yield f"train.ranking: {_shown(min(strange_steps))} is no step"
    elif (
        not 0
        <= train["global_step"] + train.get("data_shift", 0) + train.get("passed_steps", 0)
        < 2**63
    ):
        yield _expected("train.data_shift", train["data_shift"], "a position in the data")


def _wrong(key: str, value: object, kind: Any) -> str | None:
    """Describe the fault of a value; None: there is none.

    None: it is of the type, one that JSON has or a class of keys.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if kind is object or (origin is UnionType and value is None and NoneType in args):
        return None
    if origin in (UnionType, NotRequired):
        return _wrong(key, value, args[0])
    if origin in (list, dict):
        return _wrong_items(key, value, origin, args[-1])
    if origin is None and kind not in _EXPECTED:
        return _wrong_keys(key, value, kind)
    if origin is Annotated:
        is_valid = type(value) is int and args[1] <= value < 2**63
        expected = f"a whole number, {args[1]} or more"
    else:
        is_valid = type(value) is kind or (kind is float and type(value) is int)
        expected = _EXPECTED[kind]
    return None if is_valid else _expected(key, value, expected)


def _wrong_items(key: str, value: object, kind: type, of_items: Any) -> str | None:
    """Describe what is wrong with a list or a mapping; None: nothing."""
    items: list[tuple[str, object]]
    if kind is list:
        if not isinstance(value, list):
            return _expected(key, value, "a list")
        items = [(f"{key}[{at}]", item) for at, item in enumerate(value)]
    else:
        if not isinstance(value, dict):
            return _expected(key, value, "a mapping")
        items = [(f"{key}.{name}", item) for name, item in value.items()]
    for name, item in items:
        fault = _wrong(name, item, of_items)
        if fault is not None:
            return fault
    return None


def _wrong_keys(key: str, value: object, kind: type) -> str | None:
    """Describe what is wrong with a mapping by the keys of a class.

    Of counters some may be missing.
    """
    if not isinstance(value, dict):
        return _expected(key, value, "a mapping")
    prefix = f"{key}." if key else ""
    for name, inner in get_type_hints(kind, include_extras=True).items():
        if name in value:
            fault = _wrong(f"{prefix}{name}", value[name], inner)
            if fault:
                return fault
        elif get_origin(inner) is not NotRequired and kind not in (TrainState, Ended):
            return f"{prefix}{name}: missing"
    return None


def _expected(key: str, value: object, expected: str) -> str:
    return f"{key}: {_shown(value)}, expected {expected}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
