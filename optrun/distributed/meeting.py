"""Messages between the ranks of one start, through torch's key-value store.

They work before process groups exist, and after these are broken.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from optrun.base.errors import ConfigError, OptrunError
from optrun.distributed.contract import refuse_different
from optrun.distributed.heartbeat import beat
from optrun.distributed.verdict import LostRankError

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK = 0.02
"""Seconds between two looks into the store; a signal is heard between them, as it is not in
`Store.wait`."""
_READ_SECONDS = 10.0
"""For the others to read what all have told."""


class UnmetError(ConfigError):
    """Not all ranks came to the meeting."""


class Meeting:
    """Sends messages between ranks, as JSON values by key.

    Args:
        store: Shared by all ranks.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout

    @classmethod
    def join(cls, timeout: float, facts: Mapping[str, object]) -> Self:
        """Meet the other ranks at MASTER_ADDR and MASTER_PORT.

        Args:
            timeout: Seconds to wait for the others.
            facts: Compared over all ranks.

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
        """Gather the word of each rank until all have answered; None: too late."""
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
        """Wait until rank 0 has read this rank's word; None: too late."""
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
        """Look again and again until the time is up, less often as it goes.

        Each look is a sign of life.
        """
        start = time.monotonic()
        waited = 0.0
        while waited <= (self.timeout if timeout is None else timeout):
            yield
            beat()
            time.sleep(min(max(_LOOK, waited / 20), 10 * _LOOK))
            waited = time.monotonic() - start

    def send(self, key: str, value: object, rank: int | None = None) -> None:
        """Send a value to all ranks.

        Args:
            key: Used once by this rank.
            value: Anything that JSON holds.
            rank: In whose name; None: this rank.
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
        """Wait for the text that is sent to the ranks of this machine.

        Raises:
            OptrunError: Nothing comes in time.
        """
        key = f"machine/{socket.gethostname()}"
        with _store_errors():
            if any(self.store.check([key]) for _ in self._poll()):
                return self.store.get(key).decode()
        raise OptrunError(
            f"rank {self.rank}: no first rank on {socket.gethostname()}; is LOCAL_RANK right?"
        )

    def _wait_for_missing(self, key: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Wait for the values of ranks, and list the ranks that sent none in time."""
        keys = [f"{key}/{rank}" for rank in ranks]
        with _store_errors():
            if not keys or any(self.store.check(keys) for _ in self._poll(timeout)):
                return []
            return [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]

    def receive(self, key: str, rank: int, timeout: float | None = None) -> Any:
        """Wait for the value of a rank.

        Args:
            key: Of the value.
            rank: The sender.
            timeout: Seconds; None: the meeting's.

        Raises:
            OptrunError: None came in time.
        """
        timeout = self.timeout if timeout is None else timeout
        if self._wait_for_missing(key, [rank], timeout):
            raise OptrunError(f"rank {rank} is silent: {key} was awaited for {timeout:g} s.")
        return self._read(key, rank)

    def settle(self, key: str, value: object, judge: Callable[[list[Any]], Any]) -> Any:
        """Let rank 0 judge the values of all ranks, and return its judgement on every rank.

        Args:
            key: Used once.
            value: Of this rank; anything that JSON holds.
            judge: Called on rank 0, with the values by rank; returns anything that JSON holds.

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
        """Collect the values of the ranks that send one in time.

        Args:
            key: Of the values.
            ranks: The senders.
            timeout: Seconds to wait for all of them.

        Raises:
            LostRankError: The store is gone.
        """
        missing = self._wait_for_missing(key, ranks, timeout)
        return {rank: self._read(key, rank) for rank in ranks if rank not in missing}


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn errors of the store into the loss of the rank that held it.

    Raises:
        LostRankError: The store is gone.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's errors of the store
        raise LostRankError(
            f"rank 0, or whoever held the store of the ranks, has left: {error}"
        ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for a message.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2, 3]), name_ranks(range(20))
        ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    numbers = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {numbers}{more}"
