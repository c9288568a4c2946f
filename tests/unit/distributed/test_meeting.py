"""What ranks tell each other before there is any group."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from optrun import __version__
from optrun.base.errors import ConfigError
from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.join import Launched
from optrun.distributed.meeting import Meeting
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.verdict import LostRankError
from optrun.launch.rank import Rank, _end_of_main

OWN = {"optrun": __version__, "torch": torch.__version__, "python": platform.python_version()}


@pytest.mark.parametrize("package", OWN)
def test_ranks_of_different_versions_are_refused_by_name(package: str) -> None:
    store = HashStore()
    other = Meeting(store, 1, 2, 5.0)
    other.send("hello", {**OWN, package: "0.1", "host": "elsewhere"})
    other.send("hello/read", None)
    with pytest.raises(ConfigError) as refused:
        Meeting(store, 0, 2, 5.0)._greet("here:1")
    for fact in ("rank 1 on elsewhere", f"{package} 0.1", "rank 0", OWN[package]):
        assert fact in str(refused.value)


class Gone(HashStore):
    """A store whose rank has left, as `TCPStore` says it."""

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")


def test_a_rank_whose_rank_0_gave_up_first_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        Meeting(Gone(), 1, 3, 5.0)._greet("here:1")
    for fact in ("rank 1 of 3", "rank 0 has left here:1", "5 s (distributed.timeout_seconds)"):
        assert fact in str(refused.value)


@pytest.mark.parametrize("ask", ["gather", "receive", "hear_machine"])
def test_a_store_that_is_gone_is_a_lost_rank(ask: str) -> None:
    with pytest.raises(LostRankError) as lost:
        getattr(Meeting(Gone(), 1, 3, 5.0), ask)(*{"gather": ("agree", 1), "receive": ("payload", 0)}.get(ask, ()))
    assert "rank 0" in str(lost.value)
    assert Meeting(Gone(), 1, 3, 5.0).heard("end", [0], 0.0) == {}


def test_rank_0_does_not_leave_before_all_have_read() -> None:
    store, order = HashStore(), []
    first, second = (Meeting(store, rank, 2, 5.0) for rank in range(2))
    second.send("agree", "mine")
    begun = threading.Event()

    def read() -> None:
        begun.wait()
        order.append(second.gather("agree", "mine"))

    thread = threading.Thread(target=read)
    thread.start()
    first.send("agree", "ours")
    begun.set()
    order.append(first.gather("agree", "ours"))
    thread.join()
    assert order == [["ours", "mine"]] * 2


def test_the_end_of_rank_0_is_not_awaited_where_it_is_gone(tmp_path: Path) -> None:
    """As a second signal leaves it: ended at once, and nothing told."""
    heartbeats = Heartbeats.create(2, tmp_path / "heartbeats")
    heartbeats.write(0, Heartbeat(2**22 + 1, 0, Phase.training, 3, 0.0))
    heartbeats.write(1, Heartbeat(os.getpid(), 1, Phase.closing, 3, 0.0))
    rank = Rank(Launched("torchrun", 1, 2, 1, 2, ""), RankSignals(), tmp_path, heartbeats)
    assert _end_of_main(rank, Meeting(HashStore(), 1, 2, 3600.0)) == {}
