"""Shards written beside training.

By threads that share a group with nobody, and ranks that die at any moment.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import ProcessExitedException

from optrun.artifacts import sharded as sharded_of
from optrun.artifacts.async_writer import AsyncWriter, Result, SaveRequest
from optrun.artifacts.checkpoint import load_checkpoint
from optrun.artifacts.retention import Retention, clean_leftovers, latest_complete, step_of
from optrun.artifacts.run_check import run_problems
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import StorageError
from optrun.cli import main as cli
from tests import preloaded
from tests.distributed.shards import (
    assert_equal,
    fsdp_snapshot,
    group,
    in_ranks,
    make_run,
    whole_state,
)
from tests.distributed.test_sharded_faults import MODEL, flip, full_disk
from tests.ranks import rank_main

KILLS = int(os.environ.get("OPTRUN_KILLS", "8"))


def writer_of(run: RunDir, rank: int, keep_last: int = 2) -> AsyncWriter:
    retention = Retention(run, keep_last) if rank == 0 else None
    return AsyncWriter(run, retention, group())


def order(step: int) -> SaveRequest:
    return SaveRequest(
        fsdp_snapshot(step), ranked=[1], keep_best=1, keep=[], before_commit=lambda: None
    )


def written(writer: AsyncWriter, step: int) -> Result:
    """Save a step while this thread talks to the other ranks without a pause."""
    writer.start(order(step))
    for number in range(50):
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        assert total.item() == 2 * number
    result = writer.result(wait=True)
    assert result is not None
    return result


def saves_beside_training(folder: Path, rank: int) -> None:
    run = RunDir(folder)
    writer = writer_of(run, rank)
    for step in range(1, 5):
        assert written(writer, step).error is None
    assert not writer.busy
    assert not writer.ended


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("saved") / "run")
    run.metrics.write_text("")
    in_ranks(run.path, partial(saves_beside_training, run.path))
    return run


def test_the_newest_and_the_best_are_kept(saved: RunDir) -> None:
    assert [step_of(folder) for folder in checkpoint_folders(saved)] == [4, 3, 1]
    assert (saved.best.read_text(), saved.last.read_text()) == (
        "step-00000001\n",
        "step-00000004\n",
    )
    for folder in checkpoint_folders(saved):
        assert_equal(load_checkpoint(folder).model, whole_state(step_of(folder))[0])


def test_verify_covers_shards(saved: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_problems(saved) == []
    assert cli.run(["verify", str(saved.path)]) == 0, capsys.readouterr().err
    flip(saved.checkpoint(4) / MODEL)
    assert cli.run(["verify", str(saved.path)]) == 4
    assert f"step-00000004/{MODEL}" in capsys.readouterr().err
    flip(saved.checkpoint(4) / MODEL)


def test_a_shard_that_changes_is_looked_at_again(saved: RunDir) -> None:
    """What retention has verified once it knows by size and time of each file, those in folders
    too.
    """
    retention = Retention(saved, keep_last=2)
    assert retention.complete([4, 3], 2) == [4, 3]
    flip(saved.checkpoint(4) / MODEL)
    assert retention.complete([4, 3], 2) == [3]
    flip(saved.checkpoint(4) / MODEL)
    assert retention.complete([4, 3], 2) == [4, 3]


def goes_on_after_a_full_disk(folder: Path, rank: int) -> None:
    writer = writer_of(RunDir(folder), rank)
    original = sharded_of.write_tensors
    if rank == 1:
        sharded_of.write_tensors = full_disk  # type: ignore[assignment]
    failed = written(writer, 1)
    assert isinstance(failed.error, StorageError)
    assert (failed.folder, "rank 1: No space left" in str(failed.error)) == (None, True)
    sharded_of.write_tensors = original
    assert writer_result(writer, failed) == RunDir(folder).checkpoint(1)


def writer_result(writer: AsyncWriter, failed: Result) -> Path | None:
    writer.start(failed.request)  # as the manager tries again: the same snapshot
    result = writer.result(wait=True)
    assert result is not None
    return result.folder


def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    in_ranks(run.path, partial(goes_on_after_a_full_disk, run.path))
    assert_equal(load_checkpoint(run.checkpoint(1)).model, whole_state(1)[0])


def saves_for_ever(folder: Path, begin: int, rank: int) -> None:
    writer = writer_of(RunDir(folder), rank)
    for step in count(begin):
        taken = order(step)
        writer.start(taken)
        result = writer.result(wait=True)
        if result is None or result.error is not None:
            os._exit(1)  # the other rank is gone
        time.sleep(0.01)


@pytest.mark.slow
def test_ranks_killed_at_random(tmp_path: Path) -> None:
    """At least half of the kills fall inside a save; each time the newest checkpoint is whole, and
    never an older one than was seen before."""
    run = make_run(tmp_path / "run")
    chance = random.Random(0)
    inside, newest = 0, 0
    for kill in range(KILLS):
        rendezvous = tmp_path / f"meeting-{kill}"
        rendezvous.mkdir()
        preloaded.server()
        check = partial(saves_for_ever, run.path, newest + 1)
        started = mp.start_processes(
            rank_main,
            args=(str(rendezvous), 2, check),
            nprocs=2,
            join=False,
            start_method="forkserver",
        )
        assert started is not None
        while not run.checkpoint(newest + 1).exists():
            time.sleep(0.01)
            assert all(process.is_alive() for process in started.processes)
        saving: list[Path] = []
        if inside < (kill + 2) // 2:
            while not saving:
                saving = list(run.checkpoints.glob(".saving-*"))
        time.sleep(chance.random() * 0.01)
        inside += bool(list(run.checkpoints.glob(".saving-*")))
        os.kill(chance.choice(started.pids()), signal.SIGKILL)
        with pytest.raises(ProcessExitedException):
            started.join()
        clean_leftovers(run)
        folder, wrong = latest_complete(run)
        assert folder is not None
        assert wrong == {}
        assert step_of(folder) > newest
        newest = step_of(folder)
        loaded = load_checkpoint(folder)
        assert_equal(loaded.model, whole_state(newest)[0])
        assert_equal(loaded.optimizer, whole_state(newest)[1])
    assert inside >= KILLS // 2
    print(f"{KILLS} kills, {inside} inside a save, {newest} checkpoints")
