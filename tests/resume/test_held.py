"""A run that trains on deletes checkpoints beside those who read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.artifacts.retention import Retention
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import CheckpointError
from optrun.runner.resume import target
from tests.running import TINY_GPT, optrun, write_text


def test_a_checkpoint_that_goes_between_being_chosen_and_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of those that are left is taken, and the retention leaves it while it is read."""
    run = RunDir(tmp_path / "run")
    given = [
        *TINY_GPT,
        "data=files",
        f"data.train={write_text(tmp_path, 60)}",
        "training.max_steps=3",
    ]
    every = ["checkpoint.save_steps=1", "checkpoint.keep_last=3", "training.device=cpu"]
    assert optrun(*given, *every, f"hydra.run.dir={run.path}") == 0
    choose, gone = target.checkpoint_of, [run.checkpoint(2), run.checkpoint(3)]

    def chosen(path: str, key: str = "") -> tuple[RunDir, Path]:
        found = choose(path, key)
        if gone:
            gone.pop().rename(tmp_path / f"aside-{len(gone)}")
            if gone:
                raise CheckpointError(
                    "damaged"
                )  # it went while it was looked through; the other one a moment later
        return found

    monkeypatch.setattr(target, "checkpoint_of", chosen)
    with target.held_checkpoint(str(run.path)) as (_, folder):
        assert folder == run.checkpoint(1)
        (tmp_path / "aside-1").rename(run.checkpoint(3))
        assert Retention(run, keep_last=1)(keep=[]) == []
    assert Retention(run, keep_last=1)(keep=[]) == [folder]
    run.checkpoint(3).joinpath("model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError), target.held_checkpoint(str(run.path)):
        pass
