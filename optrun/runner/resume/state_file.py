"""`state.json` of a checkpoint, looked through by key before a run goes on from it.

Checksums say that a file is what was written, not that a person's script wrote something sensible and sealed it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import NewType, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import from_json
from optrun.artifacts.run_dir import CHECKPOINT_STATE
from optrun.base.errors import CheckpointError
from optrun.config.registry.origins import unrecorded
from optrun.training.early_stopping import EarlyStopping
from optrun.training.state import TrainState, read_random_states

_Count = NewType("_Count", int)
"""0 or more."""
_Size = NewType("_Size", int)
"""1 or more."""
_LEAST: Mapping[object, int] = {_Count: 0, _Size: 1}
_EXPECTED: Mapping[object, str] = {
    dict: "a mapping",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    _Count: "a whole number, 0 or more",
    _Size: "a whole number, 1 or more",
}


class _Plateau(TypedDict):
    multiplier: float
    num_bad: _Count
    cooling: _Count


class _Schedule(TypedDict):
    name: str
    global_step: _Count
    last_lr: list[float]
    plateaus: list[_Plateau | None]


class _Group(TypedDict):
    param_names: list[str]


class _Optimizer(TypedDict):
    optimizer: str
    params: dict[str, object]
    state: dict[str, dict[str, object]]
    shared: list[object]
    attributes: dict[str, object]
    groups: list[_Group]


class _Plan(TypedDict):
    examples: _Size
    batch_size: _Size
    accumulation: _Size
    seed: int
    fingerprint: str


class _Plugin(TypedDict):
    names: list[str]


class _Stop(TypedDict):
    by: str
    reason: str
    step: _Count


class _Branch(TypedDict):
    folder: str
    digest: str
    step: _Count
    schedule_from: _Count


class _State(TypedDict):
    global_step: _Count
    train: dict[str, object]
    random: dict[str, object]
    scheduler: _Schedule
    scaler: dict[str, float]
    optimizer: _Optimizer
    plan: _Plan
    config: dict[str, object]
    model_class: str
    model_config: dict[str, object]
    trainable: NotRequired[list[str]]
    environment: NotRequired[dict[str, object]]
    tokenizer: NotRequired[str]
    split_by: NotRequired[str]
    plugins: NotRequired[list[_Plugin]]
    callbacks: NotRequired[dict[str, object]]
    stop: NotRequired[_Stop]
    branch: NotRequired[_Branch]


class _EarlyStopping(TypedDict):
    metric: str
    mode: str
    counter: _Count
    best: float | None


class _Best(TypedDict):
    value: float
    step: _Count
    loss: NotRequired[float]
    tied: NotRequired[_Count]


class _WithoutEnd(TypedDict):
    best: NotRequired[dict[str, _Best]]
    last: NotRequired[dict[str, float]]
    ranking: NotRequired[dict[str, float]]
    ranking_losses: NotRequired[dict[str, float]]


def read_checkpoint(folder: Path, *, lazy: bool = False) -> Snapshot:
    """Load a checkpoint whose checksums are right, and that a run wrote.

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
    """Look through what a checkpoint says besides its tensors.

    Args:
        folder: The checkpoint, for the message.
        metadata: Its `state.json`.

    Raises:
        CheckpointError: With the first key whose value is none that a run saves.
    """
    fault = next(_faults(metadata), None)
    if fault is not None:
        raise CheckpointError(f"{folder / CHECKPOINT_STATE}: {fault}. Its checksums are right, but no run saved this.")


