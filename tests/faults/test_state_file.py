"""Garbage in `state.json` under checksums that are right: refused by key, never a traceback."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import CheckpointError
from optrun.runner.resume.state_file import refuse_garbage
from tests.faults.checkpoints import edit_manifest
from tests.faults.runs import Go, Straight

GARBAGE = (None, "x", -1, [], {}, True, 2**70, 1.5, "Infinity")


def resealed(folder: Path, path: tuple[str | int, ...], value: object) -> None:
    """Put a value into the state of a checkpoint as one would who knows how it is sealed."""
    state = json.loads((folder / "state.json").read_text())
    text = json.dumps(put(state, path, value)).encode()
    (folder / "state.json").write_bytes(text)
    entry = {"name": "state.json", "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    edit_manifest(folder, lambda manifest: manifest["files"].__setitem__(2, entry))


def put(state: Any, path: tuple[str | int, ...], value: object) -> Any:
    inside = state
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return state


def look_through(state: dict[str, Any]) -> None:
    refuse_garbage(Path("step"), CheckpointMetadata.from_dict(state))


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a state, of long lists the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            yield from places(value[index], (*path, index))


KEYS: list[tuple[tuple[str | int, ...], object, str]] = [
    (("random",), {}, "random: no states of generators: KeyError: 'python'"),
    (("random", "torch"), "AAAA", "random: no states of generators"),
    (("random", "torch"), 3, "random: no states of generators"),
    (("random", "python", 1), [1, 2], "random: no states of generators"),
    (("random", "python", 2), "x", "random: no states of generators"),
    (("random", "numpy", "pos"), 10**6, "random: no states of generators"),
    (("random", "numpy", "key"), ["x"], "random: no states of generators"),
    (("plan",), None, "plan: None, expected a mapping"),
    (("plan", "examples"), "many", "plan.examples: 'many', expected a whole number, 1 or more"),
    (("plan", "batch_size"), 0, "plan.batch_size: 0"),
    (("plan", "fingerprint"), "abc", "plan.fingerprint: 'abc'"),
    (("train", "tokens"), "x", "train.tokens: 'x', expected a whole number, 0 or more"),
    (("train", "global_step"), 2, "train.global_step: 2, expected 5"),
    (("train", "best"), {"eval/loss": 3}, "train.best.eval/loss: 3"),
    (
        ("train", "best"),
        {"eval/loss": {"value": 1.0, "step": float("inf")}},
        "train.best.eval/loss.step: inf",
    ),
    (("train", "ranking"), {"x": 1.0}, "train.ranking: 'x' is no step"),
    (("train", "data_shift"), -99, "train.data_shift: -99"),
    (("scheduler",), [], "scheduler: [], expected a mapping"),
    (("scheduler", "last_lr"), [], "scheduler.last_lr: []"),
    (("scheduler", "plateau"), 3, "scheduler.plateau: 3, expected a mapping"),
    (("scaler",), {"scale": "x"}, "scaler.scale: 'x', expected a number"),
    (("optimizer", "state"), [], "optimizer.state: [], expected a mapping"),
    (
        ("optimizer", "state", "transformer.wte.weight"),
        5,
        "optimizer.state.transformer.wte.weight: 5, expected a map",
    ),
    (
        ("optimizer", "state", "transformer.wte.weight", "exp_avg"),
        {"tensor": "none"},
        "optimizer.state.transformer.wte.weight.exp_avg.tensor: 'none', expected a list",
    ),
    (
        ("optimizer", "groups"),
        [{"param_names": 3}],
        "optimizer.groups[0].param_names: 3, expected a list",
    ),
    (("model_config", "id2label"), {"x": "y"}, "model_config.id2label: 'x'"),
    (("model_class",), 5, "model_class: 5, expected a text"),
    (("trainable",), 7, "trainable: 7, expected a list"),
    (("stop",), {"by": "x", "reason": 3, "step": 4}, "stop.reason: 3, expected a text"),
    (
        ("callbacks",),
        {"training.early_stopping_patience": 3},
        "callbacks.training.early_stopping_patience: 3",
    ),
    (
        ("callbacks",),
        {
            "training.early_stopping_patience": {
                "metric": "eval/loss",
                "mode": "min",
                "counter": 1,
                "best": "low",
            }
        },
        "callbacks.training.early_stopping_patience.best: 'low', expected a number",
    ),
]


@pytest.mark.parametrize(("path", "value", "said"), KEYS)
def test_the_key_is_named(
    straight: Straight, path: tuple[str | int, ...], value: object, said: str
) -> None:
    state = json.loads((straight.path / "checkpoints" / "step-00000005" / "state.json").read_text())
    look_through(state)
    with pytest.raises(CheckpointError) as refused:
        look_through(put(state, path, value))
    assert f"step/state.json: {said}" in str(refused.value)
    assert refused.value.exit_code == 4


@pytest.mark.slow
def test_garbage_anywhere_is_refused_or_harmless(straight: Straight) -> None:
    state = json.loads((straight.path / "checkpoints" / "step-00000005" / "state.json").read_text())
    refused = 0
    for path in list(places(state)):
        for value in GARBAGE:
            try:
                look_through(put(copy.deepcopy(state), path, value))
            except (CheckpointError, ValueError):  # the second of what stands in the way of reading
                refused += 1
    assert refused > 500


def test_the_one_before_is_gone_on_from(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 5)
    resealed(run.checkpoint(5), ("random", "python"), "x")
    code, said = go("resume=run/checkpoints/step-00000005")
    assert code == 4
    assert "state.json: random" in said
    for words in (["evaluate", "run"], ["export", "run", "exported"]):
        code, said = go(*words)
        assert code == 4
        assert "state.json: random" in said
    code, said = go("resume=run")
    assert code == 0
    assert "state.json: random" in said
    assert "Passed over" in said
    straight.same(run)


@pytest.mark.slow
def test_no_garbage_is_a_traceback(straight: Straight, go: Go, tmp_path: Path) -> None:
    """A hundred random places, through the whole of a resume."""
    chance = random.Random(0)
    state = json.loads((straight.path / "checkpoints" / "step-00000005" / "state.json").read_text())
    found = [
        path for path in places(state) if path[0] not in ("config", "model_config", "environment")
    ]
    for number in range(100):
        path, value = chance.choice(found), chance.choice(GARBAGE)
        run = straight.cut(tmp_path / f"run{number}", 5)
        resealed(run.checkpoint(5), path, value)
        code, said = go(f"resume=run{number}/checkpoints/step-00000005")
        assert code in (0, 2, 4), f"{path} {value}: {said}"
