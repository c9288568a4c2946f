"""Several machines, as several agents on one.

They run the same thing or nothing, and any of them may die.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import OptrunError
from optrun.distributed.world import World
from optrun.training.replicas import refuse_parted
from tests.distributed.ranked_runs import batches, differences, rows
from tests.distributed.test_launch import PATIENCE, ranks_of, tokens
from tests.distributed.test_launch_others import free_port, joined
from tests.preloaded import Program, program
from tests.ranks import run_ranks
from tests.running import summary

NODES = [
    "training.nproc_per_node=1",
    "distributed.nnodes=2",
    "distributed.timeout_seconds=120",
    "resume=auto",
]
STEPS = 200


def parted_ranks_are_named(rank: int) -> None:
    world = World(rank, 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2).bfloat16())
    refuse_parted(model, world, 3)
    if rank:
        with torch.no_grad():
            model[1].weight[1] = 1.0078125  # one bit
    with pytest.raises(OptrunError) as parted:
        refuse_parted(model, world, 4)
    for fact in ("rank 1", "rank 0", "step 4", "first tensor is 1.weight"):
        assert fact in str(parted.value)


def test_ranks_whose_weights_part_are_named(tmp_path: Path) -> None:
    run_ranks(tmp_path, parted_ranks_are_named)


# Agents
# -------------------------------------------------------------------------------------------------------------


@contextmanager
def nodes(
    commands: Sequence[Sequence[str]], folders: Sequence[Path], module: str = "optrun"
) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(program(module, command, folder))
            for command, folder in zip(commands, folders, strict=True)
        ]


def ended(programs: Sequence[Program]) -> tuple[list[int], str]:
    """Exit codes, and what was printed."""
    said = [one.communicate(timeout=PATIENCE)[0] for one in programs]
    return [one.wait() for one in programs], "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "texts", "facts"),
    [
        (["lr=1e-3", "lr=5e-2"], ["one", "one"], ["lr=0.05", "0.001"]),
        (["seed=0", "seed=0"], ["one", "two"], ["data.train"]),
    ],
)
def test_machines_that_would_not_run_the_same(
    tmp_path: Path, more: list[str], texts: list[str], facts: list[str]
) -> None:
    """Another value on one of them, or another content under the same path.

    Told before a step, by both.
    """
    folders = [tmp_path / name for name in ("a", "b")]
    endpoint = f"distributed.rdzv_endpoint=127.0.0.1:{free_port()}"
    given = [
        token
        for token in tokens(tmp_path)
        if not token.startswith(("data.train=", "training.nproc_per_node="))
    ]
    commands = []
    for folder, own, text in zip(folders, more, texts, strict=True):
        folder.mkdir()
        (folder / "rows.txt").write_text(
            "\n".join(f"{text} line {number} of text" for number in range(60))
        )
        commands.append(
            [
                *given,
                *NODES[:3],
                endpoint,
                own,
                "data.train=rows.txt",
                f"hydra.run.dir={tmp_path / 'run'}",
            ]
        )
    with nodes(commands, folders) as programs:
        codes, said = ended(programs)
    assert codes == [2, 2], said
    for fact in (*facts, "(rank 1)", "(rank 0)", "Expected the same on all ranks"):
        assert said.count(fact) >= 2, said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def weights(run: Path) -> str:
    return hashlib.sha256(
        (RunDir(run).checkpoint(STEPS) / "model.safetensors").read_bytes()
    ).hexdigest()


def figures(run: Path) -> list[dict[str, object]]:
    wanted = ("train/", "eval/")
    return [
        {name: row[name] for name in row if name.startswith(wanted)} for row in rows(run).values()
    ]


def commands_of(folder: Path, name: str) -> list[str]:
    more = [f"hydra.run.dir={name}", "checkpoint.save_steps=10", f"training.max_steps={STEPS}"]
    more += ["distributed.max_restarts=4", f"distributed.rdzv_endpoint=127.0.0.1:{free_port()}"]
    return tokens(folder, *NODES, *more, "training.logging_steps=10", "training.eval_steps=100")


def wait_for(condition: Callable[[], bool], programs: Sequence[Program]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, [one.poll() for one in programs]
        time.sleep(0.02)


@pytest.mark.slow
def test_a_rank_and_a_whole_machine_die_and_nobody_can_tell(tmp_path: Path) -> None:
    """The rank is started again by its agent; the machine comes back with the same command."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with nodes([commands_of(tmp_path, "straight")] * 2, [tmp_path] * 2) as programs:
        codes, said = ended(programs)
    assert codes == [0, 0], said
    command = commands_of(tmp_path, "killed")
    with ExitStack() as stack:
        first, second = stack.enter_context(nodes([command] * 2, [tmp_path] * 2))
        wait_for(lambda: RunDir(killed).checkpoint(10).is_dir(), [first, second])
        (rank,) = ranks_of(second.pid)
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: bool(set(ranks_of(second.pid)) - {rank}), [first, second])
        for pid in (second.pid, *ranks_of(second.pid)):
            os.kill(pid, signal.SIGKILL)
        second.wait()
        again = stack.enter_context(program("optrun", command, tmp_path))
        codes, said = ended([first, again])
    assert codes == [0, 0], said
    assert "SIGKILL" in said
    assert "Starting again" in said
    assert summary(killed)["status"] == "finished"
    assert weights(killed) == weights(straight)
    assert figures(killed) == figures(straight)


