"""What is read again is covered: what is flipped, deleted, added or cut is named.

What a kill leaves is no damage.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.artifacts import run_manifest
from optrun.artifacts.async_writer import AsyncWriter, Order
from optrun.artifacts.atomic import replace_text
from optrun.artifacts.manifest import seal
from optrun.artifacts.metrics import MetricsWriter, take_up
from optrun.artifacts.retention import clean_leftovers
from optrun.artifacts.run_check import check_run, problems_of
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import UNREAD, RunManifest, matches, read_run_manifest, recorded
from optrun.base.errors import CheckpointError, LockedError
from optrun.cli.verify import examine
from tests.faults.checkpoints import snapshot
from tests.faults.runs import Go, Straight
from tests.faults.syscalls import deaths
from tests.running import summary


@pytest.fixture
def run(straight: Straight, tmp_path: Path) -> RunDir:
    """A copy of the undisturbed run, finished."""
    shutil.copytree(straight.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


# Damage
# -------------------------------------------------------------------------------------------------------------


def wrong_with(run: RunDir) -> str:
    """What `optrun verify` finds."""
    found = problems_of(run)
    for folder in sorted(run.checkpoints.glob("step-*")):
        found += examine(folder).problems
    return "\n".join(found)


def harmed(run: RunDir, chance: random.Random) -> tuple[Path, Callable[[], object]]:
    """Do something to one file of a run; the file, and what undoes it."""
    files = sorted(path for path in run.path.rglob("*") if path.is_file())
    files = [path for path in files if not matches(path.relative_to(run.path).as_posix(), UNREAD)]
    how = chance.choice(["flip", "flip", "flip", "delete", "add", "cut", "longer"])
    path = chance.choice(
        [path for path in files if path.stat().st_size or how in ("delete", "add")]
    )
    if how == "add":
        path = path.with_name(
            chance.choice(["notes.txt", ".hidden", f"{path.name}.bak", "model-00002.safetensors"])
        )
        path.write_bytes(chance.randbytes(chance.randrange(3)))
        return path, path.unlink
    content = path.read_bytes()
    place = chance.randrange(len(content)) if content else 0
    if how == "flip":
        path.write_bytes(
            content[:place]
            + bytes([content[place] ^ 1 << chance.randrange(8)])
            + content[place + 1 :]
        )
    elif how == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:place] if how == "cut" else content + content[-1:])
    return path, lambda: path.write_bytes(content)


def find_all(run: RunDir, places: int) -> None:
    chance = random.Random(0)
    assert wrong_with(run) == ""
    for place in range(places):
        path, undo = harmed(run, chance)
        assert str(path) in wrong_with(run), f"place {place}: {path}"
        undo()
    assert wrong_with(run) == ""


def test_twenty_random_places_are_found(run: RunDir) -> None:
    find_all(run, 20)


@pytest.mark.slow
def test_five_hundred_random_places_are_found(run: RunDir) -> None:
    find_all(run, 500)


def test_verify_says_it(run: RunDir, go: Go) -> None:
    code, said = go("verify", "run")
    assert code == 0
    assert "model/model.safetensors" in said
    (run.model / "model.safetensors").write_bytes(b"")
    (run.tokenizer / "added.json").write_text("{}")
    run.samples.unlink(missing_ok=True)
    run.best.unlink()
    code, said = go("verify", "run")
    assert code == 4
    for named in (
        "model/model.safetensors: 0 bytes",
        "tokenizer/added.json: added",
        "checkpoints/best: missing",
    ):
        assert named in said


def test_a_manifest_that_is_gone_is_missed(run: RunDir, go: Go) -> None:
    run.manifest.unlink()
    code, said = go("verify", "run")
    assert code == 4
    assert "run_manifest.json: missing" in said


def test_a_manifest_that_is_gone_with_the_summary_is_missed(run: RunDir) -> None:
    run.manifest.unlink()
    run.summary.unlink()
    assert "run_manifest.json: missing" in wrong_with(run)


@pytest.mark.parametrize(
    "name", ["report.html", "report.csv", "report-train-loss.png", "report-basin.csv"]
)
def test_what_a_killed_report_leaves_is_no_damage_and_goes(run: RunDir, name: str) -> None:
    left = run.path / f".{name}.4242.tmp"
    left.write_text("half")
    assert wrong_with(run) == ""
    assert clean_leftovers(run) == [left.name]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"format": 2}', b"[" * 100_000, b"\xff"]
)
def test_a_manifest_of_another_kind(run: RunDir, content: bytes) -> None:
    run.manifest.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run_manifest\.json: "):
        read_run_manifest(run)
    assert "run_manifest.json" in wrong_with(run)


def test_what_a_killed_run_wrote_last_is_not_covered_and_no_damage(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    code, said = go("verify", "run")
    assert code == 0
    assert "bytes are not covered yet" in said
    assert "not covered yet: written after the last seal" in said
    content = run.metrics.read_bytes()
    run.metrics.write_bytes(content.replace(b'"step": 2', b'"step": 9'))
    code, said = go("verify", "run")
    assert code == 4
    assert "metrics.jsonl: its first" in said


def test_a_manifest_that_covered_more_is_read(run: RunDir, go: Go) -> None:
    """One that also lists logs and curves, and names both contents of a file that was being replaced."""
    values = json.loads(run.manifest.read_text())
    values.pop("sha256")
    (metrics,) = (entry for entry in values["files"] if entry["name"] == "metrics.jsonl")
    metrics["becomes"] = [1, "0" * 64]
    values["files"].append({"name": "optrun.log", "size": 1, "sha256": "0" * 64, "grows": True})
    run.manifest.write_text(json.dumps({**values, "sha256": seal(values)}, indent=1) + "\n")
    code, said = go("verify", "run")
    assert code == 0, said
    assert "metrics.jsonl: not covered yet" in said
    assert go("resume=run", "training.max_steps=7")[0] == 0
    covered = read_run_manifest(run)
    assert covered is not None
    assert covered.entries["metrics.jsonl"].size == run.metrics.stat().st_size
    assert problems_of(run) == []


# What commands do afterwards
# ----------------------------------------------------------------------------------------


def test_what_optrun_does_later_is_no_damage(run: RunDir, go: Go) -> None:
    for words in (
        ["report", "run"],
        ["export", "run", "run/exported"],
        ["evaluate", "run"],
        ["resume=run"],
        ["resume=run", "lr=1e-4"],
        ["resume=run", "training.max_steps=8", "checkpoint.keep_last=2"],
        ["resume=run/checkpoints/step-00000007", "training.max_steps=9"],
    ):
        code, said = go(*words)
        assert code == (2 if "lr=1e-4" in words else 0), said
        code, said = go("verify", "run")
        assert code == 0, f"{words}: {said}"
    covered = read_run_manifest(run)
    assert covered is not None
    assert {"exported/model.safetensors", "exported/README.md"} <= covered.entries.keys()
    assert not covered.entries.keys() & {"report.html", "optrun.log", "curves.png", ".lock"}
    (run.path / "exported" / "README.md").write_text("mine")
    assert go("verify", "run")[0] == 4


def test_damage_is_not_sealed_anew(run: RunDir, go: Go) -> None:
    """What a later start does not write itself stays what it was sealed as."""
    (run.hydra / "notes").write_text("mine")
    (run.model / "README.md").write_text("mine")
    run.best.write_bytes(b"mine")
    assert go("report", "run")[0] == 0
    assert go("resume=run", "lr=1e-4")[0] == 2
    code, said = go("verify", "run")
    assert code == 4
    for name in (".hydra/notes", "model/README.md", "checkpoints/best"):
        assert f"run/{name}: " in said


def test_a_command_beside_a_running_run_waits_for_no_lock(run: RunDir, tmp_path: Path) -> None:
    from optrun.artifacts.lock import RunLock

    with RunLock(run.lock):
        with recorded(run.summary):
            run.summary.write_text("")
        with pytest.raises(LockedError), recorded(run.path / "exported"):
            pass
    with recorded(tmp_path / "elsewhere"):
        pass


# Kills
# --------------------------------------------------------------------------------------------------------------


def a_start(run: RunDir, step: int) -> None:
    """Everything that a start of a run does to its directory, but training."""
    sealed = read_run_manifest(run)
    manifest = RunManifest(run, sealed)
    manifest.seal()
    clean_leftovers(run)
    manifest.replace(run.config, f"step: {step}\n".encode())
    with manifest.rewriting("tokenizer/*"):
        shutil.rmtree(run.tokenizer, ignore_errors=True)
        run.tokenizer.mkdir()
        replace_text(run.tokenizer / "tokenizer.json", "{}")
    take_up(run.metrics, step - 1, manifest.replace)
    saver = AsyncWriter(manifest, keep_last=1)
    with MetricsWriter(run.metrics) as metrics:
        for at in (step, step + 1):
            metrics.write(
                {"step": at, "train/loss": 1 / at, "unscheduled": ["eval/"], "eval/loss": 2.0}
            )
            replace_text(run.summary, f'{{"step": {at}}}')
            saver.start(Order(snapshot(at), [at], 1, [], metrics.sync))
            result = saver.result(wait=True)
            assert result is not None
            assert result.error is None
    manifest.close()


def begun(folder: Path) -> RunDir:
    run = RunDir(folder)
    run.hydra.mkdir(parents=True)
    run.checkpoints.mkdir()
    (run.hydra / "overrides.yaml").write_text("[]")
    run.log.write_text("begun\n")
    return run


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("second", [False, True])
def test_death_at_every_call_is_no_damage(memory_path: Path, second: bool, every: int) -> None:
    """In a first start and in one that goes on.

    Verify finds nothing wrong, and the next start covers all again.
    """
    whole = begun(memory_path / "whole")
    if second:
        a_start(whole, 1)
    left = deaths(whole.path, lambda: a_start(whole, 3 if second else 1), memory_path, every)
    assert len(left) > 79 // every
    for run in map(RunDir, left):
        assert wrong_with(run) == "", f"call {run.path.name}"
        a_start(run, 3)
        assert wrong_with(run) == "", f"after call {run.path.name}"
        assert check_run(run).open.keys() == {"optrun.log"}, f"after call {run.path.name}"


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's seal costs as much as what was written since the last, however large the run is."""
    run = begun(tmp_path / "run")
    a_start(run, 1)
    manifest = RunManifest(run, read_run_manifest(run))
    manifest.seal()
    read: list[str] = []
    original = run_manifest.open_file

    def counted(path: Path) -> object:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(run_manifest, "open_file", counted)
    with run.metrics.open("a") as file:
        file.write('{"step": 9}\n')
    read.clear()
    manifest.seal()
    assert read == ["metrics.jsonl"]


