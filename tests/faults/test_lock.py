"""One run, one writer; a dead one does not block."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.checkpoint import load_checkpoint, open_verified, save_checkpoint
from optrun.artifacts.lock import RunLock, refuse_held
from optrun.artifacts.retention import Retention, latest_complete
from optrun.base.errors import CheckpointError, LockedError, StorageError
from optrun.certify.trial import Child
from optrun.cli import main as cli
from tests.faults.checkpoints import make_run, snapshot
from tests.faults.runs import Go, Straight
from tests.faults.syscalls import in_child

HOLD = """
import sys, time
from pathlib import Path
from optrun.artifacts.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    process = holder(tmp_path / ".lock")
    try:
        with pytest.raises(LockedError) as refused, RunLock(tmp_path / ".lock"):
            pass
        assert refused.value.exit_code == 5
        said = str(refused.value)
        assert f"process {process.pid} on {socket.gethostname()}, since 20" in said
        assert "hydra.run.dir=DIR" in said
    finally:
        process.kill()
        process.communicate()
    with RunLock(tmp_path / ".lock"):  # at once: the kernel's lock died with the process
        pass


def test_somebody_who_only_looks_costs_nobody_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_EX)
    looks = iter([looking])
    # Once only: the number of a closed descriptor is the next one's.
    monkeypatch.setattr(
        time, "sleep", lambda _: [os.close(descriptor) for descriptor in itertools.islice(looks, 1)]
    )
    with RunLock(tmp_path / ".lock"), pytest.raises(LockedError):
        refuse_held(tmp_path / ".lock")


def test_exactly_one_of_many_runs(tmp_path: Path) -> None:
    """Ten pairs that start together: one gets it, the other exits with 5."""

    def contend() -> None:
        try:
            with RunLock(tmp_path / ".lock"):
                time.sleep(0.05)
        except LockedError:
            os._exit(5)

    for _ in range(10):
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    contend()
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert codes in ([0, 5], [0, 0])  # [0, 0]: the first had ended before the second began
    assert codes is not None


@pytest.mark.slow
def test_exactly_one_of_two_real_runs(straight: Straight, go: Go, tmp_path: Path) -> None:
    """The same command twice, a moment apart: one trains, the other says who does."""
    chance, refused = random.Random(4), 0
    for pair in range(4):
        words = [*straight.words, f"hydra.run.dir=run-{pair}", "resume=auto"]
        children = []
        for number in range(2):
            children.append(Child(cli.run, words, tmp_path / f"{pair}-{number}.log"))
            time.sleep(chance.uniform(0, 0.2))
        try:
            codes = [child.wait() for child in children]
        finally:
            for child in children:
                child.kill()
        # 0 and 0: the second came when the first had ended, and found nothing to do.
        logs = [(tmp_path / f"{pair}-{number}.log").read_text() for number in range(2)]
        assert sorted(codes) in ([0, 5], [0, 0]), logs[codes.index(max(codes))]
        if 5 in codes:
            refused += 1
            winner = children[codes.index(0)].process
            assert f"process {winner} on {socket.gethostname()}" in logs[codes.index(5)]
        straight.same(tmp_path / f"run-{pair}")
    assert refused >= 2


def test_a_worker_that_outlives_a_killed_holder_does_not_keep_it(tmp_path: Path) -> None:
    """Loader workers are forked while the lock is held; the copy they inherit must not count."""
    ready, told = os.pipe()
    parent = os.fork()
    if parent == 0:
        with RunLock(tmp_path / ".lock"):
            worker = os.fork()
            if worker == 0:
                os.write(told, f"{os.getpid()}\n".encode())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(ready, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        os.kill(worker, 0)
        with RunLock(tmp_path / ".lock"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ready)
        os.close(told)


def test_a_worker_does_not_take_it_from_its_parent(tmp_path: Path) -> None:
    with RunLock(tmp_path / ".lock"):
        assert in_child(lambda: None) == 0

        def try_it() -> None:
            try:
                with RunLock(tmp_path / ".lock"):
                    pass
            except LockedError:
                os._exit(5)

        assert in_child(try_it) == 5


def test_a_stale_file_of_another_host_is_only_text(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(
        '{"pid": 1, "host": "elsewhere", "since": "2020-01-01 00:00:00"}'
    )
    with RunLock(tmp_path / ".lock"):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is a link"), RunLock(tmp_path / ".lock"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_file_system_without_locks_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(StorageError, match="OPTRUN_UNLOCKED=1") as refused,
        RunLock(tmp_path / ".lock"),
    ):
        pass
    assert refused.value.exit_code == 74
    monkeypatch.setenv("OPTRUN_UNLOCKED", "1")
    with RunLock(tmp_path / ".lock"):
        pass


@pytest.mark.parametrize(
    "file", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_a_file_deleted_while_a_checkpoint_is_read_is_named(tmp_path: Path, file: str) -> None:
    """By the retention of a run that goes on: between the check of the bytes and their use."""
    folder = make_run(tmp_path, (1,)).checkpoint(1)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=re.escape(file)):
        open_verified(folder, lazy=True)


def test_a_manifest_deleted_behind_a_look_at_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, (1,)).checkpoint(1)
    real = os.stat

    def looked(path: Any, **options: Any) -> os.stat_result:
        found = real(path, **options)
        if str(path).endswith("manifest.json"):
            Path(path).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "stat", looked)
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: (missing|cannot be read: No such file)"
    ):
        open_verified(folder, lazy=True)


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """While one process saves and deletes, another finds a whole checkpoint whenever it looks,
    without waiting.
    """
    run = make_run(tmp_path, (1,))

    def write() -> None:
        retention = Retention(run, keep_last=2)
        for step in range(2, 60):
            retention.trust(save_checkpoint(run, snapshot(step)))
            retention.delete_expired(set())

    child = os.fork()
    if child == 0:
        code = 1
        try:
            write()
            code = 0
        finally:
            os._exit(code)
    looked, last = 0, 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        folder, wrong = latest_complete(run)
        for reasons in wrong.values():
            assert (
                "missing" in reasons[0] or "cannot be read" in reasons[0]
            )  # deleted between listing and looking
        if folder is None:
            continue
        try:
            loaded = load_checkpoint(folder)
        except CheckpointError:
            continue
        assert loaded.model["weight"].equal(snapshot(loaded.global_step).model["weight"])
        assert loaded.global_step >= last
        looked, last = looked + 1, loaded.global_step
    assert looked > 5
    assert latest_complete(run)[0] == run.checkpoint(59)
