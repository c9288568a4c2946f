"""Going on after a crash.

From the newest checkpoint that is whole, after saying so, never silently from nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from tests.faults.checkpoints import FILES
from tests.faults.runs import Go, Straight
from tests.running import records, summary


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_damaged_newest_is_named_and_the_one_before_is_exact(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    """Half of the newest, nothing of the next, a leftover of a killed save, torn metrics.

    Goes on by itself.
    """
    run = straight.cut(tmp_path / "run", 5)
    path = run.checkpoint(5) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    (run.checkpoint(4) / "manifest.json").unlink()
    (run.checkpoints / ".saving-step-00000006-1").mkdir()
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 6, "train/lo')
    code, said = go("resume=run")
    assert code == 0
    assert "step-00000005/optimizer.safetensors: 1,000 bytes" in said
    assert "step-00000004/manifest.json: missing" in said
    assert "resuming from" in said
    assert "step-00000003" in said
    straight.same(run)
    left = {path.name for path in run.checkpoints.iterdir()}
    assert {"damaged-step-00000005-1", "damaged-step-00000004-1"} <= left
    assert not any(name.startswith(".") for name in left)
    assert (run.model / "model.safetensors").is_file()


def test_asked_for_by_name_the_damaged_one_is_refused(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 5)
    (run.checkpoint(5) / "state.json").unlink()
    before = sorted(path.name for path in run.checkpoints.iterdir())
    code, said = go(f"resume={run.checkpoint(5)}")
    assert code == 4
    assert "state.json: missing" in said
    assert sorted(path.name for path in run.checkpoints.iterdir()) == before


def test_an_older_one_by_name_puts_the_later_ones_aside(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 5)
    code, said = go(f"resume={run.checkpoint(2)}")
    assert code == 0
    assert "step-00000005 was renamed to superseded-step-00000005-1" in said
    straight.same(run)


@pytest.mark.parametrize("how", ["run", "auto", "latest"])
def test_none_whole_is_an_error_that_lists_all(
    straight: Straight, go: Go, tmp_path: Path, how: str
) -> None:
    run = straight.cut(tmp_path / "run", 3)
    for step, file in zip((1, 2, 3), FILES, strict=False):
        (run.checkpoint(step) / file).write_bytes(b"")
    before = run.metrics.read_bytes()
    where = [f"resume={how}"] if how == "run" else [f"resume={how}", "hydra.run.dir=run"]
    code, said = go(*where)
    assert code == 4
    for step, file in zip((1, 2, 3), FILES, strict=False):
        assert f"step-{step:08d}/{file}" in said
    assert run.metrics.read_bytes() == before
    assert len([path for path in run.checkpoints.iterdir() if path.name.startswith("step-")]) == 3


@pytest.mark.parametrize("how", [["resume=run"], ["resume=auto", "hydra.run.dir=run"]])
def test_before_the_first_save_it_starts_over_in_place(
    straight: Straight, go: Go, tmp_path: Path, how: list[str]
) -> None:
    run = straight.cut(tmp_path / "run", 0)
    code, said = go(*how)
    assert code == 0
    assert "ended before its first save" in said
    assert "starts over from step 0" in said
    straight.same(run)


def test_killed_before_its_configuration_was_written_it_starts_over(
    straight: Straight, go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra noted the command line.

    A path of it is that of the folder where the run was started.
    """
    run = RunDir(tmp_path / "run")
    shutil.copytree(straight.path / ".hydra", run.hydra)
    (run.hydra / "hydra.yaml").write_text("torn: [")
    run.lock.touch()
    code, said = go("resume=run")
    assert code == 2
    assert "Repeat its command with" in said
    shutil.copy(straight.path / ".hydra" / "hydra.yaml", run.hydra)
    assert (
        "-cn stdlib_gpt: the run in run began with config"
        in go("resume=run", "-cn", "stdlib_gpt")[1]
    )
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    code, said = go("resume=../run")
    assert code == 0
    assert "ended before its first save" in said
    straight.same(run)


