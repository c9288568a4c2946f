"""What lies at a path that a person typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.target import locate
from optrun.base.errors import CheckpointError, ConfigError


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of one run that has one checkpoint and a model."""
    run = RunDir(tmp_path / "sweep" / "0")
    for folder in (run.checkpoint(3), run.model):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    run.summary.write_text("{}")
    run.best.write_text("step-00000003\n")
    (run.checkpoints / "step-00000004").symlink_to(run.checkpoint(3))
    return tmp_path / "sweep"


def test_every_kind_of_path(sweep: Path) -> None:
    checkpoint = "0/checkpoints/step-00000003"
    kinds = {
        "0": "run",
        "0/checkpoints": "run",
        "0/checkpoints/best": "checkpoint",
        checkpoint: "checkpoint",
        "0/model": "model",
        "0/summary.json": "other",
        ".": "other",
    }
    assert {name: locate(str(sweep / name)).kind for name in kinds} == kinds
    for name in ("0", "0/checkpoints", checkpoint):
        assert locate(str(sweep / name)).run.path == sweep / "0"
    assert locate(str(sweep / "0/checkpoints/best")).checkpoint == sweep / checkpoint
    assert locate(str(sweep / "0")).checkpoint is None
    for name in ("0", "."):
        assert locate(str(sweep / name)).runs_folder == sweep / name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "Name one of the runs in it: .*/sweep/0"),
        ("0/model", "weights alone"),
        ("0/summary.json", "neither a run directory nor a checkpoint"),
    ],
)
def test_what_is_no_run(sweep: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^resume={sweep / name}: .*{message}"):
        _ = locate(str(sweep / name), "resume=").run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0/checkpoints/best", "a checkpoint. Name its run: .*/sweep/0"),
        ("0/model", "neither a run directory nor a folder of runs"),
        ("0/summary.json", "neither a run directory nor a folder of runs"),
    ],
)
def test_what_is_no_folder_of_runs(sweep: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = locate(str(sweep / name)).runs_folder


def test_a_pointer_that_cannot_be_read(sweep: Path) -> None:
    """`best` with bytes of no text names no checkpoint: it is a file like any other."""
    best = sweep / "0/checkpoints/best"
    best.write_bytes(b"step-\xff\n")
    assert locate(str(best)).kind == "other"
    with pytest.raises(ConfigError, match=f"^resume={best}: neither a run directory nor"):
        _ = locate(str(best), "resume=").run


def test_nothing_there_and_a_link(sweep: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such directory \(looked from .*Did you mean"):
        locate(str(sweep / "1"))
    with pytest.raises(ConfigError, match="Only resume=latest finds the last run"):
        locate("latest")
    with pytest.raises(CheckpointError, match="a link"):
        locate(str(sweep / "0/checkpoints/step-00000004"))
