"""The agent of one machine, where the machine that all meet at dies."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from optrun.base.errors import ConfigError, OptrunError
from optrun.distributed import agent, elastic
from optrun.distributed.limits import Limits
from optrun.distributed.verdict import RankEnd
from tests.distributed.test_launch_others import free_port


class OfTorch:
    """Stands for torch's agent and what it meets by.

    Each start, or connection, ends as it was told.
    """

    ends: ClassVar[list[str]] = []
    restarts: ClassVar[list[int]] = []

    def __init__(self, left: int, **options: Any) -> None:
        self.begin, self.restarts_left = options["begin"], left
        self.is_meeting, self.has_begun = False, True
        self.ended: list[RankEnd] | None = None
        self.restarts.append(left)

    def run(self) -> None:
        self.begin(self.ended)
        end = self.ends.pop(0)
        if end == "lost":
            raise RendezvousConnectionError
        if end == "late":  # torch has counted that start already
            raise RendezvousTimeoutError
        self.ended = []

    @classmethod
    def connect(cls, *where: object) -> type[OfTorch]:
        if cls.ends[0] == "closed":
            raise RendezvousClosedError
        if cls.ends[0] == "never":
            raise RendezvousTimeoutError
        if cls.ends[0] == "unreachable":
            cls.ends.pop(0)
            raise RendezvousConnectionError
        return cls

    @classmethod
    def shutdown(cls) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("ends", "restarts", "error"),
    [
        (["lost", "unreachable", "unreachable", "done"], [2, 1], None),
        (["lost", "lost", "lost"], [2, 1, 0], OptrunError),
        (["late", "done"], [2, 2], None),
        (["unreachable", "unreachable", "done"], [2], None),
        (["never"], [], ConfigError),
    ],
)
def test_the_machine_that_all_meet_at_dies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: list[str],
    restarts: list[int],
    error: type[OptrunError] | None,
) -> None:
    """It is looked for again until the time is up, and each time it is lost counts as a restart."""
    monkeypatch.setattr(OfTorch, "ends", list(ends))
    monkeypatch.setattr(OfTorch, "restarts", [])
    monkeypatch.setattr(elastic, "handler_of", OfTorch.connect)
    monkeypatch.setattr(elastic, "spec_of", lambda command, nproc, handler, left: left)
    monkeypatch.setattr(elastic, "Agent", OfTorch)
    ranks = agent.Ranks(
        nproc=1,
        nnodes=2,
        rdzv_endpoint="a:1",
        limits=Limits.of({"timeout_seconds": 1.0 if error is ConfigError else 60.0}),
        command=(),
        environment={},
        max_restarts=2,
    )
    begun: list[object] = []
    if error is None:
        assert agent.run_ranks(ranks, tmp_path, begun.append, lambda: False).ends == []
        assert [before is None for before in begun] == [True] + [False] * (len(restarts) - 1)
    else:
        with pytest.raises(error) as told:
            agent.run_ranks(ranks, tmp_path, begun.append, lambda: False)
        assert type(told.value) is error
        assert "distributed.timeout_seconds" in str(told.value)
    assert OfTorch.restarts == restarts


def test_a_machine_that_comes_back_after_the_end_need_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have closed what they met by; the run is found finished."""
    monkeypatch.setattr(elastic, "handler_of", OfTorch.connect)
    monkeypatch.setattr(elastic, "spec_of", lambda command, nproc, handler, left: left)
    monkeypatch.setattr(elastic, "Agent", OfTorch)
    monkeypatch.setattr(OfTorch, "ends", ["closed"])
    over = iter([False, True])
    limits = Limits.of({"timeout_seconds": 60.0})
    ranks = agent.Ranks(
        nproc=1, nnodes=2, rdzv_endpoint="a:1", limits=limits, command=(), environment={}
    )
    assert agent.run_ranks(ranks, tmp_path, lambda before: None, lambda: next(over)).ends == []


def test_a_run_that_ended_while_the_others_were_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait may take all of the time.

    What became of the run is looked at once more before it is an error.
    """
    waited: list[float] = []

    def wait(*where: object) -> OfTorch:
        time.sleep(0.3)
        waited.append(0.3)
        raise RendezvousTimeoutError

    monkeypatch.setattr(elastic, "handler_of", wait)
    limits = Limits.of({"timeout_seconds": 0.2})
    ranks = agent.Ranks(
        nproc=1, nnodes=2, rdzv_endpoint="a:1", limits=limits, command=(), environment={}
    )
    assert agent.run_ranks(ranks, tmp_path, lambda before: None, lambda: bool(waited)).ends == []


def test_a_good_end_that_was_not_heard_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of rank 0 had left before the others heard it.

    The run says whether it is finished.
    """
    lost = RankEnd(1, 1, "rank 0 is gone", lost_rank=True)

    def ended(self: OfTorch) -> None:
        self.ended = [lost]

    monkeypatch.setattr(OfTorch, "run", ended)
    monkeypatch.setattr(OfTorch, "ends", ["lost"])
    monkeypatch.setattr(OfTorch, "restarts", [])
    monkeypatch.setattr(elastic, "handler_of", OfTorch.connect)
    monkeypatch.setattr(elastic, "spec_of", lambda command, nproc, handler, left: left)
    monkeypatch.setattr(elastic, "Agent", OfTorch)
    limits = Limits.of({"timeout_seconds": 60.0})
    ranks = agent.Ranks(
        nproc=1, nnodes=2, rdzv_endpoint="a:1", limits=limits, command=(), environment={}
    )
    for is_finished, ends in ((True, []), (False, [lost])):
        over = iter([False, is_finished])
        assert (
            agent.run_ranks(ranks, tmp_path, lambda before: None, partial(next, over)).ends == ends
        )


def test_an_agent_that_dies_as_all_have_met_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one comes to the meeting, and never says where the ranks meet."""
    build = RendezvousStoreInfo.build

    def dies_if_first(rank: int, *given: Any, **named: Any) -> RendezvousStoreInfo:
        if rank == 0:
            raise SystemExit
        return build(rank, *given, **named)

    monkeypatch.setattr(RendezvousStoreInfo, "build", dies_if_first)
    monkeypatch.setattr(elastic, "_ANSWER_SECONDS", 1)
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = (elastic.handler_of(endpoint, 2, 2, 60) for _ in range(2))

    def come_and_die() -> None:
        with contextlib.suppress(SystemExit):
            first.next_rendezvous()

    dying = threading.Thread(target=come_and_die)
    dying.start()
    begun = time.monotonic()
    with pytest.raises(DistError) as lost:
        second.next_rendezvous()
    assert elastic.is_lost_machine(lost.value), "so that the next meeting is tried"
    assert time.monotonic() - begun < 30
    dying.join()
    for handler in (second, first):  # the first one holds the store
        handler.shutdown()
