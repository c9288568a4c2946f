"""Leases of devices.

One at a time, those who wait in their turn, and none lost with who held it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import StorageError
from optrun.sweeper.devices import Device
from optrun.sweeper.pool import RANK_LOCKS, DevicePool, adopt, hold_as_rank
from tests.sweep import forked

pytestmark = pytest.mark.usefixtures("locks")


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pools(names: str, count: int = 2) -> tuple[list[DevicePool], Clock]:
    """Pools of several sweeps over the same devices.

    Locks of one process's open files exclude each other, too.
    """
    clock, found = Clock(), [Device(name, f"GPU-{name}") for name in names]
    return [DevicePool(found, clock=clock) for _ in range(count)], clock


def names_of(lease: Any) -> str:
    return "".join(lease.visible)


def test_a_device_is_leased_once() -> None:
    (one, other), _ = pools("ab")
    first, second = one.take(1), other.take(1)
    assert first is not None
    assert second is not None
    assert {names_of(first), names_of(second)} == {"a", "b"}
    assert one.take(1) is None
    one.release(first)
    third = other.take(1)
    assert third is not None
    assert third.devices == first.devices


def test_who_has_a_device_steps_back_for_who_has_none() -> None:
    (one, other), clock = pools("ab")
    leases = [one.take(1), one.take(1)]
    assert leases[0] is not None
    assert not one.is_awaited(leases[0])
    assert other.take(1, wait=True) is None
    assert one.is_awaited(leases[0])
    assert f"process {os.getpid()}" in other.holders()
    one.release(leases[0], step_back=True)
    assert one.take(1) is None, "others come first"
    taken = other.take(1, wait=True)
    assert taken is not None
    assert leases[1] is not None
    assert not one.is_awaited(leases[1]), "nobody waits any more"
    other.release(taken)
    clock.now = 2.0
    assert one.take(1) is not None


def test_several_devices_are_gathered_by_one_at_a_time() -> None:
    """Two jobs of two devices each never wait for each other.

    One that waits gets what becomes free.
    """
    (narrow, wide, other), _ = pools("ab", count=3)
    first, second = narrow.take(1), narrow.take(1)
    assert first is not None
    assert second is not None
    assert wide.take(2, wait=True) is None
    assert other.take(2, wait=True) is None
    narrow.release(first)
    assert other.take(2, wait=True) is None, "it lets go of what is not enough"
    assert wide.take(2, wait=True) is None, "it keeps what it has found"
    assert narrow.take(1) is None
    narrow.release(second)
    both = wide.take(2, wait=True)
    assert both is not None
    assert names_of(both) == "ab"
    wide.release(both)
    assert other.take(2, wait=True) is not None


def test_a_worker_keeps_its_device_when_its_sweep_is_gone(tmp_path: Path) -> None:
    """The lock goes with the last who has the open file.

    A process that the worker forks has not.
    """
    (one, other), _ = pools("a")
    lease = one.take(1)
    assert lease is not None
    ready, end = tmp_path / "ready", tmp_path / "end"

    def work(children: Callable[[], int]) -> int:
        adopt(lease.descriptors)
        child = children()
        ready.touch()
        while not end.exists():
            time.sleep(0.01)
        (tmp_path / "child").write_text(str(child))
        return 0

    def linger() -> int:
        time.sleep(60)
        return 0

    log = tmp_path / "log"
    worker = forked.fork(lambda: work(lambda: forked.fork(linger, log)), log)
    lease.release()
    patience = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < patience, log.read_text()
        time.sleep(0.01)
    assert other.take(1) is None, "the worker is on it still"
    end.touch()
    os.waitpid(worker, 0)
    assert other.take(1) is not None, "a loader that outlives its worker holds nothing"
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_ranks_keep_their_devices_when_their_worker_is_gone(tmp_path: Path) -> None:
    """They inherit no file of it, and save before they go."""
    (one, other), _ = pools("ab")
    lease = one.take(2)
    assert lease is not None
    files = {RANK_LOCKS: os.pathsep.join(map(str, lease.rank_locks))}
    ready, end = tmp_path / "ready", tmp_path / "end"

    def work() -> int:
        for number in lease.descriptors:
            os.close(number)
        hold_as_rank(files)
        ready.touch()
        while not end.exists():
            time.sleep(0.01)
        return 0

    log = tmp_path / "log"
    rank = forked.fork(work, log)
    patience = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < patience, log.read_text()
        time.sleep(0.01)
    one.release(lease)
    assert other.take(1) is None
    end.touch()
    os.waitpid(rank, 0)
    assert other.take(2) is not None


@pytest.mark.parametrize("what", ["link", "file"])
def test_locks_that_cannot_be_taken(
    what: str, locks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "link":
        locks.mkdir(parents=True)
        (locks / "GPU-a.lock").symlink_to("elsewhere")
    else:
        locks.parent.mkdir(parents=True)
        locks.touch()
    with pytest.raises(StorageError, match="XDG_STATE_HOME"):
        pools("a", count=1)[0][0].take(1)
    assert not locks.with_name("elsewhere").exists()
