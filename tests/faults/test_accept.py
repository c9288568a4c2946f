"""`optrun verify RUN --accept FILE`: one file is taken as it is, on record.

Nothing advises to delete a manifest.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optrun.artifacts.lock import RunLock
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import read_run_manifest
from tests.faults.runs import Go, Straight


@pytest.fixture
def run(straight: Straight, tmp_path: Path) -> RunDir:
    """A copy of the undisturbed run, finished."""
    shutil.copytree(straight.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def change_summary(run: RunDir) -> None:
    run.summary.write_text(
        json.dumps(
            {
                **(known := json.loads(run.summary.read_text())),
                "note": known.get("note", "") + "mine",
            }
        )
    )


def test_a_changed_file_is_sealed_anew_with_a_record(run: RunDir, go: Go) -> None:
    change_summary(run)
    assert go("verify", "run")[0] == 4
    code, said = go("verify", "run", "--accept", "summary.json")
    assert code == 0, said
    assert "summary.json: accepted at" in said
    sealed = read_run_manifest(run)
    assert sealed is not None
    (record,) = sealed.accepted
    assert record.by == "optrun verify run --accept summary.json"
    assert record.was != record.now == sealed.entries["summary.json"].hexdigest
    assert go("export", "run", "exported")[0] == 0
    assert go("resume=run", "training.max_steps=7")[0] == 0
    code, said = go("verify", "run")
    assert code == 0
    assert "summary.json: accepted at" in said


@pytest.mark.parametrize("given", ["curves.txt", "run/curves.txt", "./curves.txt"])
def test_a_new_file_and_one_that_is_gone(run: RunDir, go: Go, given: str) -> None:
    (run.path / "curves.txt").write_text("mine")
    run.curves.unlink(missing_ok=True)
    run.samples.unlink(missing_ok=True)
    assert go("verify", "run")[0] == 4
    code, said = go("verify", "run", "--accept", given)
    assert "curves.txt: accepted at" in said
    missing = [name for name in ("samples.jsonl",) if f"{name}: missing" in said]
    for name in missing:
        code, said = go("verify", "run", "--accept", name)
    assert code == 0, said
    for name in missing:
        assert f"{name}: accepted at" in said
        assert "is none" in said


def test_damage_in_a_line_of_the_metrics_goes_on_after_it_was_accepted(run: RunDir, go: Go) -> None:
    run.metrics.write_text(run.metrics.read_text().replace('"train/loss": ', '"train/loss": 1', 1))
    code, said = go("resume=run", "training.max_steps=7")
    assert code == 4
    assert "optrun verify run --accept metrics.jsonl" in said
    assert go("verify", "run", "--accept", "metrics.jsonl")[0] == 0
    assert go("resume=run", "training.max_steps=7")[0] == 0
    assert go("verify", "run")[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "facts"),
    [
        ("checkpoints/step-00000006/model.safetensors", 4, ["weights", "Restore it"]),
        ("checkpoints/step-00000006/manifest.json", 4, ["weights", "Restore it"]),
        ("model/model.safetensors", 4, ["weights", "optrun export"]),
        ("config.yaml", 2, ["nothing to accept"]),
        ("run_manifest.json", 2, ["nothing to accept"]),
        ("sumary.json", 2, ["no such file"]),
        ("tokenizer", 2, ["a folder; expected a file"]),
        ("../corpus.txt", 2, ["expected a file of"]),
        ("/etc/passwd", 2, ["expected a file of"]),
    ],
)
def test_what_is_not_accepted(run: RunDir, go: Go, name: str, code: int, facts: list[str]) -> None:
    before = run.manifest.read_bytes()
    found, said = go("verify", "run", "--accept", name)
    assert found == code, said
    for fact in (Path(name).name, *facts):
        assert fact in " ".join(said.split())
    assert run.manifest.read_bytes() == before


def test_one_run_and_nobody_at_work(run: RunDir, go: Go) -> None:
    change_summary(run)
    code, said = go("verify", "run/checkpoints/step-00000006", "--accept", "summary.json")
    assert (code, "expected one run directory" in " ".join(said.split())) == (2, True)
    with RunLock(run.lock):
        assert go("verify", "run", "--accept", "summary.json")[0] == 5
    run.summary.unlink()
    run.summary.symlink_to("/dev/zero")
    code, said = go("export", "run", "exported")
    assert (code, "--accept" in said) == (4, False)
    code, said = go("verify", "run", "--accept", "summary.json")
    assert code == 4
    assert "a link" in said


def test_nothing_is_published_without_its_tokenizer(run: RunDir, go: Go) -> None:
    """The way that was advised once: the tokenizer goes, then the manifest."""
    shutil.rmtree(run.tokenizer)
    for words in (["export", "run", "exported"], ["evaluate", "run"]):
        code, said = go(*words)
        assert code == 4
        assert "tokenizer.json: missing" in said
        assert "--accept" not in said
        assert "remove" not in said
    code, said = go("verify", "run", "--accept", "tokenizer/tokenizer.json")
    assert code == 4
    assert "Restore it from a copy" in said
    run.manifest.unlink()
    for _ in range(2):  # without a manifest, and with one that was accepted
        code, said = go("export", "run", "exported")
        assert code == 4
        assert "tokenizer: missing" in said
        assert "resume=run" in said
        assert not Path("exported").exists()
        said = go("verify", "run", "--accept", "run_manifest.json")[1]
        assert "accepted at" in said or "nothing to accept" in said
    assert go("resume=run", "training.max_steps=7")[0] == 0
    assert go("export", "run", "exported")[0] == 0
    assert (Path("exported") / "tokenizer.json").is_file()


@pytest.mark.parametrize("content", [None, b"[" * 100_000])
def test_a_manifest_that_is_lost_is_accepted_with_all_files(
    run: RunDir, go: Go, content: bytes | None
) -> None:
    change_summary(run)
    run.manifest.unlink()
    if content is not None:
        run.manifest.write_bytes(content)
        code, said = go("export", "run", "exported")
        assert code == 4
        assert "optrun verify run --accept run_manifest.json" in said
    code, said = go("verify", "run", "--accept", "summary.json")
    assert code == 4
    assert "run_manifest.json" in said
    code, said = go("verify", "run", "--accept", "run_manifest.json")
    assert code == 0, said
    assert "run_manifest.json: accepted at" in said
    assert "not covered yet" not in said
    assert "none" not in said.replace("nothing reads it again", "")
    change_summary(run)
    code, said = go("verify", "run")
    assert (code, "summary.json: " in said) == (4, True)
    assert go("verify", "run", "--accept", "summary.json")[0] == 0
    assert go("resume=run", "training.max_steps=7")[0] == 0
    assert go("verify", "run")[0] == 0
