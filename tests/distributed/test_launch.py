"""Ranks that optrun starts itself: exit codes, signals, ranks that die or hang, starting again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optrun.api import run as run_from_python
from optrun.artifacts.lock import starting
from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import ConfigError
from optrun.launch.rank_checks import idle_note
from tests.preloaded import Program, optrun_preloaded, program
from tests.running import TINY_GPT, composed, optrun, optrun_process, summary, write_text

RANKS = ["distributed=ddp", "training.nproc_per_node=2", "training.device=cpu"]
PATIENCE = 240.0
"""Seconds, for a busy machine."""


def tokens(folder: Path, *more: str) -> list[str]:
    """A run of two ranks that saves often, with its data in a folder."""
    given = [token.replace("n_layer=2", "n_layer=1") for token in TINY_GPT]
    own = [
        "data=files",
        f"data.train={write_text(folder, 60)}",
        "training.per_device_train_batch_size=2",
    ]
    every = [*RANKS, *given, *own, "checkpoint.save_steps=2", *more]
    return list({token.split("=", 1)[0]: token for token in every}.values())  # of each key the last


ENDLESS = [
    "training.max_steps=1000000",
    "training.eval_steps=1000000",
    "training.logging_steps=1000",
]


def ranks_of(agent: int) -> list[int]:
    """Processes of the ranks that an agent has started, by rank.

    Each leads a session of its own.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        if int(fields[1]) == agent and int(fields[3]) == pid and fields[0] not in "ZX":
            found.append(pid)
    return sorted(found)


