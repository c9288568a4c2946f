"""A sweep is a set.

What is done stays done, whatever the order, the size or the fate of its neighbours.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import signal
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from rich.console import Console

from optrun.artifacts import async_writer as saver_of
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import EXIT_STORAGE
from optrun.cli import sweep_files
from optrun.cli.sweep import _make_folder as sweep_folder
from optrun.cli.sweep import _tell_left_out
from optrun.config import store
from optrun.report.runs import load_runs
from optrun.sweeper.jobs import Composer, build_jobs, combinations
from optrun.sweeper.view import View
from optrun.training.step import TrainStep
from tests.running import optrun, records, summary
from tests.sweep import forked
from tests.sweep.forked import SAVE, STEPS, ForkServer, jobs, result, same, steps, sweep, whole


def test_repeated_grown_and_reordered(
    place: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed, "sweep")
    first = jobs()
    assert len(first) == 4
    assert all(whole(job) for job in first)
    assert not any(set("=,") & set(job.name) for job in first)
    written = {job: (job / "metrics.jsonl").stat().st_mtime_ns for job in first}
    assert sweep("seed=1,0", "lr=2e-3,1e-3") == 0
    assert ForkServer.launches == [], "nothing was missing, and nothing was launched"
    capsys.readouterr()

    assert sweep("lr=1e-3,2e-3", "optimizer=lamb,adamw") == 0
    assert ForkServer.launches == [2], "two of four were there"
    said = capsys.readouterr().out
    assert "4 jobs -> sweep · 2 finished before\n" in said
    assert "[2/4] running     " in said, "before the first of them ends"
    assert len(jobs()) == 6
    assert {job: (job / "metrics.jsonl").stat().st_mtime_ns for job in first} == written


def test_what_does_not_count_does_not_make_a_new_job(place: Path, undisturbed: Path) -> None:
    shutil.copytree(undisturbed, "sweep")
    assert (
        sweep(
            "seed=0,0",
            "lr=0.001",
            "training.max_seconds=999",
            "run_name=again",
            "checkpoint.keep_last=5",
        )
        == 0
    )
    assert len(jobs()) == 4
    assert ForkServer.launches == []


def test_a_mapping_and_its_keys_one_by_one_are_one_job() -> None:
    """Hydra merges a mapping into what is there."""
    compose = Composer(store.open_hydra(), "config")
    whole = compose(["model.config={n_layer: 1}", "optimizer=lamb"])
    assert whole == compose(["optimizer=lamb", "++model.config.n_layer=1"])
    assert whole["model"]["config"]["n_head"] > 0


def test_a_point_that_is_left_out_is_told_by_name() -> None:
    """No silence where two points are one run, and say something else.

    The second may not even be possible.
    """
    words = ["distributed=fsdp", "training.global_batch_size=8", "seed=0,0", "lr=1e-3,2e-3"]
    hydra = store.open_hydra()
    points = combinations(
        hydra, [*words, "training.nproc_per_node=2", "distributed.data_parallel_shard_degree=2,3"]
    )
    made = build_jobs(Composer(hydra, "config"), points)
    assert [job.values["distributed"]["data_parallel_shard_degree"] for job in made] == [2, 2]
    assert [job.left_out for job in made] == [("distributed.data_parallel_shard_degree=3",)] * 2, (
        "each once"
    )
    said = StringIO()
    _tell_left_out(made, View(Console(file=said)))
    assert said.getvalue().count("distributed.data_parallel_shard_degree=3") == 2
    for fact in ("left out", "the same run as", "lr=0.001", "lr=0.002", "hydra.sweep.dir"):
        assert fact in said.getvalue()


def test_failures_are_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is told once in a start, whichever start it failed in; the report is apart from that."""
    words = ["lr=-1,1e30,1e-3", "scheduler=constant", "optimizer=sgd"]
    assert sweep(*words) == 1
    rows = result()
    assert [row["status"] for row in rows.values()] == ["failed", "failed", "finished"]
    failed = [row for row in rows.values() if row["status"] == "failed"]
    assert len(failed) == 2
    assert "expected a number above 0" in failed[0]["message"]
    assert "nan" in failed[1]["message"]
    assert all((Path("sweep") / row["log"]).is_file() for row in failed)
    assert capsys.readouterr().out.count("expected a number above 0") == 1
    assert summary(Path("sweep") / failed[0]["name"])["status"] == "failed"

    ForkServer.launches.clear()
    assert sweep(*words) == 1
    assert ForkServer.launches == []
    assert capsys.readouterr().out.count("expected a number above 0") == 1
    assert sweep(*words, "hydra.sweeper.retry_failed=true") == 1
    assert ForkServer.launches == [2]
    assert [run_problems(RunDir(Path("sweep") / name)) for name in rows] == [[], [], []]


