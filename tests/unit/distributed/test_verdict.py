"""How ranks ended, together: one code and one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.base.errors import ConfigError, LockedError, NonFiniteError, StoppedEarly, StorageError
from optrun.distributed.verdict import LostRankError, RankEnd, error_of, is_lost_rank


def ends(*found: tuple[int, str] | RankEnd) -> list[RankEnd]:
    return [
        end if isinstance(end, RankEnd) else RankEnd(rank, *end) for rank, end in enumerate(found)
    ]


LOST = RankEnd(0, 1, "another rank does not answer", lost_rank=True)
KILLED = RankEnd(1, -9, where="training after step 3", seen=1.0)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert "rank 1 was ended by signal 40" in str(error_of([RankEnd(1, -40)]))


def test_all_well() -> None:
    assert error_of(ends((0, ""), (0, ""))) is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (75, StoppedEarly),
        (3, NonFiniteError),
        (74, StorageError),
        (2, ConfigError),
        (5, LockedError),
    ],
)
def test_all_alike(code: int, kind: type[Exception]) -> None:
    error = error_of(ends((code, "why"), (code, "why")))
    assert type(error) is kind
    assert str(error) == "why"


def test_rank_0_alone_speaks_where_all_stopped() -> None:
    error = error_of(ends((75, "SIGTERM received: saved"), (75, "another rank received SIGTERM")))
    assert type(error) is StoppedEarly
    assert str(error) == "SIGTERM received: saved"


def test_the_cause_counts_and_not_who_lost_it() -> None:
    error = error_of([LOST, RankEnd(1, 74, "no space left")])
    assert type(error) is StorageError
    assert "rank 1" in str(error)
    assert "no space left" in str(error)


def test_a_rank_that_was_killed_is_named_with_phase_and_log() -> None:
    error = error_of([LOST, KILLED], lambda rank: Path(f"run/logs/rank-{rank}.log"))
    assert error is not None
    assert error.exit_code == 1
    for fact in ("rank 1", "SIGKILL", "training after step 3", "run/logs/rank-1.log"):
        assert fact in str(error)


def test_what_followed_from_it_is_not_told() -> None:
    """The launcher ends the rest.

    By SIGTERM, which also stops a run early, and at last by SIGKILL.
    """
    for other in (
        RankEnd(0, 75, "SIGTERM received: stopped"),
        RankEnd(0, -15),
        RankEnd(0, 143),
        RankEnd(0, -9, where="waiting after step 3", seen=9.0),
    ):
        error = error_of([other, KILLED])
        assert error is not None
        assert error.exit_code == 1
        assert str(error).startswith("rank 1 was ended by SIGKILL")


def test_a_second_signal_beside_an_early_stop() -> None:
    error = error_of([RankEnd(0, 75, "SIGTERM received"), RankEnd(1, 143)])
    assert type(error) is StoppedEarly


def test_rank_0_is_named_too_where_it_hangs() -> None:
    error = error_of([RankEnd(0, 1, "no heartbeat for 5 s", where="training after step 3"), LOST])
    for fact in ("rank 0", "no heartbeat for 5 s", "training after step 3"):
        assert fact in str(error)


def test_different_causes_are_1() -> None:
    error = error_of(ends((3, "loss is NaN"), (74, "no space left")))
    assert error is not None
    assert error.exit_code == 1


def test_a_lost_rank_is_known_by_its_error() -> None:
    assert is_lost_rank(
        RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer")
    )
    assert is_lost_rank(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    assert is_lost_rank(LostRankError("gone"))
    assert not is_lost_rank(RuntimeError("ProcessGroupGloo::allgather: invalid tensor size"))
    wrapped = ValueError("a callback")
    wrapped.__cause__ = RuntimeError("Connection closed by peer")
    assert is_lost_rank(wrapped)