@pytest.mark.slow
def test_the_machine_that_is_left_goes_on_with_the_same_batch(tmp_path: Path) -> None:
    """The other one dies, comes back while the run goes on or is at its end, and the losses are those of both."""
    more = ["distributed.min_nnodes=1", "training.global_batch_size=4"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with nodes([[*commands_of(tmp_path, "straight"), *more]] * 2, [tmp_path] * 2) as programs:
        codes, said = ended(programs)
    assert codes == [0, 0], said
    command = [*commands_of(tmp_path, "killed"), *more]
    with ExitStack() as stack:
        first, second = stack.enter_context(nodes([command] * 2, [tmp_path] * 2))
        wait_for(lambda: RunDir(killed).checkpoint(10).is_dir(), [first, second])
        begun = summary(killed)["resumes"]
        for pid in (second.pid, *ranks_of(second.pid)):
            os.kill(pid, signal.SIGKILL)
        second.wait()
        wait_for(lambda: summary(killed)["resumes"] != begun, [first])
        again = stack.enter_context(program("optrun", command, tmp_path))
        codes, said = ended([first, again])
    assert codes == [0, 0], said
    assert "Starting again" in said
    assert summary(killed)["status"] == "finished"
    assert batches(killed) == batches(straight)
    found = differences(straight, killed, ("train/loss", "eval/loss"))
    assert max(found.values()) <= 1e-6, found


@pytest.mark.slow
def test_torchrun_on_two_machines_starts_its_ranks_again(tmp_path: Path) -> None:
    own = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=2",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]
    own += ["--rdzv-backend=c10d", "-m", "optrun"]
    given = joined(
        tmp_path,
        "hydra.run.dir=run",
        "resume=auto",
        "training.max_steps=300",
        "checkpoint.save_steps=10",
    )
    run = tmp_path / "run"
    with nodes([[*own, *given]] * 2, [tmp_path] * 2, "torch.distributed.run") as programs:
        wait_for(lambda: RunDir(run).checkpoint(10).is_dir(), programs)
        os.kill(ranks_of(programs[1].pid)[0], signal.SIGKILL)
        codes, said = ended(programs)
    assert codes == [0, 0], said
    assert summary(run)["status"] == "finished"


@pytest.mark.slow
def test_resume_over_two_nodes_is_certified(tmp_path: Path) -> None:
    """Ranks, agents and whole nodes are killed on either; the run ends, and is the undisturbed one.

    `OPTRUN_NODE_KILLS` says how many kills in all (6); 200 is the whole proof.
    """
    kills = int(os.environ.get("OPTRUN_NODE_KILLS", "6"))
    own = ["--steps", "16", "--kills", str(kills), "--seed", "2", "--json", "--out", "paper.json"]
    given = tokens(tmp_path, *NODES[:2], "distributed.timeout_seconds=60")
    given = [token for token in given if not token.startswith("checkpoint.")]
    command = ["certify", "resume", *given, *own]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [
        sys.executable,
        "-m",
        "tests.distributed.forked_ranks",
        *command,
    ]  # it forks itself: by no preloaded one
    done = subprocess.run(
        program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300 + 60 * kills
    )
    assert done.returncode == 0, done.stdout + done.stderr
    paper = json.loads((tmp_path / "paper.json").read_text(encoding="utf-8"))
    assert paper["holds"] is True
    assert len(paper["kills"]) == kills == sum(paper["victims"].values())
    assert {kill["victim"] for kill in paper["kills"]} <= {"a rank", "an agent", "a node"}
    assert all(section["difference"] is None for section in paper["compared"])
