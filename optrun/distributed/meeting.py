"""Send messages between ranks through torch's key-value store, before and after process groups."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from optrun.base.errors import ConfigError, OptrunError
from optrun.base.formatting import list_names
from optrun.distributed.contract import refuse_different
from optrun.distributed.heartbeat import beat
from optrun.distributed.verdict import LostRankError

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_SECONDS = 0.02
"""Shortest time between two checks of the store. Signals are handled between them, which
`Store.wait` would delay."""
_READ_SECONDS = 10.0
"""Time for other ranks to read a judgement before the rank that holds the store leaves."""


class UnmetError(ConfigError):
    """Not all ranks joined the meeting."""


@dataclass(eq=False)
class Meeting:
    """Sends messages between ranks, as JSON values by key and rank."""

    store: Store
    """The store that all ranks share."""
    rank: int
    """The rank of this process."""
    size: int
    """The number of ranks."""
    timeout: float
    """Seconds to wait for other ranks."""

    @classmethod
    def join(cls, timeout: float, facts: Mapping[str, object]) -> Self:
        """Join the other ranks at MASTER_ADDR and MASTER_PORT, and compare facts with them.

        Rank 0 opens the store, unless torchrun's agent has one.

        Args:
            timeout: Seconds to wait for other ranks.
            facts: Values by dotted name that must be equal on all ranks.

        Returns:
            A meeting whose keys carry the name of this start, so that a store that an agent keeps
            over restarts does not show the values of an earlier start.

        Raises:
            UnmetError: Not all ranks come, or the port is taken.
            ConfigError: Facts differ.
        """
        import torch.distributed as dist

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=rank == 0 and not held_by_agent,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if "EADDRINUSE" in str(error) or "in use" in str(error):
                raise UnmetError(
                    f"MASTER_PORT={port}: in use on {host} by another program. Expected a free"
                    " port, the same for all ranks."
                ) from error
            raise UnmetError(
                f"rank {rank} of {size} found nobody at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
                f" within {timeout:g} s (distributed.timeout_seconds). Is rank 0 started, and can"
                " this machine reach it?"
            ) from error
        meeting = cls(dist.PrefixStore("optrun", store), rank, size, timeout)
        start = meeting._meet_all(f"{host}:{port}")
        meeting.store = dist.PrefixStore(start, meeting.store)
        refuse_different(meeting, facts)
        return meeting

    def _meet_all(self, where: str) -> str:
        """Wait for every rank.

        A launcher's store may hold messages of an earlier start of the ranks. So each rank brings a
        random word, and goes on when rank 0 has read it.

        Returns:
            The name of this start, the same on every rank and at no other start.

        Raises:
            UnmetError: A rank does not come.
        """
        word = os.urandom(8).hex()
        try:
            self.send("hello", word)
            with _store_errors():
                start = self._gather_words() if self.rank == 0 else self._await_welcome(word)
        except LostRankError as error:
            raise UnmetError(
                f"rank {self.rank} of {self.size}: rank 0 has left {where} before all ranks had"
                f" come; it says why, and waits for {self.timeout:g} s"
                " (distributed.timeout_seconds). Start optrun for each of them, or say how many"
                " there are."
            ) from error
        if start is None:
            missing = self._wait_for_missing("hello", range(self.size), 0.0)
            who = name_ranks(missing) if missing else "one that was started before, and is gone"
            raise UnmetError(
                f"{self.size - max(1, len(missing))} of {self.size} ranks came to {where} within"
                f" {self.timeout:g} s (distributed.timeout_seconds); missing: {who}. Start optrun"
                " for each of them, or say how many there are."
            )
        return start

    def _gather_words(self) -> str | None:
        """Gather the words of all ranks and publish them until all ranks have seen theirs.

        On rank 0 only. Words of an earlier start are replaced as soon as a rank sends its new one.

        Returns:
            The word of rank 0, the name of this start; None: the time is up.
        """
        hello = self._keys("hello")
        words: list[str] = []
        for _ in self._poll():
            if not self.store.check(hello):
                continue
            current_words = [str(json.loads(word)) for word in self.store.multi_get(hello)]
            if current_words != words:
                words = current_words
                self.store.set("welcome", json.dumps(words))
            if self.store.check([f"{words[0]}/{key}" for key in self._keys("came")[1:]]):
                return words[0]
        return None

    def _await_welcome(self, word: str) -> str | None:
        """Wait until rank 0 publishes this rank's word, and confirm it.

        Returns:
            The word of rank 0, the name of this start; None: the time is up.
        """
        for _ in self._poll():
            if self.store.check(["welcome"]):
                words = json.loads(self.store.get("welcome"))
                if words[self.rank] == word:
                    self.store.set(f"{words[0]}/came/{self.rank}", "")
                    return str(words[0])
        return None

    def _keys(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.size)]

    def _poll(self, timeout: float | None = None) -> Iterator[None]:
        """Yield until the time is up, with a heartbeat each time and growing pauses (20 to 200 ms).

        timeout: Seconds; None: those of the meeting.
        """
        start = time.monotonic()
        waited = 0.0
        while waited <= (self.timeout if timeout is None else timeout):
            yield
            beat()
            time.sleep(min(max(_POLL_SECONDS, waited / 20), 10 * _POLL_SECONDS))
            waited = time.monotonic() - start

    def send(self, key: str, value: object, rank: int | None = None) -> None:
        """Store a value that all ranks can read.

        Args:
            key: Used once by each rank.
            value: Any JSON value.
            rank: The sender; None: this rank.

        Raises:
            LostRankError: The store is gone.
        """
        with _store_errors():
            self.store.set(f"{key}/{self.rank if rank is None else rank}", json.dumps(value))

    def _read(self, key: str, rank: int) -> Any:
        with _store_errors():
            return json.loads(self.store.get(f"{key}/{rank}"))

    def send_to_machine(self, text: str) -> None:
        """Send a text to the ranks of this machine, once."""
        with _store_errors():
            self.store.set(f"machine/{socket.gethostname()}", text)

    def receive_on_machine(self) -> str:
        """Wait for the text of `send_to_machine` on this machine.

        Raises:
            OptrunError: None is sent within the timeout of the meeting.
        """
        key = f"machine/{socket.gethostname()}"
        with _store_errors():
            if any(self.store.check([key]) for _ in self._poll()):
                return self.store.get(key).decode()
        raise OptrunError(
            f"rank {self.rank}: no first rank on {socket.gethostname()}; is LOCAL_RANK right?"
        )

    def _wait_for_missing(self, key: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Wait for the values of ranks under a key; return the ranks that sent none in time."""
        keys = [f"{key}/{rank}" for rank in ranks]
        with _store_errors():
            if not keys or any(self.store.check(keys) for _ in self._poll(timeout)):
                return []
            return [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]

    def receive(self, key: str, rank: int, timeout: float | None = None) -> Any:
        """Wait for the value of a rank, and return it.

        Args:
            key: The key of the value.
            rank: The sender.
            timeout: Seconds; None: those of the meeting.

        Raises:
            OptrunError: The rank sent none in time.
        """
        timeout = self.timeout if timeout is None else timeout
        if self._wait_for_missing(key, [rank], timeout):
            raise OptrunError(f"rank {rank} is silent: {key} was awaited for {timeout:g} s.")
        return self._read(key, rank)

    def settle(self, key: str, value: object, judge: Callable[[list[Any]], Any]) -> Any:
        """Call `judge` on rank 0 with the values of all ranks, and return its result on every rank.

        Args:
            key: Names this call; used once by all ranks.
            value: The value of this rank, any JSON value.
            judge: Called with the values by rank; returns any JSON value.

        Raises:
            OptrunError: A rank sends nothing in time.
        """
        self.send(key, value)
        if self.rank:
            judgement = self.receive(f"{key}/settled", 0, self.timeout + _READ_SECONDS)
            self.send(f"{key}/read", None)
            return judgement
        missing = self._wait_for_missing(key, range(self.size), self.timeout)
        if missing:
            raise OptrunError(f"{name_ranks(missing)}: silent for {self.timeout:g} s ({key}).")
        with _store_errors():
            values = [json.loads(text) for text in self.store.multi_get(self._keys(key))]
        judgement = judge(values)
        self.send(f"{key}/settled", judgement)
        # This rank may hold the store, and leave with it: so it waits until all have read.
        self._wait_for_missing(f"{key}/read", range(1, self.size), _READ_SECONDS)
        return judgement

    def collect(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        """Return the values of those ranks, by rank, that send one in time.

        Args:
            key: The key of the values.
            ranks: The senders.
            timeout: Seconds to wait for all of them.

        Raises:
            LostRankError: The store is gone.
        """
        missing = self._wait_for_missing(key, ranks, timeout)
        return {rank: self._read(key, rank) for rank in ranks if rank not in missing}


@contextmanager
def _store_errors() -> Iterator[None]:
    """Translate errors of torch's store inside the context.

    Raises:
        LostRankError: The store is gone, with the rank or launcher that held it.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's errors of the store
        raise LostRankError(
            f"rank 0, or whoever held the store of the ranks, has left: {error}"
        ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """Name at least one rank for a message; of more than eight the number of the others.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2, 3]), name_ranks(range(20))
        ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {list_names(ranks, 8)}"
