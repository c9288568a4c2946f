"""Nothing that optrun did not write is deleted or written over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optrun.artifacts.async_writer import AsyncWriter, SaveRequest
from optrun.artifacts.checkpoint import make_checkpoints_dir
from optrun.artifacts.retention import Retention, clean_leftovers
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import StorageError
from optrun.launch.single_run import forget_unbegun
from optrun.runner.folders import temporary_folder_of, write_through_temporary
from tests.faults.checkpoints import snapshot
from tests.faults.runs import Go, Straight

PACKAGE = Path(__file__).parents[2] / "optrun"
DELETES = re.compile(r"\brmtree\(|\.unlink\(|\brmdir\b|\bremove_folder\(|os\.remove\(|os\.rmdir\(")
PLACES = {
    "artifacts/atomic.py": "files aside and folders that a caller names",
    "artifacts/checkpoint.py": "its own folder aside, named after the process",
    "artifacts/retention.py": "leftovers by name; checkpoints of this run that are whole",
    "cli/certify_resume.py": "the temporary folder of its trials",
    "cli/confirm_sweep.py": "the record of a confirmation that did not begin",
    "data/cache.py": "folders of the cache",
    "data/reading.py": "its temporary folder",
    "launch/single_run.py": "what a refused start wrote, by name",
    "runner/folders.py": "its own folder aside; model/ and tokenizer/ of the run; an empty folder",
    "runner/resume/checkpoint.py": "best and last of the run",
    "sweeper/driver.py": "files of .sweep/ that a launch was told by",
    "sweeper/folder.py": "files of .sweep/",
    "training/nonfinite.py": "the batch of an earlier report of the same step",
}
"""Every module that deletes, and what; a new one has to say so here."""


def test_every_place_that_deletes_is_known() -> None:
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if DELETES.search(path.read_text())
    }
    assert modules <= PLACES.keys(), sorted(modules - PLACES.keys())


def other_hydra_program(folder: Path, job: str = "my_app") -> dict[Path, str]:
    """Files of another program that uses Hydra, by path."""
    files = {
        folder / ".hydra" / "config.yaml": "mine: config\n",
        folder / ".hydra" / "hydra.yaml": f"hydra:\n  job:\n    name: {job}\n",
        folder / ".hydra" / "overrides.yaml": "- mine\n",
        folder / "logs" / "mine.txt": "three weeks of numbers\n",
    }
    return written(files)


def written(files: dict[Path, str]) -> dict[Path, str]:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return files


def unchanged(files: dict[Path, str]) -> bool:
    return all(path.is_file() and path.read_text() == text for path, text in files.items())


@pytest.mark.parametrize("without", ["", "logs/mine.txt", ".hydra/hydra.yaml"])
@pytest.mark.parametrize("how", ["refused", "good", "resume=auto"])
def test_a_folder_of_another_hydra_program_is_refused_and_stays(
    straight: Straight, go: Go, tmp_path: Path, how: str, without: str
) -> None:
    files = other_hydra_program(tmp_path / "other")
    if without:
        path = tmp_path / "other" / without
        path.unlink()
        del files[path]
    more = {"refused": ["data.train=nowhere.txt"], "good": [], "resume=auto": ["resume=auto"]}[how]
    code, said = go(*straight.words_with(*more), "hydra.run.dir=other")
    assert code in (2, 4), said
    assert unchanged(files)


def test_a_refused_start_leaves_what_it_did_not_write(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    ours = {run.hydra / "config.yaml": "", run.logs / "rank-1.log": "", run.log: "", run.lock: ""}
    theirs = {run.hydra / "mine.yaml": "1", run.logs / "mine.txt": "2", run.path / "notes": "3"}
    written(ours)
    written(theirs)
    forget_unbegun(run)
    assert unchanged(theirs)
    assert not any(path.exists() for path in ours)


def test_leftovers_and_retention_leave_what_is_not_ours(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_checkpoints_dir(run)
    theirs = written(
        {
            run.path / ".model-mine" / "x": "1",
            run.path / ".notes.77.tmp": "2",
            run.checkpoints / "notes.txt": "3",
            run.checkpoints / "step-00000000" / "model.safetensors": "4",
            run.checkpoints / "my-step-00000001" / "x": "5",
            run.extra / "x": "6",
        }
    )
    writer = AsyncWriter(run, Retention(run, keep_last=1))
    for step in (1, 2):
        writer.start(SaveRequest(snapshot(step), [], 0, [], lambda: None))
        result = writer.result(wait=True)
        assert result is not None
        assert result.error is None
    clean_leftovers(run)
    assert not run.checkpoint(1).exists()
    assert unchanged(theirs)


def test_a_command_writes_over_no_file(go: Go, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text("mine")
    for kind in ("resume", "optimizer", "transfer"):
        words = ["dialect=timm", "optimizer=lamb"] if kind == "optimizer" else []
        code, said = go("certify", kind, *words, "--out", "mine.json")
        assert code == 2, said
        assert "mine.json" in said
        assert mine.read_text() == "mine"


def test_a_folder_that_stands_where_one_is_written_aside_stays(tmp_path: Path) -> None:
    own = written({temporary_folder_of(tmp_path / "model") / "mine.txt": "three weeks of numbers"})
    with (
        pytest.raises(StorageError, match="File exists"),
        write_through_temporary(tmp_path / "model"),
    ):
        pass
    assert {path: path.read_text() for path in own} == own
