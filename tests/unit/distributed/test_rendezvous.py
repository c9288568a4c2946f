"""What ranks tell each other before there is any group."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from torch.distributed import DistNetworkError, HashStore

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_EARLY, ConfigError, OptrunError
from optrun.distributed.contract import refuse_different
from optrun.distributed.heartbeat import Heartbeats, Phase, RankStatus
from optrun.distributed.join import Launched
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.rendezvous import Rendezvous, RendezvousError
from optrun.distributed.verdict import LostRankError, RankEnd
from optrun.launch.rank import Rank, _await_end_of_main, _report_end


@pytest.mark.parametrize(
    ("key", "theirs", "facts"),
    [("torch", "0.1", ["torch=0.1", "torch=2.13"]), ("lr", 5e-2, ["lr=0.05", "lr=0.001"])],
)
def test_ranks_of_different_code_or_configuration_are_refused_by_name(
    key: str, theirs: object, facts: list[str]
) -> None:
    own = {"torch": "2.13", "lr": 1e-3, "seed": 0}
    said = together(
        3,
        lambda rendezvous: refuse_different(
            rendezvous, own if rendezvous.rank != 1 else {**own, key: theirs}
        ),
    )
    assert len(set(map(str, said))) == 1
    assert all(isinstance(error, ConfigError) for error in said)
    for fact in (
        "(rank 1)",
        "(rank 0)",
        f"on {socket.gethostname()}",
        facts[0],
        facts[1].split("=")[1],
    ):
        assert fact in str(said[0])
    assert together(3, lambda rendezvous: refuse_different(rendezvous, own)) == [None] * 3


def together(
    size: int, act: Callable[[Rendezvous], object], store: HashStore | None = None
) -> list[object]:
    """What each of several ranks returns, or raises, in threads of this process."""
    store = store or HashStore()

    def one(rank: int) -> object:
        try:
            return act(Rendezvous(store, rank, size, 20.0))
        except OptrunError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_ranks_that_start_again_meet_in_a_store_that_knows_those_before() -> None:
    """As that of torchrun's agent, whose ranks may count their starts differently."""
    store = HashStore()
    starts = []
    for _ in range(3):
        names = together(4, lambda rendezvous: rendezvous._wait_for_all_ranks("here:1"), store)
        assert len(set(names)) == 1
        starts += names[:1]
    assert len(set(starts)) == 3


class Counted(HashStore):
    """A store that counts what it is asked, looks that are repeated while others are awaited
    left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.asked += 1
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return list(super().multi_get(keys))


def test_requests_to_the_store_grow_with_the_ranks_and_not_faster() -> None:
    def act(rendezvous: Rendezvous) -> None:
        rendezvous._wait_for_all_ranks("here:1")
        refuse_different(rendezvous, {"lr": 1e-3})

    each = {}
    for size in (8, 128):
        store = Counted()
        assert together(size, act, store) == [None] * size
        each[size] = store.asked / size
    assert each[128] < 1.6 * each[8]


class Gone(HashStore):
    """A store whose rank has left, as `TCPStore` says it."""

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")


def test_a_rank_whose_rank_0_gave_up_first_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        Rendezvous(Gone(), 1, 3, 5.0)._wait_for_all_ranks("here:1")
    for fact in ("rank 1 of 3", "rank 0 has left here:1", "5 s (distributed.timeout_seconds)"):
        assert fact in str(refused.value)


@pytest.mark.parametrize("ask", ["all_reduce", "receive", "receive_on_machine", "collect"])
def test_a_store_that_is_gone_is_a_lost_rank(ask: str) -> None:
    given = {
        "all_reduce": ("agree", 1, len),
        "receive": ("payload", 0),
        "collect": ("end", [0], 0.0),
    }
    with pytest.raises(LostRankError) as lost:
        getattr(Rendezvous(Gone(), 1, 3, 5.0), ask)(*given.get(ask, ()))
    assert "rank 0" in str(lost.value)


def test_rank_0_does_not_leave_before_all_have_read() -> None:
    store, order = HashStore(), []
    first, second = (Rendezvous(store, rank, 2, 5.0) for rank in range(2))

    def read() -> None:
        second.send("agree", "mine")
        order.append(second.receive("agree/result", 0))
        second.send("agree/read", None)

    thread = threading.Thread(target=read)
    thread.start()
    order.append(first.all_reduce("agree", "ours", lambda every: every))
    thread.join()
    assert order == [["ours", "mine"]] * 2


def test_the_end_of_rank_0_is_not_awaited_where_it_is_gone() -> None:
    """As a second signal leaves it: ended at once, and nothing told."""
    heartbeats = Heartbeats.create(2)
    heartbeats.write(0, RankStatus(2**22 + 1, 0, Phase.training, 3, 0.0))
    heartbeats.write(1, RankStatus(os.getpid(), 1, Phase.closing, 3, 0.0))
    rank = Rank(Launched("torchrun", 1, 2, 1, 2, ""), RankSignals(), heartbeats=heartbeats)
    assert _await_end_of_main(rank, Rendezvous(HashStore(), 1, 2, 3600.0)) == {}


def rank_of(number: int, *, is_watched: bool = False) -> Rank:
    """One of two ranks, alone on its machine."""
    launched = Launched("torchrun", number, 2, 0, 1, "")
    return Rank(launched, RankSignals(), is_watched, Heartbeats.create(1))


def test_the_end_of_rank_0_is_not_awaited_where_the_store_is_gone() -> None:
    """As with the launcher of another machine; an hour would be awaited."""
    end = RankEnd(1, EXIT_STOPPED_EARLY, "stopped")
    assert _report_end(rank_of(1), Rendezvous(Gone(), 1, 2, 3600.0), end) == [end]


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_good_end_that_rank_0_does_not_confirm_is_none(is_watched: bool) -> None:
    """It died with its machine, perhaps in the last save.

    The launcher is to start again, or to find the run finished.
    """
    rank, done = rank_of(1, is_watched=is_watched), RankEnd(1, EXIT_DONE)
    assert rank.heartbeats is not None
    (end,) = _report_end(rank, Rendezvous(Gone(), 1, 2, 3600.0), done)
    assert (end.code, end.lost_rank) == (EXIT_FAILED, True)
    if is_watched:
        assert RankEnd(**json.loads(rank.heartbeats.read_end(0))) == end
    store = HashStore()
    Rendezvous(store, 0, 2, 3600.0).send("end", asdict(RankEnd(0, EXIT_DONE)))
    assert _report_end(rank, Rendezvous(store, 1, 2, 3600.0), done) == [done, RankEnd(0, EXIT_DONE)]
    assert _report_end(rank, Rendezvous(HashStore(), 1, 2, 0.1), done) == [done], (
        "it may take long to publish the model"
    )


def test_rank_0_leaves_after_the_others_have_heard_how_it_ended() -> None:
    """It may hold the store, which is gone with it."""
    store, order = HashStore(), []
    done = [RankEnd(number, EXIT_DONE) for number in range(2)]

    def part(number: int) -> None:
        _report_end(rank_of(number), Rendezvous(store, number, 2, 60.0), done[number])
        order.append(number)

    first = threading.Thread(target=part, args=(0,))
    first.start()
    first.join(0.5)
    assert order == [], "it waits for the other one"
    part(1)
    first.join()
    assert sorted(order) == [0, 1]


def test_rank_0_names_an_address_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RendezvousError, match=r"its own port at nowhere\.invalid"):
        Rendezvous.join(1.0, {})
