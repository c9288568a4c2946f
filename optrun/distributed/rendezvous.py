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
"""Time for other ranks to read a result before the rank that holds the store leaves."""


class RendezvousError(ConfigError):
    """Not all ranks came to the rendezvous."""


@dataclass(eq=False)
class Rendezvous:
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

        Rank 0 opens the store, unless torchrun's agent has one. torchrun keeps its store over
        restarts: a prefix of the keys keeps the values of earlier starts apart.

        Args:
            timeout: Seconds to wait for other ranks.
            facts: Values by dotted name that must be equal on all ranks.

        Raises:
            RendezvousError: Not all ranks come, the port is taken, or MASTER_ADDR is not the
                machine of rank 0.
            ConfigError: Facts differ.
        """
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = rank == 0 and not held_by_agent
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=is_master,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if "EADDRINUSE" in str(error) or "in use" in str(error):
                raise RendezvousError(
                    f"MASTER_PORT={port}: another program on {host} uses this port. Expected a free"
                    " port, the same for all ranks."
                ) from error
            if is_master:
                raise RendezvousError(
                    f"rank 0 cannot reach its own port at {host}:{port}. Expected MASTER_ADDR to be"
                    " an address of the machine of rank 0."
                ) from error
            raise RendezvousError(
                f"rank {rank} of {size} reached no rank 0 at {host}:{port} (MASTER_ADDR,"
                f" MASTER_PORT) within {timeout:g} s (distributed.timeout_seconds). Is rank 0"
                " started, and can this machine reach it?"
            ) from error
        rendezvous = cls(dist.PrefixStore("optrun", store), rank, size, timeout)
        # The id of this start becomes part of every key: the store may hold those of earlier ones.
        start_id = rendezvous._wait_for_all_ranks(f"{host}:{port}")
        rendezvous.store = dist.PrefixStore(start_id, rendezvous.store)
        refuse_different(rendezvous, facts)
        return rendezvous

    def _wait_for_all_ranks(self, where: str) -> str:
        """Wait for every rank, and return an id of this start, equal on all ranks.

        The store of a launcher may still hold messages of an earlier start, so the presence of a
        key proves nothing. Three steps make sure that all ranks are here now:

        1. Each rank sends a random nonce under `hello`.
        2. Rank 0 publishes all nonces under `welcome`.
        3. A rank that reads its own nonce there confirms it under `came`.

        The nonce of rank 0 is the id of this start.

        Args:
            where: Host and port of the store, for messages.

        Raises:
            RendezvousError: A rank does not come.
        """
        nonce = os.urandom(8).hex()
        # 1. to 3.
        try:
            self.send("hello", nonce)
            with _store_errors():
                start_id = self._welcome_ranks() if self.rank == 0 else self._confirm_welcome(nonce)
        except LostRankError as error:
            raise RendezvousError(
                f"rank {self.rank} of {self.size}: rank 0 has left {where} before all ranks had"
                f" come; its output says why. It waits {self.timeout:g} s"
                " (distributed.timeout_seconds). Start optrun once for each rank, or correct the"
                " number of ranks."
            ) from error
        if start_id is None:  # the time is up
            # Ranks that have sent no nonce. If all have, one nonce is of an earlier start: at least
            # one rank is missing, and nobody knows which.
            missing = self._wait_for_missing("hello", range(self.size), 0.0)
            who = name_ranks(missing) if missing else "one that was started before, and is gone"
            raise RendezvousError(
                f"{self.size - max(1, len(missing))} of {self.size} ranks came to {where} within"
                f" {self.timeout:g} s (distributed.timeout_seconds); missing: {who}. Start optrun"
                " once for each rank, or correct the number of ranks."
            )
        return start_id

    def _welcome_ranks(self) -> str | None:
        """Publish the nonces of all ranks until every rank has confirmed its own; rank 0 only.

        A nonce of an earlier start is replaced as soon as its rank sends the new one.

        Returns:
            The nonce of rank 0, which is the id of this start; None: the time is up.
        """
        hello_keys = self._keys("hello")
        published: list[str] = []
        for _ in self._poll():
            if not self.store.check(hello_keys):
                continue
            # All ranks have sent a nonce, perhaps some of them at an earlier start. Whenever one of
            # them changes, all are published again.
            nonces = [str(json.loads(text)) for text in self.store.multi_get(hello_keys)]
            if nonces != published:
                published = nonces
                self.store.set("welcome", json.dumps(nonces))
            start_id = nonces[0]
            # All ranks but this one, rank 0, confirm that their own nonce was published.
            if self.store.check([f"{start_id}/{key}" for key in self._keys("came")[1:]]):
                return start_id
        return None

    def _confirm_welcome(self, nonce: str) -> str | None:
        """Wait until rank 0 publishes this rank's nonce, and confirm it.

        Returns:
            The nonce of rank 0, which is the id of this start; None: the time is up.
        """
        for _ in self._poll():
            if not self.store.check(["welcome"]):
                continue
            nonces = json.loads(self.store.get("welcome"))
            if nonces[self.rank] == nonce:  # and not that of an earlier start
                start_id = str(nonces[0])
                self.store.set(f"{start_id}/came/{self.rank}", "")
                return start_id
        return None

    def _keys(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.size)]

    def _poll(self, timeout: float | None = None) -> Iterator[None]:
        """Yield until the time is up, with pauses.

        Between two yields are a heartbeat and a pause that grows from 20 to 200 ms. For a loop that
        looks and leaves when it sees what it waits for; if the loop ends by itself, the time is up.
        It looks at least once.

        Args:
            timeout: Seconds; None: `self.timeout`.
        """
        limit = self.timeout if timeout is None else timeout
        start = time.monotonic()
        waited = 0.0
        while waited <= limit:
            yield
            beat()
            # A twentieth of the time waited so far.
            time.sleep(min(max(_POLL_SECONDS, waited / 20), 10 * _POLL_SECONDS))
            waited = time.monotonic() - start

    def send(self, key: str, value: object, rank: int | None = None) -> None:
        """Store a value for all ranks to read.

        Args:
            key: Each rank may use it once.
            value: Any JSON value.
            rank: The sender; None: this rank.

        Raises:
            LostRankError: The store is gone.
        """
        sender = self.rank if rank is None else rank
        with _store_errors():
            self.store.set(f"{key}/{sender}", json.dumps(value))

    def _read(self, key: str, rank: int) -> Any:
        with _store_errors():
            return json.loads(self.store.get(f"{key}/{rank}"))

    def send_to_machine(self, text: str) -> None:
        """Send a text to the other ranks of this machine; may be called once."""
        with _store_errors():
            self.store.set(f"machine/{socket.gethostname()}", text)

    def receive_on_machine(self) -> str:
        """Wait for the text that another rank of this machine sends by `send_to_machine`.

        Machines are told apart by their host names.

        Raises:
            OptrunError: No rank of this machine sends one in time.
        """
        key = f"machine/{socket.gethostname()}"
        with _store_errors():
            # Looks until the key is there, or the time is up.
            if any(self.store.check([key]) for _ in self._poll()):
                return self.store.get(key).decode()
        raise OptrunError(
            f"rank {self.rank}: no rank with LOCAL_RANK=0 answers on {socket.gethostname()}. Each"
            " machine needs one; check how the launcher sets LOCAL_RANK."
        )

    def _wait_for_missing(self, key: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Wait for the values of ranks under a key, and return the ranks that sent none.

        Args:
            key: The key of the values.
            ranks: The senders.
            timeout: Seconds to wait for all of them.

        Returns:
            Empty as soon as all have sent a value.
        """
        keys = [f"{key}/{rank}" for rank in ranks]
        # `any` ends at the first look at which all keys are there, or when the time is up.
        with _store_errors():
            if not keys or any(self.store.check(keys) for _ in self._poll(timeout)):
                return []
            return [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]

    def receive(self, key: str, rank: int, timeout: float | None = None) -> Any:
        """Wait for the value of a rank, and return it.

        Args:
            key: The key of the value.
            rank: The sender.
            timeout: Seconds; None: `self.timeout`.

        Raises:
            OptrunError: The rank sends nothing in time.
        """
        timeout = self.timeout if timeout is None else timeout
        if self._wait_for_missing(key, [rank], timeout):
            raise OptrunError(f"rank {rank} did not send {key!r} within {timeout:g} s.")
        return self._read(key, rank)

    def all_reduce(self, key: str, value: object, combine: Callable[[list[Any]], Any]) -> Any:
        """Combine the values of all ranks on rank 0, and return the result on every rank.

        Every rank must call this.

        Args:
            key: Names this call; may be used once.
            value: The value of this rank, any JSON value.
            combine: Called on rank 0 with the values by rank; returns any JSON value.

        Raises:
            OptrunError: A rank sends nothing in time.
        """
        self.send(key, value)
        # Other ranks wait for the result, and confirm that they have it.
        if self.rank != 0:
            result = self.receive(f"{key}/result", 0, self.timeout + _READ_SECONDS)
            self.send(f"{key}/read", None)
            return result
        # Rank 0 waits for all values, and combines them.
        missing = self._wait_for_missing(key, range(self.size), self.timeout)
        if missing:
            raise OptrunError(
                f"{name_ranks(missing)} did not send {key!r} within {self.timeout:g} s."
            )
        with _store_errors():
            values = [json.loads(text) for text in self.store.multi_get(self._keys(key))]
        result = combine(values)
        self.send(f"{key}/result", result)
        # If this rank leaves, its store is gone, so it waits until all ranks have read.
        self._wait_for_missing(f"{key}/read", range(1, self.size), _READ_SECONDS)
        return result

    def collect(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        """Collect values of ranks, by rank; ranks without a value in time are left out.

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
    """Turn errors of torch's store inside the context into LostRankError.

    Raises:
        LostRankError: The store is gone, with the rank or launcher that held it.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's errors of the store
        raise LostRankError(
            f"rank 0, or the launcher that held the store of the ranks, has left: {error}"
        ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """List the numbers of one or more ranks for a message; only count any after the eighth.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2, 3]), name_ranks(range(20))
        ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {list_names(ranks, 8)}"
