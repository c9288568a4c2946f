"""Several machines, as two torchruns on one.

They run the same thing or nothing, and ranks and torchruns may die.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from optrun.artifacts.retention import latest_complete, step_of
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import OptrunError
from optrun.distributed.world import World
from optrun.training.replicas import refuse_different_weights
from tests.distributed.ranked_runs import rows
from tests.distributed.slurm_stand_in import Slurm
from tests.distributed.test_launch import PATIENCE, ranks_of
from tests.distributed.test_launch_others import free_port, joined
from tests.preloaded import Program, program
from tests.ranks import run_ranks
from tests.running import summary

ROOT = Path(__file__).parents[2]


def parted_ranks_are_named(rank: int) -> None:
    world = World(rank, 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2).bfloat16())
    refuse_different_weights(model, world, 3)
    if rank:
        with torch.no_grad():
            model[1].weight[1] = 1.0078125  # one bit
    with pytest.raises(OptrunError) as parted:
        refuse_different_weights(model, world, 4)
    for fact in ("rank 1", "rank 0", "step 4", "first tensor is 1.weight"):
        assert fact in str(parted.value)


def test_ranks_whose_weights_part_are_named(tmp_path: Path) -> None:
    run_ranks(tmp_path, parted_ranks_are_named)


# Two torchruns
# ------------------------------------------------------------------------------------------------


def torchrun(port: int, *words: str, ranks: int = 2, restarts: int = 0) -> list[str]:
    """The line of docs/distributed.md, after `torchrun`."""
    return [
        "--nnodes=2",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--max-restarts={restarts}",
        *("-m", "optrun"),
        *words,
    ]


@dataclass
class Torchruns:
    """Two torchruns under way, each started again whenever it ends badly, as a cluster would."""

    folder: Path
    words: list[str]
    run: RunDir
    restarts: int
    stack: ExitStack
    port: int = field(default_factory=free_port)
    programs: list[Program] = field(default_factory=list)

    def begin(self, node: int) -> None:
        """Start one of them."""
        begun = self.stack.enter_context(
            program(
                "torch.distributed.run",
                torchrun(self.port, *self.words, restarts=self.restarts),
                self.folder,
                {
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "OPTRUN_TEST_SPARES": str(2 * self.restarts + 2),
                },
            )
        )
        self.programs[node : node + 1] = [begun]

    def look(self) -> bool:
        """Start again what has ended badly; tell whether both have ended well."""
        for node, one in enumerate(self.programs):
            if one.poll():
                self.begin(node)
        return all(one.poll() == 0 for one in self.programs)

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until something is so; False: the run ended before."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.look():
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        return True

    def said(self) -> str:
        """What the torchruns of this folder have printed."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(".output-*")))


def committed(run: RunDir) -> int:
    """Step of the newest whole checkpoint; 0: there is none."""
    newest, _ = latest_complete(run)
    return 0 if newest is None else step_of(newest)