# What is read is checked
# --------------------------------------------------------------------------------------------


def doubled(lines: list[str]) -> list[str]:
    return [*lines, lines[-1]]


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "deleted": lambda lines: lines[:2] + lines[3:],
    "doubled": doubled,
    "edited": lambda lines: [
        lines[0],
        lines[1].replace('"train/loss": 5', '"train/loss": 4'),
        *lines[2:],
    ],
    "emptied": lambda lines: [],
}


@pytest.mark.parametrize("how", EDITS)
def test_a_metrics_line_that_was_changed_is_noticed(run: RunDir, go: Go, how: str) -> None:
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("".join(f"{line}\n" for line in EDITS[how](lines)))
    for words in (["verify", "run"], ["resume=run", "training.max_steps=7"]):
        before = run.metrics.read_bytes(), run.summary.read_bytes()
        code, said = go(*words)
        assert code == 4
        assert "metrics.jsonl: " in said
        assert (run.metrics.read_bytes(), run.summary.read_bytes()) == before
    assert "optrun verify run --accept metrics.jsonl" in said
    if how == "edited":
        code, said = go("report", "run")
        assert code == 0
        assert "Incomplete files" in said
        assert "metrics.jsonl: " in said
    if how in ("edited", "emptied"):
        run.manifest.unlink()
        code, said = go("resume=run", "training.max_steps=7")
        assert code == 0
        assert "run_manifest.json: missing" in said
        assert "taken as they are" in said