def test_an_impossible_network_is_a_row(place: Path) -> None:
    """A network with a width that its heads do not divide, before a sound one."""
    assert sweep("model.config.n_embd=17,16") == 1
    assert [row["status"] for row in result().values()] == ["failed", "finished"]


def test_out_of_memory_is_a_row(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainStep.compute_gradients

    def call(self: TrainStep, batches: list[dict], *rest: Any) -> object:
        if len(batches[0]["input_ids"]) == 8:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
                " 8 GB"
            )
        return original(self, batches, *rest)

    monkeypatch.setattr(TrainStep, "compute_gradients", call)
    assert sweep("training.per_device_train_batch_size=4,8") == 1
    rows = result()
    assert rows["training.per_device_train_batch_size=4"]["status"] == "finished"
    assert rows["training.per_device_train_batch_size=8"]["message"].startswith(
        "step 1: out of memory with micro-batches"
    )


def die_at(monkeypatch: pytest.MonkeyPatch, step: int, marks: Path, times: int) -> None:
    """Kill the worker of the job with lr 2e-3 at a step, a number of times."""
    original = TrainStep.compute_gradients
    marks.mkdir()

    def call(self: TrainStep, batches: list[dict], *rest: Any) -> object:
        done = original(self, batches, *rest)
        if abs(self.optimizer.param_groups[0]["initial_lr"] - 2e-3) < 1e-9:
            self.count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
            if self.count == step and len(list(marks.iterdir())) < times:  # type: ignore[attr-defined]
                (marks / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return done

    monkeypatch.setattr(TrainStep, "compute_gradients", call)


def test_a_worker_killed_once_is_resumed(
    place: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at(monkeypatch, SAVE + 2, place / "marks", times=1)
    assert sweep("lr=1e-3,2e-3") == 0
    assert ForkServer.launches == [2, 1]
    assert all(same(job, undisturbed / job.name) for job in jobs())


def test_a_job_that_kills_its_process_is_a_row(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at(monkeypatch, 2, place / "marks", times=9)
    assert sweep("lr=2e-3,1e-3", "training.max_steps=4") == 1
    rows = result()
    assert [row["status"] for row in rows.values()] == ["failed", "finished"]
    assert "died twice" in rows["lr=0.002"]["message"]
    assert ForkServer.launches == [2, 1, 1]


def test_stopped_by_a_signal(
    place: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The running job is saved, nothing else begins, which is no failure.

    The same line goes on to the same end.
    """
    original = TrainStep.compute_gradients

    def call(self: TrainStep, batches: list[dict], *rest: Any) -> object:
        self.count = getattr(self, "count", 0) + 1  # type: ignore[attr-defined]
        if self.count == 3:  # type: ignore[attr-defined]
            handler = signal.getsignal(signal.SIGTERM)
            arrived = []
            signal.signal(
                signal.SIGTERM,
                lambda number, frame: (arrived.append(number), handler(number, frame)),
            )
            os.kill(os.getppid(), signal.SIGINT)
            while not arrived:
                time.sleep(0.01)
        return original(self, batches, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", call)
        assert sweep("lr=1e-3,2e-3") == 75
    assert [summary(job)["status"] for job in jobs()] == ["interrupted"]
    assert steps(jobs()[0]) == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.index("stopping: the running job saves and ends") < said.index("interrupted")
    assert "0 failed · 2 left (1 interrupted, 1 not started)" in said
    assert [row["status"] for row in result().values()] == ["interrupted", "new"]
    runs = load_runs([Path("sweep")])
    assert {run.label: run.status for run in runs} == {
        jobs()[0].name: "interrupted",
        runs[-1].label: "not started",
    }
    assert sweep("lr=1e-3,2e-3") == 0
    assert all(same(job, undisturbed / job.name) for job in jobs())


def test_time_budgets_end_jobs_not_the_sweep(place: Path, undisturbed: Path) -> None:
    """Each start gives each job one step more."""
    words = ["lr=1e-3,2e-3", "training.max_seconds=1e-9"]
    assert sweep(*words) == 75
    assert [steps(job) for job in jobs()] == [[1], [1]]
    assert ForkServer.launches == [2]
    assert sweep("lr=1e-3,2e-3") == 0
    assert all(same(job, undisturbed / job.name) for job in jobs())


def test_jobs_that_save_nothing_begin_again(place: Path, undisturbed: Path) -> None:
    words = ["lr=1e-3", "checkpoint=none"]
    assert sweep(*words, "training.max_seconds=1e-9") == 75
    (job,) = jobs()
    assert steps(job) == [1]
    assert sweep(*words) == 0
    assert whole(job)
    assert records(job) == records(undisturbed / job.name)
    assert not (job / "checkpoints").exists()


def test_a_full_disk_pauses_the_sweep(
    place: Path,
    undisturbed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every job would train to its end to fail there.

    With room again, the same line goes on with all of them.
    """
    full = place / "full"
    save = saver_of.save_checkpoint

    def refusing(run: RunDir, taken: Any, *given: Any) -> Path:
        if full.exists() and taken.global_step == STEPS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.checkpoints))
        return save(run, taken, *given)

    monkeypatch.setattr(saver_of, "save_checkpoint", refusing)
    full.touch()
    assert sweep("lr=1e-3,2e-3") == EXIT_STORAGE
    said = capsys.readouterr().out
    for fact in (
        "No space left on device",
        "Make room",
        "hydra.sweep.dir=sweep",
        "0 failed · 2 left (1 interrupted",
    ):
        assert fact in said
    assert len(jobs()) == 1, "the first was cut, and the other did not begin"
    assert sweep("lr=1e-3,2e-3") == EXIT_STORAGE
    assert [row["status"] for row in result().values()].count("failed") == 0
    full.unlink()
    assert sweep("lr=1e-3,2e-3") == 0
    assert len(jobs()) == 2
    assert all(same(job, undisturbed / job.name) for job in jobs())


def test_a_disk_without_room_for_a_checkpoint_pauses_the_sweep(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check before a save raises an error of our own, which is told by its class."""
    usage = shutil.disk_usage

    def small(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=1000) if (place / "full").exists() else found

    monkeypatch.setattr(shutil, "disk_usage", small)
    (place / "full").touch()
    assert sweep("lr=1e-3,2e-3") == EXIT_STORAGE
    said = capsys.readouterr().out
    assert "are free" in said
    assert "Make room" in said
    assert [row["status"] for row in result().values()].count("failed") == 0
    (place / "full").unlink()
    assert sweep("lr=1e-3,2e-3") == 0
    assert all(row["status"] == "finished" for row in result().values())


@pytest.mark.parametrize("key", ["nodes", "tasks_per_node"])
def test_a_job_over_several_tasks_is_refused(
    key: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("hydra/launcher=slurm", f"hydra.launcher.{key}=2", "lr=1e-3,2e-3") == 2
    said = capsys.readouterr().err
    assert f"hydra.launcher.{key}=2: expected 1" in said
    assert "torchrun" in said


@pytest.mark.parametrize("name", ["sweep.json", "study.db"])
def test_a_file_of_somebodys_own_is_not_written_over(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = place / "sweep" / name
    own.parent.mkdir()
    own.write_text('{"mine": true}')
    assert sweep("lr=1e-3,2e-3") == 2
    assert name in capsys.readouterr().err
    assert own.read_text() == '{"mine": true}'
    assert [path.name for path in own.parent.iterdir()] == [name]


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "record"])
def test_a_torn_result_is_no_result(place: Path, undisturbed: Path, file: str) -> None:
    """The job it belongs to is not finished.

    It is brought to its end, and the others are left alone.
    """
    shutil.copytree(undisturbed, "sweep")
    torn, *others = jobs()
    path = (
        Path("sweep") / ".sweep" / "jobs" / f"{torn.name}.json" if file == "record" else torn / file
    )
    path.write_bytes(path.read_bytes()[:-30])
    if file == "metrics.jsonl":  # a line is on the disk before its checkpoint is
        shutil.rmtree(torn / "checkpoints" / f"step-{STEPS:08d}")
        (torn / "summary.json").unlink()
    before = [(other / "metrics.jsonl").stat().st_mtime_ns for other in others]
    assert sweep("lr=1e-3,2e-3", "seed=0,1") == 0
    assert ForkServer.launches == ([] if file == "record" else [1])
    assert all(same(job, undisturbed / job.name) for job in jobs())
    assert [(other / "metrics.jsonl").stat().st_mtime_ns for other in others] == before
    assert [row["status"] for row in result().values()] == ["finished"] * 4


def test_sweeps_of_the_same_second_have_folders_of_their_own(place: Path) -> None:
    cfg = store.compose(
        store.open_hydra(), "config", ["hydra.sweep.dir='sweeps/${now:%Y}'"], RunMode.MULTIRUN
    )
    folders = [sweep_folder(cfg) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() for folder in folders)


def test_two_sweeps_share_the_work(place: Path, undisturbed: Path) -> None:
    pids = [
        forked.fork(lambda: sweep("lr=1e-3,2e-3", "seed=0,1"), place / f"log{number}")
        for number in range(2)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], [(place / f"log{number}").read_text()[-2000:] for number in range(2)]
    assert len(jobs()) == 4
    for job in jobs():
        assert same(job, undisturbed / job.name)
        record = (Path("sweep") / ".sweep" / "jobs" / f"{job.name}.json").read_text()
        assert '"attempts": 1' in record, "no job was begun twice"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer=lamb,adamv"], "adamw"),
        (["optimzer=lamb,adamw"], "optimizer"),
        (["lr=1e-3,fast"], "a number"),
        (["seed=0-2"], "write optrun -m seed=0,1,2"),
        (["optimizer=lamb,sgd", "optimizer.always_adapt=true,false"], "always_adapt"),
        (["lr=interval(0.1,0.2)"], "hydra/sweeper=optuna"),
        (["seed=0,1", "hydra/launcher=joblab"], "joblib"),
        (["seed=0,1", "hydra.sweeper.rungs=[3]"], "hydra.sweeper.pruner=asha"),
        (["seed=0,1", "hydra.sweeper.objectives=[eval/loss,eval/f1]"], "report.csv"),
        (["seed=0,1", "hydra.sweeper.reduction_factor=2"], "hydra/sweeper=optuna"),
        (["seed=0,1", "hydra.sweep.subdir=x"], "hydra.sweep.subdir"),
        (["seed=0,1", "training.nproc_per_node=2"], "training.nproc_per_node=2"),
    ],
)
def test_a_wrong_line_starts_nothing(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun("-m", *forked.JOB, *words, "hydra.sweep.dir=sweep") == 2
    assert said in capsys.readouterr().err
    assert not Path("sweep").exists()


def test_a_tracker_without_its_package_starts_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "wandb" else found(name, *of)
    )
    assert optrun("-m", *forked.JOB, "seed=0,1", "tracking=wandb", "hydra.sweep.dir=sweep") == 2
    assert "tracking=wandb: the package wandb is not installed" in capsys.readouterr().err
    assert not Path("sweep").exists()


def test_a_file_that_changed_is_refused(
    place: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on other rows under the same path.

    A touch is no change, nor is a file that no job has read.
    """
    monkeypatch.setattr(
        forked, "JOB", [word for word in forked.JOB if not word.startswith("data.train=")]
    )
    whole_text = text.read_text()
    (place / "parts").mkdir()
    for name in ("a.txt", "b.txt"):
        (place / "parts" / name).write_text(whole_text)
    (place / "dev.txt").write_text(whole_text[:2000])
    words = ["data.train=parts/*.txt", "data.eval={dev: dev.txt}", "training.max_steps=2"]
    assert sweep(*words, "lr=-1") == 1, "it has read nothing"
    (place / "dev.txt").write_text(whole_text[:4000])
    assert sweep(*words, "lr=1e-3") == 0
    done = len(ForkServer.launches)

    def refused(*facts: str) -> None:
        assert sweep(*words, "lr=1e-3,2e-3") == 2
        said = capsys.readouterr().err
        for fact in (*facts, "adamw-lr0.001-seed0", "hydra.sweep.dir"):
            assert fact in said
        assert len(ForkServer.launches) == done

    (place / "dev.txt").write_text(whole_text[:3999] + "!")
    refused("data.eval.dev=dev.txt", "dev.txt was 4,000 bytes, digest", "4,000 bytes, digest")
    (place / "dev.txt").unlink()
    refused("is missing now")
    assert sweep(*words, "lr=1e-3") == 0, "nothing is left to run"
    (place / "dev.txt").write_text(whole_text[:4000])
    (place / "parts" / "c.txt").write_text(whole_text)
    refused("data.train=parts/*.txt", "parts/c.txt was missing")
    (place / "parts" / "c.txt").unlink()
    os.utime(place / "parts" / "a.txt", (1, 1))
    assert sweep(*words, "lr=1e-3,2e-3") == 0


def test_which_files_a_job_reads(place: Path) -> None:
    """Of a stream the sizes count; a name of the hub is no file, and hidden ones are not read."""
    (place / "rows.jsonl").write_text("{}")
    for folder in (".git", "onnx"):
        (place / "model" / folder).mkdir(parents=True)
    for name in ("config.json", ".git/index", "onnx/.DS_Store"):
        (place / "model" / name).write_text("{}")
    parts = {
        "code": {"train": f"{place}/rows.jsonl", "streaming": True},
        "prose": {"train": ["*.jsonl", "gone"]},
    }
    model = {"name": "pretrained", "path": "gpt2", "tokenizer": "model"}
    found = sweep_files.contents_of({"data": {"name": "mixture", "mixture": parts}, "model": model})
    whole = "2 bytes, digest 69bf807ca3bfdb2f"
    assert found == {
        f"sizes of data.mixture.code.train={place}/rows.jsonl": {f"{place}/rows.jsonl": "2 bytes"},
        "data.mixture.prose.train=*.jsonl": {"rows.jsonl": whole},
        "data.mixture.prose.train=gone": {},
        "model.path=gpt2": {},
        "model.tokenizer=model": {"config.json": whole},
    }


def test_a_recipe_of_ones_own_is_on_the_cards_of_its_jobs(place: Path) -> None:
    recipe = "defaults: [config, _self_]\nlr: 1.5e-3\n"
    (place / "mine.yaml").write_text(recipe)
    assert sweep("-cn", "mine.yaml", "seed=0") == 0
    (job,) = jobs()
    card = (job / "model" / "README.md").read_text()
    assert f"```yaml\n{recipe}```" in card