def _faults(metadata: CheckpointMetadata) -> Iterator[str]:
    """Yield what is wrong, key by key; what comes first is what the next relies on."""
    yield from _unlike(_State, "", from_json(metadata.to_dict()))
    for name, entries in metadata.optimizer["state"].items():
        for key, entry in entries.items():
            if isinstance(entry, dict) and "tensor" in entry:
                yield from _unlike(list, f"optimizer.state.{name}.{key}.tensor", entry["tensor"])
    yield from _wrong_counters(metadata.train, metadata.global_step)
    if not metadata.scheduler["last_lr"]:
        yield "scheduler.last_lr: [], expected a learning rate for each group"
    callbacks = metadata.callbacks or {}
    if EarlyStopping.key in callbacks:
        yield from _unlike(_EarlyStopping, f"callbacks.{EarlyStopping.key}", callbacks[EarlyStopping.key])
    classes = metadata.model_config.get("id2label") or {}
    yield from _unlike(dict, "model_config.id2label", classes)
    if not all(number.isdecimal() for number in classes):
        yield f"model_config.id2label: {_shown(min(classes))} is no number of a class"
    for name in unrecorded(metadata.config, metadata.plugins or ()):
        yield f"plugins: no record of {name}, which its config chooses"
    if "-" not in metadata.plan["fingerprint"]:
        yield f"plan.fingerprint: {_shown(metadata.plan['fingerprint'])}, expected two joined by a dash"
    try:
        read_random_states(metadata.random)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        yield f"random: no states of generators: {type(error).__name__}: {str(error)[:100]}"


def _wrong_counters(train: Mapping[str, object], step: int) -> Iterator[str]:
    """Yield what is wrong with the counters of a `TrainState`."""
    kinds = {name: _Count if kind is int else kind for name, kind in get_type_hints(TrainState).items()}
    kinds |= {"data_shift": int, "best": dict[str, _Best], "without_end": _WithoutEnd}
    for name, kind in kinds.items():
        if name in train:
            yield from _unlike(kind, f"train.{name}", train[name])
    if train.get("global_step") != step:
        yield f"train.global_step: {_shown(train.get('global_step'))}, expected {step}"
    state = TrainState(**{name: value for name, value in train.items() if name in kinds})  # type: ignore[arg-type]
    known, ended = [*get_type_hints(_WithoutEnd)], state.without_end
    for name in ended:
        if name not in known:
            yield f"train.without_end: {_shown(name)} is none of {', '.join(known)}"
    for name in (*state.ranking, *state.ranking_losses, *ended.get("ranking", ()), *ended.get("ranking_losses", ())):
        if not name.isdecimal():
            yield f"train.ranking: {_shown(name)} is no step"
    if not 0 <= state.position < 2**63:
        yield f"train.data_shift: {_shown(state.data_shift)}, expected a position in the data"


def _unlike(kind: object, key: str, value: object) -> Iterator[str]:
    """Yield where a value is unlike a type.

    Args:
        kind: A class, a container of another type, a `TypedDict` whose further keys are not looked at, or one of them
            `| None`.
        key: Where the value stands.
        value: As JSON has it.
    """
    parts, kind = get_args(kind), get_origin(kind) or kind
    plain = dict if is_typeddict(kind) else kind
    if kind in (NotRequired, UnionType):
        if value is not None or kind is NotRequired:
            yield from _unlike(parts[0], key, value)
    elif not _is(value, plain):
        yield f"{key}: {_shown(value)}, expected {_EXPECTED[plain]}"
    elif is_typeddict(kind) and isinstance(value, dict):
        for name, inner in get_type_hints(kind, include_extras=True).items():
            inside = f"{key}.{name}".lstrip(".")
            if name in value:
                yield from _unlike(inner, inside, value[name])
            elif get_origin(inner) is not NotRequired:
                yield f"{inside}: missing"
    elif parts and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unlike(parts[0], f"{key}[{index}]", item)
    elif parts and isinstance(value, dict):
        for name, item in value.items():
            yield from _unlike(parts[1], f"{key}.{name}", item)


def _is(value: object, kind: object) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in _LEAST:
        return isinstance(value, int) and not isinstance(value, bool) and _LEAST[kind] <= value < 2**63
    return kind is object or type(value) is kind


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