def test_metrics_that_are_gone_are_missed(run: RunDir, go: Go) -> None:
    run.metrics.unlink()
    code, said = go("resume=run", "training.max_steps=7")
    assert code == 4
    assert "metrics.jsonl: missing" in said


def test_a_summary_that_was_changed_is_left_out(run: RunDir, go: Go) -> None:
    values = {**summary(run.path), "started_at": "2001-01-01T00:00:00Z"}
    run.summary.write_text(json.dumps(values))
    code, said = go("resume=run", "training.max_steps=7")
    assert code == 0
    assert "summary.json: " in said
    assert "Nothing of it is used" in said
    assert not summary(run.path)["started_at"].startswith("2001")


@pytest.mark.parametrize("covered", [True, False])
def test_a_swapped_tokenizer_is_neither_exported_nor_evaluated(
    run: RunDir, go: Go, covered: bool
) -> None:
    path = run.tokenizer / "tokenizer.json"
    values = json.loads(path.read_text())
    tokens = values["model"]["vocab"]
    one, other = sorted(tokens)[:2]
    tokens[one], tokens[other] = tokens[other], tokens[one]
    path.write_text(json.dumps(values))
    if not covered:
        run.manifest.unlink()
    for words in (["export", "run", "exported"], ["evaluate", "run"]):
        code, said = go(*words)
        assert code == 4 if covered or words[0] == "export" else 2
        assert "tokenizer" in said
    assert not Path("exported").exists()
    assert go("resume=run", "training.max_steps=7")[0] == 0  # it writes its own anew
    assert go("export", "run", "exported")[0] == 0