def has_saved(run: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step, or a later one that has taken its place."""
    folders = (run / "checkpoints").glob("step-*")
    steps = [folder.name.removeprefix("step-") for folder in folders]
    return any(text.isdecimal() and int(text) >= step for text in steps)


class Started:
    """A run under way that has saved, and its ranks."""

    def __init__(self, process: Program, run: Path, step: int = 2) -> None:
        self.process, self.run = process, run
        deadline = time.monotonic() + PATIENCE
        while not has_saved(run, step):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "it has not saved"
            time.sleep(0.05)
        self.ranks = ranks_of(process.pid)
        assert len(self.ranks) == 2

    def end(self) -> tuple[int, str]:
        """Exit code and what was printed; no rank is left."""
        said = self.process.communicate(timeout=PATIENCE)[0]
        self.gone()
        return self.process.returncode, said

    def gone(self) -> None:
        """Wait until no rank runs any more."""
        deadline = time.monotonic() + PATIENCE
        while any(is_running(pid) for pid in self.ranks):
            assert time.monotonic() < deadline, "a rank is left behind"
            time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def started(folder: Path, *more: str) -> Iterator[Started]:
    given = tokens(folder, *ENDLESS, "hydra.run.dir=run", *more)
    with program("optrun", given, folder) as process:
        begun = Started(process, folder / "run")
        try:
            yield begun
        finally:
            for pid in begun.ranks:
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


def whole(run: Path) -> int:
    """The step of the newest whole checkpoint."""
    newest, damaged = latest_complete(RunDir(run))
    assert newest is not None
    assert not damaged
    return int(newest.name.removeprefix("step-"))


def test_a_run_on_ranks_from_its_start_to_its_end(tmp_path: Path) -> None:
    done = optrun_preloaded(
        *tokens(tmp_path, "training.max_steps=3", "hydra.run.dir=run"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    assert summary(run.path)["status"] == "finished"
    assert run.rank_log(1).is_file()
    assert not run.rank_log(0).exists()
    assert done.stdout.count("step 3/3") + done.stdout.count("eval/loss") >= 1
    assert "rank-1" not in done.stdout
    assert optrun("verify", str(run.path)) == 0


def test_a_rank_that_python_itself_starts(tmp_path: Path) -> None:
    """Nothing is forked here: the agent and its rank import what they need."""
    given = tokens(
        tmp_path, "training.max_steps=1", "training.nproc_per_node=1", "hydra.run.dir=run"
    )
    done = optrun_process(*given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["status"] == "finished"


def test_sigterm_to_the_agent_stops_all_at_the_same_step(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        run.process.send_signal(signal.SIGTERM)
        code, said = run.end()
    assert code == 75, said
    assert said.count("SIGTERM received after step") == 1
    done = summary(run.run)
    assert done["status"] == "interrupted"
    assert whole(run.run) == done["global_step"]
    assert (run.run / "curves.png").is_file(), "rank 0 has come to its end"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, rank: int) -> None:
    with started(tmp_path) as run:
        os.kill(run.ranks[rank], signal.SIGKILL)
        code, said = run.end()
    assert code == 1
    for fact in (f"rank {rank}", "SIGKILL", "after step"):
        assert fact in said
    assert "Traceback" not in said
    done = summary(run.run)
    assert done["status"] == "failed"
    assert f"rank {rank} was ended by SIGKILL" in done["message"]
    assert whole(run.run) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_a_rank_stops_all(tmp_path: Path, rank: int) -> None:
    with started(tmp_path) as run:
        os.kill(run.ranks[rank], signal.SIGTERM)
        code, said = run.end()
    assert code == 75, said
    assert whole(run.run) == summary(run.run)["global_step"]


@pytest.mark.slow
def test_a_signal_to_agent_and_ranks_at_once_is_one_request(tmp_path: Path) -> None:
    """As SLURM sends it."""
    with started(tmp_path) as run:
        for pid in (run.process.pid, *run.ranks):
            os.kill(pid, signal.SIGTERM)
        code, said = run.end()
    assert code == 75, said
    assert whole(run.run) == summary(run.run)["global_step"]


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "training.max_seconds=100000") as run:
        for pid in run.ranks:
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            run.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        time.sleep(1.5)
        for pid in run.ranks:
            os.kill(pid, signal.SIGCONT)
        code, said = run.end()
    assert code in (75, 143), said
    assert whole(run.run) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "distributed"), [(0, "ddp"), (1, "fsdp")])
def test_a_rank_that_hangs_is_named_with_its_phase(
    tmp_path: Path, rank: int, distributed: str
) -> None:
    with started(tmp_path, f"distributed={distributed}", "distributed.timeout_seconds=5") as run:
        os.kill(run.ranks[rank], signal.SIGSTOP)
        code, said = run.end()
    assert code == 1
    for fact in (
        f"rank {rank}",
        "5 s",
        "distributed.timeout_seconds",
        "after step",
        "stopped by a signal",
    ):
        assert fact in said
    assert whole(run.run) >= 2


STUCK = """
import time
from dataclasses import dataclass

import optrun


@dataclass(kw_only=True)
class StuckConfig:
    at: int


@optrun.register_callback("stuck", schema=StuckConfig)
class Stuck:
    def __init__(self, at):
        self.at = at

    def on_step(self, training, result):
        while training.global_step == self.at:
            time.sleep(1)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_in_python_is_told_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    given = tokens(
        tmp_path,
        "distributed.timeout_seconds=20",
        "callbacks.stuck.at=3",
        "training.max_steps=4",
        "hydra.run.dir=run",
    )
    done = optrun_preloaded("--plugin", "stuck.py", *given, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    for fact in (
        "rank 0",
        "no heartbeat for 20 s (distributed.timeout_seconds)",
        "raise distributed.timeout_seconds",
        "stuck.py:",
        "training after step 2",
    ):
        assert fact in done.stderr


@pytest.mark.slow
def test_nobody_and_nothing_outlives_a_starter_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with started(tmp_path) as run:
        assert not list((tmp_path / "temporary").iterdir()), "the command line lies nowhere"
        run.process.kill()
        run.process.wait()
        run.gone()
    assert summary(run.run)["status"] == "interrupted"
    assert whole(run.run) == summary(run.run)["global_step"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_ranks_start_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "distributed.max_restarts=1") as run:
        os.kill(run.ranks[1], signal.SIGKILL)
        run.gone()
        before = whole(run.run)
        again = Started(run.process, run.run, before + 2)
        again.process.send_signal(signal.SIGTERM)
        code, said = again.end()
    assert code == 75, said
    assert "Starting again, 1 of 1" in said
    assert "resuming from" in said
    assert summary(run.run)["global_step"] > before


@pytest.mark.slow
def test_another_start_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with started(tmp_path) as run:
        for more in (tokens(tmp_path, *ENDLESS, "hydra.run.dir=run"), ["resume=run"]):
            other = optrun_preloaded(*more, cwd=tmp_path)
            assert other.returncode == 5, other.stderr
            assert "another process writes this run" in other.stderr
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 75


@pytest.mark.slow
def test_a_refusal_of_the_ranks_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    """What only the ranks can know: here a model that is not there."""
    given = tokens(tmp_path, "model=pretrained", "model.path=nowhere", "hydra.run.dir=run")
    given = [token for token in given if not token.startswith(("model.config", "model.vocab"))]
    refused = optrun_preloaded(*given, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("model.path=nowhere") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (["training.nproc_per_node=2"], ["training.nproc_per_node=2", "distributed=none"]),
        ([*RANKS, "training.device=cuda:1"], ["training.device=cuda:1", "CUDA_VISIBLE_DEVICES"]),
        ([*RANKS, "distributed.backend=foo"], ["distributed.backend=foo", "gloo"]),
        ([*RANKS, "distributed.backend=nccl"], ["distributed.backend=nccl"]),
        ([*RANKS, "training.global_batch_size=9"], ["training.global_batch_size=9", "2 ranks"]),
        (
            ["distributed=fsdp", *RANKS[1:], "distributed.data_parallel_shard_degree=3"],
            ["shard_degree=3", "2"],
        ),
        (
            [*RANKS, "distributed.nnodes=2"],
            ["distributed.nnodes", "torchrun --nnodes=N", "--rdzv-endpoint=HOST:29500"],
        ),
        ([*RANKS, "distributed.min_nnodes=2"], ["distributed.min_nnodes", "torchrun --nnodes=N"]),
        ([*RANKS, "distributed.rdzv_endpoint=a:1"], ["distributed.rdzv_endpoint", "torchrun"]),
        (
            [*RANKS, "distributed.save_timeout_seconds=9"],
            ["distributed.save_timeout_seconds", "distributed.timeout_seconds"],
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_a_directory_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    facts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    last = {token.split("=")[0]: token for token in given}  # of each key the last
    assert optrun(*last.values(), "hydra.run.dir=run") == 2
    said = capsys.readouterr().err
    for fact in facts:
        assert fact in said
    assert not (tmp_path / "run").exists()


def test_ranks_need_files_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a system other than Linux."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("os.memfd_create")
    assert optrun(*RANKS, "hydra.run.dir=run") == 2
    assert "distributed=ddp: ranks share files in memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_start_beside_another_is_refused_before_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the seconds in which the other has a directory, and its rank 0 no lock yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with starting(RunDir("run").lock):
        assert optrun(*tokens(tmp_path, "hydra.run.dir=run")) == 5
    said = capsys.readouterr().err
    assert said.count("run: another process writes this run") == 1
    assert not RunDir("run").summary.exists()
    assert not RunDir("run").rank_log(1).exists(), "no rank was started"


def test_more_ranks_than_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert optrun("distributed=ddp", "training.nproc_per_node=3", "hydra.run.dir=run") == 2
    said = capsys.readouterr().err
    for fact in ("training.nproc_per_node=3", "2"):
        assert fact in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "gpus", "told"),
    [
        ([], 4, True),
        (["training.device=cuda"], 2, True),
        (["training.device=cpu"], 4, False),
        ([], 1, False),
        (["distributed=ddp"], 4, False),
    ],
)
def test_idle_gpus_are_told(
    monkeypatch: pytest.MonkeyPatch, given: list[str], gpus: int, told: bool
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    note = idle_note(composed(*given))
    assert (note is not None) is told
    if note is not None:
        for fact in (f"1 of {gpus} GPUs", "distributed=none", "distributed=ddp"):
            assert fact in note


@pytest.mark.slow
def test_from_python_ranks_are_started_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tokens(tmp_path, "training.max_steps=2", "hydra.run.dir=run")
    (tmp_path / "mine.py").write_text(
        "import json, optrun\n"
        f"done = optrun.run({given!r}, quiet=True)\n"
        "print(json.dumps([done.summary['status'], sorted(done.metrics)]))\n"
    )
    done = optrun_preloaded(cwd=tmp_path, module="mine")
    assert done.returncode == 0, done.stderr
    status, metrics = json.loads(done.stdout)
    assert status == "finished"
    assert "eval/loss" in metrics
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError) as refused:
        run_from_python(tokens(tmp_path, "hydra.run.dir=other"), quiet=True)
    for fact in ("WORLD_SIZE=2", "optrun.run"):
        assert fact in str(refused.value)