def killed_runs(folder: Path, words: list[str], kills: int, seed: int) -> tuple[RunDir, list[str]]:
    """Train on two torchruns, and kill a rank or a torchrun so often."""
    rng = random.Random(seed)
    run = RunDir(folder / "run")
    victims: list[str] = []
    with ExitStack() as stack:
        both = Torchruns(folder, words, run, kills + 5, stack)
        for node in range(2):
            both.begin(node)
        while len(victims) < kills:
            goal = committed(run) + rng.randint(1, 3)
            if not both.until(lambda goal=goal: committed(run) >= goal):
                break
            time.sleep(rng.uniform(0, 0.3))
            node = rng.randrange(2)
            victim = rng.choice(["rank", "rank", "torchrun"])
            pids = [both.programs[node].pid]
            if victim == "rank":
                pids = ranks_of(both.programs[node].pid)
            if not pids:
                continue
            try:
                os.kill(rng.choice(pids), signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
            victims.append(f"{victim} of torchrun {node}")
        both.until(lambda: False)
    return run, victims


def weights(run: RunDir) -> str:
    file = run.checkpoint(committed(run)) / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def figures(run: RunDir) -> list[dict[str, object]]:
    return [
        {name: row[name] for name in row if name.startswith(("train/", "eval/"))}
        for row in rows(run.path).values()
    ]


def words_of(folder: Path, steps: int) -> list[str]:
    return joined(
        folder,
        "hydra.run.dir=run",
        "resume=auto",
        f"training.max_steps={steps}",
        "training.logging_steps=1",
        "training.eval_steps=30",
        "checkpoint.save_steps=1",
        "distributed.timeout_seconds=60",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "texts", "facts"),
    [
        (["lr=1e-3", "lr=5e-2"], ["one", "one"], ["command line=", "lr=5e-2", "lr=1e-3"]),
        (["seed=0", "seed=0"], ["one", "two"], ["data.train"]),
    ],
)
def test_machines_that_would_not_run_the_same(
    tmp_path: Path, more: list[str], texts: list[str], facts: list[str]
) -> None:
    """Another value on one of them, or another content under the same path: told before a step."""
    port = free_port()
    given = [token for token in joined(tmp_path) if not token.startswith("data.train=")]
    with ExitStack() as stack:
        programs = []
        for node, (own, text) in enumerate(zip(more, texts, strict=True)):
            folder = tmp_path / str(node)
            folder.mkdir()
            lines = [f"{text} line {number} of text" for number in range(60)]
            (folder / "rows.txt").write_text("\n".join(lines))
            words = [*given, "data.train=rows.txt", f"hydra.run.dir={tmp_path / 'run'}", own]
            line = torchrun(port, *words, ranks=1)
            programs.append(stack.enter_context(program("torch.distributed.run", line, folder)))
        said = "".join(one.communicate(timeout=PATIENCE)[0] for one in programs)
    assert [one.wait() for one in programs] == [1, 1], said
    for fact in (*facts, "(rank 1)", "(rank 0)", "Start all ranks with the same"):
        assert fact in said, said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_ranks_and_torchruns_are_killed_and_nobody_can_tell(tmp_path: Path) -> None:
    """`OPTRUN_TORCHRUN_KILLS` says how many kills (3); the whole proof is of 20."""
    kills = int(os.environ.get("OPTRUN_TORCHRUN_KILLS", "3"))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    words = words_of(tmp_path, 20 + 8 * kills)
    undisturbed, _ = killed_runs(straight, words, 0, 0)
    run, victims = killed_runs(killed, words, kills, 1)
    assert len(victims) == kills
    assert summary(run.path)["status"] == "finished"
    assert weights(run) == weights(undisturbed)
    assert figures(run) == figures(undisturbed)


@pytest.mark.slow
def test_the_sbatch_file_of_the_page(tmp_path: Path) -> None:
    """SIGTERM to torchruns and ranks before the time is up; a rank is killed after that."""
    page = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    script = page.split("```sbatch\n", 1)[1].split("```", 1)[0]
    words = [
        word
        for word in words_of(tmp_path, 100000)
        if not word.startswith(("distributed=", "hydra.run.dir=", "resume="))
    ]
    run = RunDir(tmp_path / "run")
    for shown, here in {
        "--nproc-per-node=8": "--nproc-per-node=2",
        "distributed=fsdp": " ".join(["distributed=ddp", *words]),
        "/shared/run": str(run.path),
        ":29500": f":{free_port()}",
    }.items():
        assert shown in script
        script = script.replace(shown, here)
    (tmp_path / "job.sh").write_text(script)
    with Slurm(tmp_path / "slurm", tmp_path) as slurm:
        env = {**os.environ, **slurm.environment}
        job_file = str(tmp_path / "job.sh")
        subprocess.run(["sbatch", job_file], env=env, check=True, timeout=60)
        (job,) = slurm.jobs
        ranks = ranks_after_steps(run, slurm)
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        job.signal(signal.SIGTERM)
        wait_for(lambda: job.starts == 2, slurm)
        os.kill(ranks_after_steps(run, slurm)[0], signal.SIGKILL)
        ranks_after_steps(run, slurm)
        assert len(summary(run.path)["resumes"]) >= 2


def ranks_after_steps(run: RunDir, slurm: Slurm) -> list[int]:
    """Processes of all ranks, once they have saved three times more."""
    goal = committed(run) + 3
    wait_for(lambda: committed(run) >= goal, slurm)
    return [rank for task in slurm.jobs[0].tasks for rank in ranks_of(task.pid)]


def wait_for(condition: Callable[[], bool], slurm: Slurm) -> None:
    deadline = time.monotonic() + PATIENCE / 2
    while not condition():
        said = [task.communicate(0)[0] for job in slurm.jobs for task in job.tasks if task.poll()]
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