# Links and leftovers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tokenizer", "tokenizer/tokenizer.json", "model", "optrun.log", "curves.png", ".hydra"]
)
def test_nothing_is_written_through_a_link(
    straight: Straight, go: Go, tmp_path: Path, name: str
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    shutil.copytree(straight.path / "model", run.model)
    outside = tmp_path / "outside"
    shutil.move(run.path / name, outside)
    (run.path / name).symlink_to(outside)
    paths = [outside] if outside.is_file() else sorted(outside.iterdir())
    before = [path.read_bytes() for path in paths]
    code, said = go("resume=run")
    assert code == 74
    assert f"{name}: a link" in said
    assert [path.read_bytes() for path in paths] == before
    assert go("verify", "run")[0] == 4


def test_leftovers_of_a_killed_process_go_and_others_stay(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    shutil.copytree(straight.path / "model", run.path / ".model-4711")
    (run.path / ".summary.json.4711.tmp").write_text("{")
    (run.path / ".tokenizer-12").mkdir()
    mine = [".model-mine", ".summary.json.tmp", ".notes.77.tmp"]
    for name in mine:
        (run.path / name).write_text("mine")
    code, said = go("resume=run")
    assert code == 0
    assert ".model-4711 was removed" in said
    left = {path.name for path in run.path.iterdir() if path.name.startswith(".")}
    assert left == {".hydra", ".lock", *mine}
    straight.same(run)


def test_what_was_known_to_be_whole_is_not_read_again(
    straight: Straight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first retention after a resume reads no checkpoint that has not changed since it was sealed."""
    from optrun.artifacts import retention

    run = begun(tmp_path / "run")
    manifest = RunManifest(run)
    saver = AsyncWriter(manifest, keep_last=3)
    for step in (1, 2, 3):
        saver.start(Order(snapshot(step), [], 0, [], lambda: None))
        assert saver.result(wait=True).error is None  # type: ignore[union-attr]
    manifest.close()
    asked: list[str] = []
    original = retention.problems

    def problems(folder: Path, run_id: str | None = None) -> list[str]:
        asked.append(folder.name)
        return original(folder, run_id)

    monkeypatch.setattr(retention, "problems", problems)
    os.utime(run.checkpoint(2) / "state.json")
    again = RunManifest(run, read_run_manifest(run))
    assert retention.Retention(run, 1, again.whole)({2, 1}) == []
    assert asked == ["step-00000002"]
