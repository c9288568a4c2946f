"""Signs of life: written by ranks, read by an agent, and who is silent."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest

from optrun.distributed import heartbeat
from optrun.distributed.heartbeat import Heartbeats, Phase, RankStatus, Requests, beat, during
from optrun.distributed.local_ranks import _read_end
from optrun.distributed.memory_file import MemoryFile, read_text
from optrun.distributed.silence import find_hung, kill
from optrun.distributed.watchdog import Watchdog, watched


@pytest.fixture(autouse=True)
def _silent_afterwards() -> Iterator[None]:
    yield
    heartbeat.end()


def test_what_a_rank_writes_others_read() -> None:
    table = Heartbeats.create(2, shared=True)
    heartbeat.begin(Heartbeats.open(table.path), local_rank=1, rank=5)
    beat(Phase.training, 7)
    assert beat(Phase.waiting) is Phase.training
    found = table[1]
    assert (found.rank, found.phase, found.step) == (5, Phase.waiting, 7)
    assert str(found) == "waiting after step 7"
    assert abs(found.time - time.monotonic()) < 60
    assert table[0].pid == 0
    assert len(table) == 2


def test_requests_travel_with_it() -> None:
    table = Heartbeats.create(1, shared=True)
    assert table.requests == Requests()
    table.requests = Requests(stops=1, stop_signal=signal.SIGINT, saves=2)
    assert Heartbeats.open(table.path).requests == Requests(1, signal.SIGINT, 2)


def test_nobody_listens() -> None:
    assert beat(Phase.training, 3) is Phase.starting


def test_the_first_step_of_a_start_is_told_from_later_ones() -> None:
    """Also where a run goes on at another step, and where training goes back."""
    table = Heartbeats.create(1)
    heartbeat.begin(table)
    found = []
    for phase, step in (
        *(
            (Phase.preparing, None),
            (Phase.waiting, None),
            (Phase.preparing, None),
            (Phase.evaluating, 100),
        ),
        *((Phase.saving, 100), (Phase.loading, 100), (Phase.waiting, None), (Phase.training, None)),
        *((Phase.evaluating, 101), (Phase.loading, 101), (Phase.loading, 50)),
    ):
        beat(phase, step)
        found.append(table[0].done)
    assert found == [0] * 8 + [1] * 3


def test_a_phase_lasts_as_long_as_what_it_is_said_of() -> None:
    table = Heartbeats.create(1)
    heartbeat.begin(table)
    beat(Phase.loading, 3)
    with contextlib.suppress(KeyError), during(Phase.saving):
        assert str(table[0]) == "saving after step 3"
        raise KeyError
    assert str(table[0]) == "loading after step 3"


def line(
    phase: Phase, seconds: float, step: int = 3, pid: int = 0, rank: int = 0, done: int = 2
) -> RankStatus:
    return RankStatus(pid, rank, phase, step, seconds, done)


def test_silence_is_told_once() -> None:
    table, told = Heartbeats.create(2), list[dict[int, RankStatus]]()
    dog = Watchdog(table, 100.0, told.append)
    table.write(0, line(Phase.training, 1000.0))
    table.write(1, line(Phase.waiting, 1050.0))
    dog.look(1099.0)
    assert told == []
    dog.look(1101.0)
    dog.look(1102.0)
    assert [set(silent) for silent in told] == [{0}]
    table.write(0, line(Phase.training, 1103.0, step=4))
    table.write(1, line(Phase.waiting, 1103.0))
    dog.look(1110.0)
    dog.look(1204.0)
    assert [set(silent) for silent in told] == [{0}, {0, 1}]


@pytest.mark.parametrize(
    ("last", "limit"),
    [
        (line(Phase.starting, 1000.0, done=0), 300.0),
        (line(Phase.preparing, 1000.0, done=0), 300.0),
        (line(Phase.training, 1000.0, done=0), 300.0),
        (line(Phase.training, 1000.0, done=1), 5.0),
        (line(Phase.evaluating, 1000.0), 5.0),
        (line(Phase.saving, 1000.0), 5.0),
        (line(Phase.publishing, 1000.0), 5.0),
        (line(Phase.waiting, 1000.0, done=1), 300.0),
        (line(Phase.waiting, 1000.0), 5.0),
        (line(Phase.closing, 1000.0), None),
    ],
)
def test_a_rank_may_be_silent_for_longer_until_its_first_step_is_done(
    last: RankStatus, limit: float | None
) -> None:
    """A kernel may be compiled; a rank that waits may be one step ahead of one that compiles."""
    table, told = Heartbeats.create(1), list[dict[int, RankStatus]]()
    table.write(0, last)
    dog = Watchdog(table, 5.0, told.append)
    dog.look(1000.0 + (limit or 1e9) - 0.5)
    assert told == []
    dog.look(1000.0 + (limit or 1e9) + 0.5)
    assert len(told) == (limit is not None)


def test_a_run_in_one_process_tells_it() -> None:
    notes: list[str] = []
    with watched(0.05, notes.append):
        beat(Phase.loading, 11)
        beat(Phase.training, 12)
        deadline = time.monotonic() + 60
        while not notes and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(notes) == 1
    for fact in (
        "no progress for 0.05 s",
        "distributed.timeout_seconds",
        "training after step 12",
        "test_heartbeat.py",
    ):
        assert fact in notes[0]


def test_the_one_the_others_wait_for_is_named() -> None:
    silent = {0: line(Phase.waiting, 0.0, rank=4), 1: line(Phase.training, 0.0, rank=5)}
    found = find_hung(silent, 30, 2)
    assert list(found) == [1]
    assert (found[1].rank, found[1].where) == (5, "training after step 3")
    for fact in ("30 s (distributed.timeout_seconds)", "raise distributed.timeout_seconds"):
        assert fact in found[1].message
    early = find_hung({0: line(Phase.training, 0.0, done=0)}, 30, 1)
    assert "300 s at least until the first step is done" in early[0].message
    assert list(find_hung({0: silent[0]}, 30, 1)) == [0]
    assert not find_hung({0: silent[0]}, 30, 2)  # the other was heard a moment later, and hangs


def test_a_rank_that_never_began_is_not_killed() -> None:
    kill(line(Phase.starting, 0.0, pid=0))  # 0 would be the group of this process


def test_a_rank_that_says_nothing_ended_where_it_was_last_heard() -> None:
    table = Heartbeats.create(2)
    table.write(1, line(Phase.saving, 5.0, rank=3))
    end = _read_end(table, 1, -9)
    assert (end.rank, end.code, end.where) == (3, -9, "saving after step 3")
    table.write_end(1, '{"rank": 3, "code": 75, "message": "stopped – gestoppt"}')
    assert _read_end(table, 1, -9).code == 75
    table.forget()
    assert (table.read_end(1), table[1].pid) == ("", 0)


def test_a_memory_file_is_gone_with_who_holds_it() -> None:
    file = MemoryFile("optrun-test")
    file.write_text("a long command line")
    file.write_text("short")
    path = file.path
    assert read_text(path) == "short"
    file.close()
    with pytest.raises(OSError, match="No such file"):
        read_text(path)
