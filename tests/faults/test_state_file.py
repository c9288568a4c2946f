"""Garbage in `state.json` under checksums that are right: refused by key, never a traceback."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import CheckpointError
from optrun.runner.resume.state_file import refuse_invalid_state
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
    refuse_invalid_state(Path("step"), CheckpointMetadata.from_dict(state))


KEYS: list[tuple[tuple[str | int, ...], object, str]] = [
    (("random",), {}, "random: no states of generators: KeyError: 'python'"),
    (("random", "torch"), "AAAA", "random: no states of generators"),
    (("random", "torch"), 3, "random: no states of generators"),
    (("random", "python", 1), [1, 2], "random: no states of generators"),
    (("random", "python", 2), "x", "random: no states of generators"),
    (("random", "numpy", "pos"), 10**6, "random: no states of generators"),
    (("random", "numpy", "key"), ["x"], "random: no states of generators"),
    (("plan",), None, "plan: None, expected dict"),
    (("scheduler",), [], "scheduler: [], expected dict"),
    (("model_class",), 5, "model_class: 5, expected str"),
    (("trainable",), 7, "trainable: 7, expected list"),
    (("plugins",), [3], "plugins: no list of records"),
]


def test_a_missing_key_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"step/state\.json: train: missing"):
        look_through({"global_step": 5})


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