def test_a_recipe_may_ask_to_go_on(straight: Straight, go: Go, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nresume: auto\n")
    mine = ["-cn", "mine", "--config-dir", str(tmp_path)]
    words = [*mine, *straight.words_with("training.max_steps=1"), "hydra.run.dir=run"]
    assert go(*words)[0] == 0
    code, said = go(*words)
    assert code == 0
    assert "all 1 steps are done" in said
    code, said = go(*words, "resume=null")
    assert code == 2
    assert "nothing is overwritten" in said
    code, said = go(*mine, "-m", "seed=0,1")
    assert code == 2
    assert "repeat its command" in said
    code, said = go("++resume=laest")
    assert code == 2
    assert "Did you mean resume=latest?" in said


def test_a_run_that_saves_nothing_starts_over_in_place(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    """Cut short, it begins again where that is asked for; finished, it stays what it is."""
    words = [*straight.words_with("checkpoint=none"), "hydra.run.dir=run"]
    code, said = go(*words, "training.max_seconds=1e-9")
    assert code == 75
    assert "nothing was saved" in said
    assert "resume=auto" in said
    code, said = go("training.max_seconds=null", "resume=run")
    assert code == 0
    assert "saves nothing (checkpoint=none)" in said
    assert "starts over from step 0" in said
    assert records(tmp_path / "run") == records(straight.path)
    for changed in ([], ["training.max_steps=9"]):
        code, said = go("resume=auto", "hydra.run.dir=run", *changed)
        assert code == 2
        assert "is finished" in said
        assert summary(tmp_path / "run")["status"] == "finished"


LEFT = [
    [],
    [".hydra/"],
    [".lock", ".hydra/config.yaml", ".hydra/hydra.yaml"],
    [".lock", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "optrun.log"],
    [".hydra/overrides.yaml", "optrun.log", ".lock", ".config.yaml.77.tmp"],
]


def begun(run: RunDir, left: list[str]) -> None:
    """What a start leaves that is killed early."""
    run.path.mkdir()
    if left:
        run.hydra.mkdir()
    for name in left:
        (
            (run.path / name).mkdir(exist_ok=True)
            if name.endswith("/")
            else (run.path / name).write_text("torn: [")
        )


@pytest.mark.parametrize("how", [[], ["resume=auto"]])
def test_killed_before_the_run_began_nothing_blocks_the_same_command(
    straight: Straight, go: Go, tmp_path: Path, how: list[str]
) -> None:
    """Hydra's folder is written before the first line of a run is executed, and importing takes
    seconds after that.
    """
    for number, left in enumerate(LEFT):
        begun(RunDir(tmp_path / str(number)), left)
        assert RunDir(tmp_path / str(number)).is_unbegun(), left
    for number in (3, 4) if how else (4,):
        run = RunDir(tmp_path / str(number))
        assert (
            go(*straight.words_with("training.max_steps=1"), f"hydra.run.dir={number}", *how)[0]
            == 0
        )
        assert run.checkpoint(1).is_dir()


@pytest.mark.parametrize("mine", ["notes.txt", ".hydra/notes.txt", "checkpoints"])
def test_what_is_not_ours_blocks_a_start(
    straight: Straight, go: Go, tmp_path: Path, mine: str
) -> None:
    hydra = tmp_path / "run" / ".hydra"
    hydra.mkdir(parents=True)
    (tmp_path / "run" / mine).write_text("mine")
    code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
    assert code == 2
    assert "not empty" in said
    assert (tmp_path / "run" / mine).read_text() == "mine"


def test_a_folder_of_checkpoints_that_is_gone_is_not_made_anew(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    shutil.rmtree(run.checkpoints)
    code, said = go("resume=auto", "hydra.run.dir=run")
    assert code == 4
    assert "was removed after training had begun" in said
    code, said = go("resume=auto", "hydra.run.dir=run", "checkpoint=none")
    assert code == 4, "that nothing is saved from now on does not bring back what was"
    assert "was removed after training had begun" in said
    run.checkpoints.mkdir()
    (run.checkpoints / "damaged-step-00000004-1").mkdir()
    code, said = go("resume=auto", "hydra.run.dir=run")
    assert code == 4
    assert "damaged-step-00000004-1" in said


def test_only_the_latest_torn_line_goes(straight: Straight, go: Go, tmp_path: Path) -> None:
    """A summary torn away and metrics cut in the middle of a line are mended.

    No step appears twice.
    """
    run = straight.cut(tmp_path / "run", 4)
    run.summary.write_text('{"status": "run')
    content = run.metrics.read_bytes()
    run.metrics.write_bytes(content[: len(content) - 20])
    assert go("resume=run")[0] == 0
    straight.same(run)
    assert [record["step"] for record in records(run.path)] == [1, 2, 3, 4, 5, 6]
    assert summary(run.path)["status"] == "finished"


def test_killed_after_the_last_checkpoint_the_end_is_made_up_for(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 6)
    assert go("resume=run")[0] == 0
    straight.same(run)
    assert (run.model / "model.safetensors").is_file()
    assert summary(run.path)["status"] == "finished"


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "summary.json", "config.yaml"])
def test_a_run_writes_through_no_link(
    straight: Straight, go: Go, tmp_path: Path, name: str
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    outside = tmp_path / "outside"
    shutil.move(run.path / name, outside)
    (run.path / name).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else names_in(outside)
    code, said = go("resume=run")
    assert code == 74
    assert f"{name}: a link" in said
    assert (outside.read_bytes() if outside.is_file() else names_in(outside)) == before


def test_a_checkpoint_that_is_a_link_is_not_followed(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    shutil.move(run.checkpoint(4), tmp_path / "step-00000004")
    run.checkpoint(4).symlink_to(tmp_path / "step-00000004")
    code, said = go(f"resume={run.checkpoint(4)}")
    assert code == 4
    assert "a link" in said
    assert go("resume=run")[0] == 0
    straight.same(run)
    assert names_in(tmp_path / "step-00000004") == sorted(FILES)


def test_verify_names_file_and_stranger(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 3)
    (run.checkpoint(3) / "optimizer.pt").write_bytes(b"pickle")
    assert go("verify", str(run.checkpoint(3)))[0] == 0, "it is never read: the checkpoint is whole"
    code, said = go("verify", "run")
    assert code == 0
    assert "optimizer.pt" in said
    path = run.checkpoint(2) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    code, said = go("verify", "run")
    assert code == 4
    assert "step-00000002/model.safetensors" in said
    assert go("verify", str(run.checkpoint(2)))[0] == 4


def test_a_fresh_run_into_a_used_folder_is_refused(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    run = straight.cut(tmp_path / "run", 4)
    code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 2
    assert "resume=run" in said
    assert json.loads(run.summary.read_text())["status"] == "running"


def test_resume_of_what_another_process_writes_is_refused(
    straight: Straight, go: Go, tmp_path: Path
) -> None:
    from optrun.artifacts.lock import RunLock

    run = straight.cut(tmp_path / "run", 4)
    leftover = run.checkpoints / ".saving-step-00000005-1"
    leftover.mkdir()
    with RunLock(RunDir("run").lock):
        code, said = go("resume=run")
        assert code == 5
        assert f"process {os.getpid()}" in said
        code, said = go(*straight.words, "hydra.run.dir=run", "resume=auto")
        assert code == 5
    assert leftover.is_dir()  # another's work in progress
