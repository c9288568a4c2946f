"""`optrun verify`: damage in checkpoints, model and tokenizer is named; a kill is no damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.artifacts.async_writer import AsyncWriter, SaveRequest
from optrun.artifacts.atomic import replace_text
from optrun.artifacts.metrics import MetricsWriter, rewind_for_resume
from optrun.artifacts.retention import Retention, clean_leftovers
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.artifacts.saved_folder import CARD, CHECKSUMS, folder_problems, write_checksums
from optrun.runner.folders import write_through_temporary
from tests.faults.checkpoints import snapshot
from tests.faults.runs import Go, Straight
from tests.faults.syscalls import deaths


@pytest.fixture
def run(straight: Straight, tmp_path: Path) -> RunDir:
    """A copy of the undisturbed run, finished."""
    shutil.copytree(straight.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


# Damage
# --------------------------------------------------------------------------------------------------


def covered_files(run: RunDir) -> list[Path]:
    """Files whose bytes are checked."""
    folders = (run.checkpoints.glob("step-*"), [run.model, run.tokenizer])
    paths = [path for group in folders for folder in group for path in folder.rglob("*")]
    return sorted(path for path in paths if path.is_file() and path.name != CARD)


def harmed(run: RunDir, chance: random.Random) -> tuple[Path, Callable[[], object]]:
    """Do something to one file of a run; the file, and what undoes it."""
    how = chance.choice(["flip", "flip", "flip", "delete", "cut", "longer"])
    path = chance.choice([path for path in covered_files(run) if path.stat().st_size])
    content = path.read_bytes()
    place = chance.randrange(len(content))
    if how == "flip":
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
    elif how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:place])
    else:
        path.write_bytes(content + content[-1:])
    return path, lambda: path.write_bytes(content)


def find_all(run: RunDir, places: int) -> None:
    chance = random.Random(0)
    assert run_problems(run) == []
    for place in range(places):
        path, undo = harmed(run, chance)
        assert str(path) in "\n".join(run_problems(run)), f"place {place}: {path}"
        undo()
    assert run_problems(run) == []


def test_twenty_random_places_are_found(run: RunDir) -> None:
    find_all(run, 20)


@pytest.mark.slow
def test_five_hundred_random_places_are_found(run: RunDir) -> None:
    find_all(run, 500)


def test_verify_says_it(run: RunDir, go: Go) -> None:
    code, said = go("verify", "run")
    assert code == 0
    assert said.count("intact") == len(checkpoint_folders(run)) + len(["model", "tokenizer"])
    (run.model / "model.safetensors").write_bytes(b"")
    (run.tokenizer / "tokenizer.json").unlink()
    run.best.write_text("step-00000099\n")
    code, said = go("verify", "run")
    assert code == 4
    for message in (
        "model/model.safetensors: 0 bytes",
        "tokenizer/tokenizer.json: missing",
        "checkpoints/best: names a checkpoint that is not there",
    ):
        assert message in said


def test_metrics_logs_reports_and_the_model_card_are_not_covered(run: RunDir, go: Go) -> None:
    (run.model / CARD).write_text("my own card")
    run.metrics.write_text("")
    run.log.write_text("")
    (run.path / "notes.txt").write_text("mine")
    assert go("verify", "run")[0] == 0


def test_the_model_of_a_finished_run_is_missed(run: RunDir, go: Go) -> None:
    shutil.rmtree(run.model)
    code, said = go("verify", "run")
    assert code == 4
    assert "model: missing, although the run is finished" in said


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"null", b'{"format": 2}', b"[" * 100_000, b"\xff"]
)
def test_checksums_that_are_gone_or_of_another_kind(
    run: RunDir, go: Go, content: bytes | None
) -> None:
    path = run.tokenizer / CHECKSUMS
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for words in (["verify", "run"], ["export", "run", "exported"]):
        code, said = go(*words)
        assert code == 4
        assert f"tokenizer/{CHECKSUMS}: " in said
    assert not Path("exported").exists()


def test_checksums_name_no_file_outside(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other").write_text("x")
    from optrun.artifacts.checksum import Entry
    from optrun.artifacts.manifest import checksummed_text

    for name in ("../other", str(tmp_path / "other")):
        (folder / CHECKSUMS).write_bytes(checksummed_text(1, {}, {name: Entry.of(b"x")}))
        assert "outside of the folder" in "".join(folder_problems(folder))


def test_accept_is_refused_with_what_to_do_instead(run: RunDir, go: Go) -> None:
    assert run.path.is_dir()
    code, said = go("verify", "run", "--accept", "summary.json")
    assert code == 2
    assert "Restore the file from a copy" in said


# What commands do afterwards
# --------------------------------------------------------------------------------------------------


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


# Kills
# --------------------------------------------------------------------------------------------------


def a_start(run: RunDir, step: int) -> None:
    """Everything that a start of a run does to its directory, but training."""
    clean_leftovers(run)
    replace_text(run.config, f"step: {step}\n")
    with write_through_temporary(run.tokenizer, replaces=True) as aside:
        replace_text(aside / "tokenizer.json", "{}")
        write_checksums(aside)
    rewind_for_resume(run.metrics, step - 1)
    saver = AsyncWriter(run, Retention(run, keep_last=1))
    with MetricsWriter(run.metrics) as metrics:
        for at in (step, step + 1):
            metrics.write(
                {"step": at, "train/loss": 1 / at, "unscheduled": ["eval/"], "eval/loss": 2.0}
            )
            replace_text(run.summary, f'{{"step": {at}}}')
            saver.start(SaveRequest(snapshot(at), [at], 1, [], metrics.sync))
            result = saver.result(wait=True)
            assert result is not None
            assert result.error is None


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
    """In a first start and in one that goes on: verify finds nothing wrong, then or later."""
    whole = begun(memory_path / "whole")
    if second:
        a_start(whole, 1)
    left = deaths(whole.path, lambda: a_start(whole, 3 if second else 1), memory_path, every)
    assert len(left) > 40 // every
    for run in map(RunDir, left):
        assert run_problems(run) == [], f"call {run.path.name}"
        a_start(run, 3)
        assert run_problems(run) == [], f"after call {run.path.name}"


# What is read is checked
# --------------------------------------------------------------------------------------------------


def test_lost_metrics_are_reported(run: RunDir, go: Go) -> None:
    run.metrics.unlink()
    code, said = go("resume=run", "training.max_steps=7")
    assert code == 0
    assert "metrics.jsonl: missing: its lines up to step 6 are lost" in said


def swap_two_tokens(path: Path) -> None:
    values = json.loads(path.read_text())
    tokens = values["model"]["vocab"]
    one, other = sorted(tokens)[:2]
    tokens[one], tokens[other] = tokens[other], tokens[one]
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("with_new_checksums", [False, True])
def test_a_swapped_tokenizer_is_neither_exported_nor_evaluated(
    run: RunDir, go: Go, with_new_checksums: bool
) -> None:
    swap_two_tokens(run.tokenizer / "tokenizer.json")
    if with_new_checksums:
        (run.tokenizer / CHECKSUMS).unlink()
        write_checksums(run.tokenizer)
    for words in (["export", "run", "exported"], ["evaluate", "run"]):
        code, said = go(*words)
        assert code == (2 if with_new_checksums and words[0] == "evaluate" else 4)
        assert "tokenizer" in said
    assert not Path("exported").exists()
    assert go("resume=run", "training.max_steps=7")[0] == 0  # it writes its own anew
    assert go("export", "run", "exported")[0] == 0


def test_nothing_is_published_without_its_tokenizer(run: RunDir, go: Go) -> None:
    shutil.rmtree(run.tokenizer)
    code, said = go("export", "run", "exported")
    assert code == 4
    assert "tokenizer: missing" in said
    assert "resume=run" in said
    assert not Path("exported").exists()
    assert go("resume=run", "training.max_steps=7")[0] == 0
    assert go("export", "run", "exported")[0] == 0
    assert (Path("exported") / "tokenizer.json").is_file()


# Links and leftovers
# --------------------------------------------------------------------------------------------------


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
    if name.startswith(("tokenizer", "model")):
        assert go("verify", "run")[0] == 4


@pytest.mark.parametrize("name", ["report.html", "report.csv", "report-train-loss.png"])
def test_what_a_killed_report_leaves_is_no_damage_and_goes(run: RunDir, name: str) -> None:
    left = run.path / f".{name}.4242.tmp"
    left.write_text("half")
    assert run_problems(run) == []
    assert clean_leftovers(run) == [left.name]


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
