"""Ranks that another launcher starts: torchrun, srun, mpirun.

And what they are told where it goes wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from tests.distributed.test_launch import ENDLESS, Started, has_saved, tokens
from tests.preloaded import optrun_preloaded, program
from tests.running import summary


def joined(folder: Path, *more: str) -> list[str]:
    """The command line of a rank that is started by another launcher."""
    return [
        token for token in tokens(folder, *more) if not token.startswith("training.nproc_per_node=")
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def slurm(rank: int, size: int = 2) -> dict[str, str]:
    """The environment of a task of srun on one machine."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }


def mpi(rank: int, size: int = 2) -> dict[str, str]:
    """The environment of a process of Open MPI on one machine."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def run_all(
    folder: Path, environments: list[dict[str, str]], given: list[str]
) -> list[subprocess.CompletedProcess[str]]:
    """Start a process for each environment, and wait for all."""
    port = str(free_port())
    with ExitStack() as stack:
        begun = [
            stack.enter_context(
                program("optrun", given, folder, {**env, "MASTER_PORT": port}, merged=False)
            )
            for env in environments
        ]
        said = [process.communicate(timeout=240) for process in begun]
        return [
            subprocess.CompletedProcess(process.args, process.wait(), out, err)
            for process, (out, err) in zip(begun, said, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, mpi])
def test_processes_of_a_launcher_become_ranks(tmp_path: Path, launcher: object) -> None:
    """Rank 0 composes, and sends the others what is to be run; it alone speaks."""
    assert callable(launcher)
    first, second = run_all(
        tmp_path,
        [launcher(0), launcher(1)],
        joined(tmp_path, "training.max_steps=2", "hydra.run.dir=run"),
    )
    assert (first.returncode, second.returncode) == (0, 0), (first.stderr, second.stderr)
    assert "step 2/2" in first.stdout
    assert second.stdout == ""
    run = RunDir(tmp_path / "run")
    assert summary(run.path)["status"] == "finished"
    assert run.rank_log(1).is_file()


@pytest.mark.slow
def test_what_rank_0_refuses_it_tells_alone(tmp_path: Path) -> None:
    first, second = run_all(
        tmp_path, [slurm(0), slurm(1)], joined(tmp_path, "optimizer=lam", "hydra.run.dir=run")
    )
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.count("optimizer=lam:") == 1
    assert "lamb" in first.stderr
    assert second.stderr == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["training.nproc_per_node=2"], ["training.nproc_per_node", "srun"]),
        (["distributed.max_restarts=2"], ["distributed.max_restarts", "srun"]),
        (["-m", "seed=0,1"], ["sweep", "srun"]),
    ],
)
def test_what_the_launcher_decides_is_not_told_twice(
    tmp_path: Path, given: list[str], facts: list[str]
) -> None:
    first, second = run_all(tmp_path, [slurm(0), slurm(1)], [*joined(tmp_path), *given])
    assert (first.returncode, second.returncode) == (2, 2)
    for fact in facts:
        assert fact in first.stderr


@pytest.mark.slow
def test_a_plugin_that_is_another_one_on_a_rank(tmp_path: Path) -> None:
    plugin = (
        "from dataclasses import dataclass\nimport optrun\n@dataclass\nclass MineConfig:\n    size:"
        " int = 1\n"
    )
    plugin += '@optrun.register_callback("mine", schema=MineConfig)\nclass Mine:\n    pass\n'
    homes = [tmp_path / "zero", tmp_path / "one"]
    for number, home in enumerate(homes):
        home.mkdir()
        (home / "mine.py").write_text(plugin + f"# {number}\n")
    given = [*joined(tmp_path), "--plugin", "mine", f"hydra.run.dir={tmp_path / 'run'}"]
    first, second = run_all(
        tmp_path,
        [
            {**slurm(rank), "PYTHONPATH": f"{homes[rank]}:{os.environ.get('PYTHONPATH', '')}"}
            for rank in range(2)
        ],
        given,
    )
    assert (first.returncode, second.returncode) == (2, 2), (first.stderr, second.stderr)
    for fact in ("mine", "rank 1", "sha256", "since the run was started"):
        assert fact in first.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_rendezvous_that_nobody_joins_ends(tmp_path: Path) -> None:
    alone = {**slurm(0), "MASTER_PORT": str(free_port())}
    done = optrun_preloaded(
        *joined(tmp_path, "distributed.timeout_seconds=2", "hydra.run.dir=run"),
        cwd=tmp_path,
        env=alone,
    )
    assert done.returncode == 2
    for fact in ("1 of 2 ranks", "2 s", "missing: rank 1"):
        assert fact in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """SIGTERM stops the ranks at one step, saved, and leaves no temporary file.

    It may reach torchrun and ranks at once, as SLURM sends it, and torchrun passes its own on. The
    exit code is torchrun's.
    """
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    given = [
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "optrun",
        *joined(tmp_path, "hydra.run.dir=run", *ENDLESS),
    ]
    with program("torch.distributed.run", given, tmp_path) as process:
        run = Started(process, tmp_path / "run")
        for pid in run.ranks if at_once else []:
            os.kill(pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, said = run.end()
    assert "stopped at once" not in said
    done = summary(tmp_path / "run")
    assert done["status"] == "interrupted"
    assert RunDir(tmp_path / "run").checkpoint(done["global_step"]).is_dir()
    assert not list((tmp_path / "temporary").glob("optrun*"))


@pytest.mark.slow
def test_torchrun_without_distributed(tmp_path: Path) -> None:
    torchrun = ["--standalone", "--nproc-per-node=2", "-m", "optrun", "hydra.run.dir=run"]
    done = optrun_preloaded(*torchrun, cwd=tmp_path, module="torch.distributed.run")
    assert done.returncode == 1
    assert done.stderr.count("Add distributed=ddp") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_of_a_launcher_that_is_gone_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    with ExitStack() as stack:
        given = joined(tmp_path, "hydra.run.dir=run", *ENDLESS)
        first, second = (
            stack.enter_context(
                program("optrun", given, tmp_path, {**slurm(rank), "MASTER_PORT": port})
            )
            for rank in range(2)
        )
        run = RunDir(tmp_path / "run")
        while not has_saved(run.path, 2):
            assert first.poll() is None
        second.kill()
        said = first.communicate(timeout=240)[0]
    assert first.returncode == 1
    for fact in ("rank 1", "gone", "after step"):
        assert fact in said
