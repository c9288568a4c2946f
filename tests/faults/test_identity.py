"""A checkpoint is of one run, of one format; the configuration of a run is what the run wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from optrun.runner.resume.saved_config import read_configuration
from tests.faults.checkpoints import edit_manifest
from tests.faults.runs import STEPS, Go, Straight
from tests.running import optrun, summary


@pytest.fixture(scope="module")
def other(straight: Straight, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run of the same data, whole."""
    path = tmp_path_factory.mktemp("other") / "run"
    assert optrun(*straight.words_with("seed=1"), f"hydra.run.dir={path}") == 0
    return path


def tree(path: Path) -> dict[str, bytes]:
    """Every file but the lock, which is held while one looks."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


# Whose a checkpoint is
# ------------------------------------------------------------------------------------------------


def test_a_run_has_an_identity_and_its_checkpoints_carry_it(
    straight: Straight, other: Path
) -> None:
    own = summary(straight.path)["run_id"]
    assert len(own) == 32
    for folder in sorted((straight.path / "checkpoints").glob("step-*")):
        assert json.loads((folder / "manifest.json").read_text())["run_id"] == own
        assert json.loads((folder / "state.json").read_text())["run_id"] == own
    assert summary(other)["run_id"] != own


def test_a_checkpoint_of_another_run_is_passed_over(
    straight: Straight, go: Go, tmp_path: Path, other: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    shutil.copytree(other / "checkpoints" / "step-00000005", run.checkpoint(5))
    code, said = go("verify", "run")
    assert code == 4
    assert "step-00000005: of another run" in said
    code, said = go("evaluate", "run")
    assert (code, "step 3" in said) == (0, True)
    assert "step-00000005: of another run" in said, "a verb goes back to an older one with a word"
    for words in (
        ["evaluate", "run/checkpoints/step-00000005"],
        ["resume=run/checkpoints/step-00000005"],
    ):
        code, said = go(*words)
        assert (code, "step-00000005: of another run" in said) == (4, True)
    assert run.checkpoint(5).is_dir()
    code, said = go("resume=run")
    assert code == 0
    assert "step-00000005: of another run" in said
    assert "step-00000005 was renamed to foreign-step-00000005-1" in said
    assert "resuming from run/checkpoints/step-00000003" in said
    straight.same(run)


def test_one_that_lies_among_the_older_is_neither_kept_nor_deleted(
    straight: Straight, go: Go, tmp_path: Path, other: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    shutil.rmtree(run.checkpoint(1))
    shutil.copytree(other / "checkpoints" / "step-00000001", run.checkpoint(1))
    assert go("resume=run", "checkpoint.keep_last=1", "checkpoint.keep_best=0")[0] == 0
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == [
        "step-00000001",
        "step-00000006",
    ]


def test_only_foreign_ones_are_nothing_to_go_on_from(
    straight: Straight, go: Go, tmp_path: Path, other: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    for folder in sorted(run.checkpoints.glob("step-*")):
        shutil.rmtree(folder)
    shutil.copytree(other / "checkpoints" / "step-00000005", run.checkpoint(5))
    code, said = go("resume=run")
    assert code == 4
    assert "of another run" in said


def test_a_whole_run_may_be_copied_moved_and_stripped_of_its_summary(
    straight: Straight, go: Go, tmp_path: Path, other: Path
) -> None:
    run = straight.cut(tmp_path / "elsewhere" / "run", 3)
    shutil.move(run.path, tmp_path / "moved")
    run = RunDir(tmp_path / "moved")
    run.summary.unlink()
    assert go("resume=moved")[0] == 0
    straight.same(run)
    assert summary(run.path)["run_id"] == summary(straight.path)["run_id"]
    # With checkpoints of two runs and nothing that says which this is, none is guessed.
    run.summary.unlink()
    shutil.copytree(
        other / "checkpoints" / "step-00000005",
        tmp_path / "moved" / "checkpoints" / "step-00000007",
    )
    before = tree(run.path)
    edit_manifest(run.checkpoint(7), lambda manifest: manifest.update(step=7))
    before = tree(run.path)
    code, said = go("resume=moved", "training.max_steps=8")
    assert code == 4
    assert "checkpoints of 2 runs" in said
    assert tree(run.path).keys() == before.keys()


# Formats
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "sealed", "number"), [(3, True, 7), (3, False, 2), (2, True, 2), (2, False, 7)]
)  # of the newest checkpoint, and of an earlier one
def test_another_format_is_refused_untouched(
    straight: Straight, go: Go, tmp_path: Path, step: int, sealed: bool, number: int
) -> None:
    """Another optrun may seal in another way: the number alone decides, and it is read first."""
    run = straight.cut(tmp_path / "run", 3)
    if sealed:
        edit_manifest(run.checkpoint(step), lambda manifest: manifest.update(format=number))
    else:
        path = run.checkpoint(step) / "manifest.json"
        path.write_text(json.dumps({"format": number, "files": "elsewhere"}))
    before = tree(run.path)
    named = ["evaluate", "export"] if step == 3 else []
    for words in (
        ["resume=run"],
        ["verify", "run"],
        *([verb, "run", *["to"] * (verb == "export")] for verb in named),
    ):
        code, said = go(*words)
        assert code == 4
        assert f"{step:08d}" in said
        assert f"format {number}, and this optrun reads format 4. Nothing was changed" in said
    after = tree(run.path)
    assert {name for name in before if before[name] != after.get(name)} <= {"optrun.log"}
    assert set(after) - set(before) <= {"optrun.log"}


def test_a_newer_summary_is_refused_untouched(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 3)
    run.summary.write_text(json.dumps({**json.loads(run.summary.read_text()), "format": 9}))
    before = tree(run.path)
    for words in (["resume=run"], ["evaluate", "run"], ["resume=latest", "hydra.run.dir=run"]):
        code, said = go(*words)
        assert code == 4
        assert "summary.json: format 9, and this optrun reads format" in said
    assert {name for name, content in tree(run.path).items() if before.get(name) != content} <= {
        "optrun.log"
    }
    code, said = go("report", "run")
    assert code == 0
    assert "format 9, and this optrun reads format" in " ".join(said.split())


# The configuration
# --------------------------------------------------------------------------------------------------


def swap(run: RunDir, before: str, after: str) -> None:
    text = run.config.read_text()
    assert before in text
    run.config.write_text(text.replace(before, after, 1))


def test_an_interpolation_is_refused_and_never_resolved(
    straight: Straight, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    run = straight.cut(tmp_path / "run", 3)
    swap(run, "run_name: null", "run_name: ${oc.env:SECRET}")
    for words in (["resume=run"], ["resume=run", "run_name=mine"]):
        code, said = go(*words)
        assert code == 2
        assert "run_name holds `${`" in said
    code, said = go("report", "run")
    assert (code, "run_name holds" in " ".join(said.split())) == (0, True)
    assert go("evaluate", "run")[0] == 0  # reads what the checkpoint holds
    path = run.checkpoint(3) / "state.json"
    path.write_text(path.read_text().replace('"run_name": null', '"run_name": "${oc.env:SECRET}"'))
    for words in (["evaluate", "run/checkpoints/step-00000003"],):
        assert go(*words)[0] == 4
    assert not [name for name, content in tree(tmp_path).items() if b"hunter2" in content]


def test_an_interpolation_in_a_state_that_was_sealed_anew(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    import hashlib

    run = straight.cut(tmp_path / "run", 3)
    path = run.checkpoint(3) / "state.json"
    text = path.read_text().replace('"run_name": null', '"run_name": "${oc.env:HOME}"')
    path.write_text(text)
    entry = {
        "name": "state.json",
        "size": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    edit_manifest(
        run.checkpoint(3),
        lambda manifest: manifest.update(
            files=[entry if file["name"] == "state.json" else file for file in manifest["files"]]
        ),
    )
    for words in (["evaluate", "run"], ["resume=run"]):
        run.config.unlink(missing_ok=True)
        code, said = go(*words)
        assert code == 2
        assert "run_name holds `${`" in said
        assert os.environ["HOME"] not in said.replace(str(tmp_path), "")


@pytest.mark.parametrize("recorded", [True, False])
def test_an_edited_value_is_refused_unless_it_is_on_the_command_line(
    straight: Straight, go: Go, tmp_path: Path, recorded: bool
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    if not recorded:  # as before the summary knew the file
        values = json.loads(run.summary.read_text())
        del values["config_sha256"]
        run.summary.write_text(json.dumps(values))
    swap(run, "lr: 0.002\n", "lr: 0.01\n")
    before = tree(run.path)
    for words in ([], ["run_name=mine"]):
        code, said = go("resume=run", *words)
        assert code == 2
        for piece in ("config.yaml", "lr=0.01", "0.002", "command line"):
            assert piece in said
    assert tree(run.path) == before
    code, said = go("resume=run", "lr=0.002")
    assert code == 0
    straight.same(run)


def test_an_edited_value_given_on_the_command_line_is_a_change(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    swap(run, "lr: 0.002\n", "lr: 0.01\n")
    code, said = go("resume=run", "lr=0.01")
    assert code == 0
    assert "0.002 -> 0.01" in said
    assert summary(run.path)["resumes"][-1]["changes"] == {"lr": [0.002, 0.01]}


def test_a_change_that_was_killed_before_its_first_save_goes_on(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    """The file is newer than every checkpoint then, and the summary knows that the run wrote it."""
    run = straight.cut(tmp_path / "run", 3)
    assert go("resume=run", "lr=0.01")[0] == 0
    for step in range(4, STEPS + 1):
        shutil.rmtree(run.checkpoint(step))
    for pointer in (run.best, run.last):
        pointer.unlink(missing_ok=True)
    run.summary.write_text(json.dumps({**json.loads(run.summary.read_text()), "status": "running"}))
    code, _ = go("resume=run")
    assert code == 0
    assert json.loads((run.checkpoint(STEPS) / "state.json").read_text())["config"]["lr"] == 0.01


@pytest.mark.parametrize("harm", ["deleted", "half"])
def test_a_lost_configuration_is_taken_from_the_newest_checkpoint(
    straight: Straight, go: Go, tmp_path: Path, harm: str
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    whole, values = run.config.read_bytes(), read_configuration(run)[0]
    bomb = b"a: &a [x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (n + 1, n + 1, b"*%c," % n * 9) for n in range(97, 109)
    )
    for content in (b"", b"a: [\x00", bomb):
        run.config.write_bytes(content)
        taken, note = read_configuration(run)
        assert taken == values
        assert "configuration was taken from" in str(note)
    run.config.write_bytes(whole[: len(whole) // 2]) if harm == "half" else run.config.unlink()
    code, said = go("resume=run")
    assert code == 0
    line = " ".join(said.split())
    assert "config.yaml" in line
    assert "configuration was taken from run/checkpoints/step-00000003, and is written back" in line
    assert run.config.read_bytes() == whole
    straight.same(run)


def test_without_a_checkpoint_nothing_is_guessed(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 1)
    shutil.rmtree(run.checkpoints)
    run.metrics.unlink()
    swap(run, "lr: 0.002\n", "lr: 0.01\n")
    code, said = go("resume=auto", "hydra.run.dir=run")
    assert (code, "changed since the run wrote it" in said) == (2, True)
    run.config.unlink()
    code, said = go("resume=auto", "hydra.run.dir=run")
    assert (code, "There is no checkpoint to take the configuration from" in said) == (2, True)
