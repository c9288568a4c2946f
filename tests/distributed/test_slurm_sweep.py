"""Sweeps whose jobs have ranks over several nodes.

Submitit's own executor, and a stand-in for SLURM's commands.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from tests.distributed.ranked_runs import Start, batches, differences, start_on
from tests.distributed.slurm_stand_in import Slurm
from tests.distributed.test_launch import PATIENCE
from tests.distributed.test_launch_others import joined
from tests.preloaded import Program, program
from tests.running import optrun, summary

STEPS = 40
SAVED = "sweep/*/checkpoints/step-*"
LAUNCHER = [
    "hydra/launcher=slurm",
    "hydra.launcher.nodes=2",
    "hydra.launcher.tasks_per_node=2",
    "hydra.launcher.gpus_per_node=null",
    "hydra.launcher.mem_gb=null",
]
JOB = [
    "distributed=fsdp",
    "training.per_device_train_batch_size=4",
    "training.global_batch_size=16",
    f"training.max_steps={STEPS}",
    "training.logging_steps=1",
    "training.eval_steps=20",
    "checkpoint.save_steps=10",
]


NODES = ["hydra/launcher=slurm", "hydra.launcher.nodes=2"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (NODES, ["hydra.launcher.nodes=2", "distributed=none", "distributed=fsdp"]),
        (
            [*NODES, "distributed=ddp", "training.nproc_per_node=2"],
            ["training.nproc_per_node", "each task is a rank"],
        ),
        (
            [*NODES, "distributed=ddp", "distributed.max_restarts=2"],
            ["distributed.max_restarts", "Leave it out"],
        ),
        (
            [
                *NODES,
                "hydra.launcher.tasks_per_node=3",
                "distributed=ddp",
                "training.global_batch_size=16",
            ],
            ["training.global_batch_size=16", "6"],
        ),
        (
            ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "distributed=ddp"],
            ["hydra.launcher.tasks_per_node=2", "hydra/launcher=slurm", "training.nproc_per_node"],
        ),
    ],
)
def test_tasks_that_cannot_be_ranks(
    words: list[str],
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert optrun("-m", *words, "seed=0,1", "training.device=cpu", "hydra.sweep.dir=sweep") == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
    assert not Path("sweep").exists()


@contextmanager
def swept(folder: Path, seeds: str) -> Iterator[tuple[Slurm, Program, list[Path]]]:
    """A sweep under way, when each of its jobs has saved; the folders of the jobs, by seed."""
    given = ["-m", *joined(folder, *JOB), *LAUNCHER, f"seed={seeds}", "hydra.sweep.dir=sweep"]
    with (
        Slurm(folder / "slurm", folder) as slurm,
        program("optrun", given, folder, slurm.environment) as process,
    ):
        count = len(seeds.split(","))
        wait_for(lambda: len({path.parents[1] for path in folder.glob(SAVED)}) == count, process)
        yield slurm, process, sorted(folder.glob("sweep/*seed*"))


def wait_for(condition: Callable[[], object], process: Program) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_tasks_of_a_job_are_its_ranks(tmp_path: Path) -> None:
    """One job is asked to stop as its time is up, of the other a node is lost.

    Both come to what one process does.
    """
    with swept(tmp_path, "0,1") as (slurm, process, jobs):
        timed_out, lost = slurm.jobs
        timed_out.signal(signal.SIGUSR2)
        slurm.requeue(lost)
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, said
    assert [job.starts for job in slurm.jobs] == [1, 2, 1], "the stopped one was submitted again"
    alone = [tmp_path / "alone-0", tmp_path / "alone-1"]
    given = [token for token in joined(tmp_path, *JOB) if not token.startswith("distributed=")]
    start_on(
        1,
        [Start(run, [*given, f"seed={seed}"]) for seed, run in enumerate(alone)],
        tmp_path / "meet",
    )
    for job, one in zip(jobs, alone, strict=True):
        assert len(summary(job)["resumes"]) == 1
        assert sorted(path.name for path in RunDir(job).logs.glob("rank-*")) == [
            f"rank-{n}.log" for n in (1, 2, 3)
        ]
        assert len(list(RunDir(job).checkpoint(STEPS).glob("model/shard-*"))) == 4
        assert batches(job) == batches(one)
        assert max(differences(one, job, ("train/loss", "eval/loss")).values()) <= 1e-6


@pytest.mark.slow
def test_a_task_that_dies(tmp_path: Path) -> None:
    """The first of a job leaves it to be tried again; another one ends the job, which names it."""
    with swept(tmp_path, "0,1") as (slurm, process, (first, second)):
        slurm.jobs[0].tasks[0].kill()
        slurm.jobs[1].tasks[3].kill()
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1, said
    assert summary(first)["status"] == "finished"
    assert len(summary(first)["resumes"]) == 1
    failed = summary(second)
    assert failed["status"] == "failed"
    for fact in ("rank 3", "gone", "after step"):
        assert fact in failed["message"]
