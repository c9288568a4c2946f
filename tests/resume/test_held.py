"""A run that trains on deletes checkpoints beside those who read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.artifacts.forks import deleting
from optrun.artifacts.retention import Retention
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.target import Target, locate
from optrun.base.errors import CheckpointError
from tests.running import TINY_GPT, optrun, write_text


def test_a_checkpoint_that_goes_between_being_chosen_and_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    choose, gone = Target.complete_checkpoint, [run.checkpoint(2), run.checkpoint(3)]

    def chosen(target: Target) -> Path:
        found = choose(target)
        if gone:
            gone.pop().rename(tmp_path / f"aside-{len(gone)}")
            if gone:
                raise CheckpointError(
                    "damaged"
                )  # it went while it was looked through; the other one a moment later
        return found

    monkeypatch.setattr(Target, "complete_checkpoint", chosen)
    with locate(str(run.path)).locked_checkpoint() as folder:
        assert folder == run.checkpoint(1)
        capsys.readouterr()
        (tmp_path / "aside-1").rename(run.checkpoint(3))
        run.best.write_text(f"{run.checkpoint(1).name}\n")
        assert locate(str(run.path)).complete_checkpoint() == run.checkpoint(3)
        said = capsys.readouterr().err
        assert f"{run.checkpoint(3).name} is the newest checkpoint; the best is {run.best}" in said
        assert locate(str(run.best)).complete_checkpoint() == run.checkpoint(1)
        assert capsys.readouterr().err == ""
        assert Retention(run, keep_last=1).delete_expired(keep=[]) == []
    assert Retention(run, keep_last=1).delete_expired(keep=[]) == [folder]
    run.checkpoint(3).joinpath("model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError), locate(str(run.path)).locked_checkpoint():
        pass


def test_an_error_while_a_checkpoint_is_deleted_is_raised_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    with pytest.raises(CheckpointError, match="from the block"), deleting(tmp_path):
        raise CheckpointError("from the block")
