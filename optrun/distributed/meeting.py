"""Where the ranks of a start find each other: torch's store, before there is any group, and after groups are broken."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from optrun import __version__
from optrun.base.errors import ConfigError, OptrunError
from optrun.distributed.verdict import LostRankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOK = 0.02
"""Seconds between two looks into the store; a signal is heard between them, as it is not in `Store.wait`."""
_READ_SECONDS = 10.0
"""For the others to read what all have told."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class Meeting:
    """What the ranks tell each other as JSON, by key.

    Args:
        store: Shared by all ranks.
        rank: Of this process.
        size: Ranks in all.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout

    @classmethod
    def join(cls, timeout: float) -> Self:
        """Meet the other ranks where the environment says, as `torch.distributed.rendezvous` with `env://`.

        Args:
            timeout: Seconds to wait for the others.

        Raises:
            ConfigError: Not all ranks come, the port is taken, or they run different versions.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's agent has a store already, `torch.distributed.rendezvous._create_c10d_store`.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                host,
                port,
                is_master=rank == 0 and not hosted,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if "EADDRINUSE" in str(error) or "in use" in str(error):
                raise ConfigError(
                    f"MASTER_PORT={port}: in use on {host} by another program. Expected a free port, the same for all "
                    "ranks."
                ) from error
            raise ConfigError(
                f"rank {rank} of {size} found nobody at {host}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout:g} s "
                "(distributed.timeout_seconds). Is rank 0 started, and can this machine reach it?"
            ) from error
        attempt = f"optrun/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get(_RESTARTS, '0')}"
        meeting = cls(PrefixStore(attempt, store), rank, size, timeout)
        meeting._greet(f"{host}:{port}")
        return meeting

    def _greet(self, where: str) -> None:
        """Wait for every rank, and see that all run the same program.

        Raises:
            ConfigError: One does not come, or has another version.
        """
        import torch

        own = {"optrun": __version__, "torch": torch.__version__, "python": platform.python_version()}
        try:
            self.send("hello", {**own, "host": socket.gethostname()})
            missing = self._missing("hello", range(self.size), self.timeout)
        except LostRankError as error:
            raise ConfigError(
                f"rank {self.rank} of {self.size}: rank 0 has left {where} before all ranks had come; it says why, and "
                f"waits for {self.timeout:g} s (distributed.timeout_seconds). Start optrun for each of them, or say "
                "how many there are."
            ) from error
        if missing:
            came = self.size - len(missing)
            raise ConfigError(
                f"{came} of {self.size} ranks came to {where} within {self.timeout:g} s (distributed.timeout_seconds); "
                f"missing: {ranks_shown(missing)}. Start optrun for each of them, or say how many there are."
            )
        ranks = self._read_all("hello")
        for package in own:
            for rank, theirs in enumerate(ranks):
                if theirs[package] != ranks[0][package]:
                    raise ConfigError(
                        f"rank {rank} on {theirs['host']} runs {package} {theirs[package]}, rank 0 on "
                        f"{ranks[0]['host']} runs {ranks[0][package]}. Expected the same version on all ranks."
                    )

    def send(self, key: str, value: Any, rank: int | None = None) -> None:
        """Tell all ranks something.

        Args:
            key: Used once by this rank.
            value: Anything that JSON holds.
            rank: That it is told for; None: this one.
        """
        with _open_store():
            self.store.set(f"{key}/{self.rank if rank is None else rank}", json.dumps(value))

    def _read(self, key: str, rank: int) -> Any:
        with _open_store():
            return json.loads(self.store.get(f"{key}/{rank}"))

    def tell_machine(self, text: str) -> None:
        """Tell the ranks of this machine something, once."""
        with _open_store():
            self.store.set(f"machine/{socket.gethostname()}", text)

    def hear_machine(self) -> str:
        """Wait for what is told to the ranks of this machine.

        Raises:
            OptrunError: Nothing comes in time.
        """
        key, deadline = f"machine/{socket.gethostname()}", time.monotonic() + self.timeout
        with _open_store():
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise OptrunError(
                        f"rank {self.rank}: no first rank on {socket.gethostname()}; is LOCAL_RANK right?"
                    )
                time.sleep(_LOOK)
            return self.store.get(key).decode()

    def _missing(self, key: str, ranks: Sequence[int], timeout: float) -> list[int]:
        """Wait for what ranks tell; those that did not, in time."""
        deadline = time.monotonic() + timeout
        missing = list(ranks)
        while True:
            with _open_store():
                missing = [rank for rank in missing if not self.store.check([f"{key}/{rank}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_LOOK)

    def receive(self, key: str, rank: int, timeout: float | None = None) -> Any:
        """Wait for what a rank tells.

        Args:
            key: Of it.
            rank: Which one.
            timeout: Seconds; None: that of the meeting.

        Raises:
            OptrunError: Nothing came in time.
        """
        timeout = self.timeout if timeout is None else timeout
        if self._missing(key, [rank], timeout):
            raise OptrunError(f"rank {rank} is silent: {key} was awaited for {timeout:g} s.")
        return self._read(key, rank)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Tell all ranks something, and hear it of all.

        Args:
            key: Used once.
            value: Of this rank; anything that JSON holds.

        Raises:
            OptrunError: A rank tells nothing in time.
        """
        self.send(key, value)
        missing = self._missing(key, range(self.size), self.timeout)
        if missing:
            raise OptrunError(f"{ranks_shown(missing)}: silent for {self.timeout:g} s ({key}).")
        return self._read_all(key)

    def _read_all(self, key: str) -> list[Any]:
        """Read what all ranks have told; rank 0, which may hold the store, and may leave now, waits for the others."""
        found = [self._read(key, rank) for rank in range(self.size)]
        self.send(f"{key}/read", None)
        if self.rank == 0:
            self.heard(f"{key}/read", range(self.size), _READ_SECONDS)
        return found

    def heard(self, key: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        """Return what ranks have told in time, of those that did; nothing if the store is gone.

        Args:
            key: Of it.
            ranks: Of interest.
            timeout: Seconds to wait for all of them.
        """
        try:
            missing = self._missing(key, ranks, timeout)
            return {rank: self._read(key, rank) for rank in ranks if rank not in missing}
        except LostRankError:
            return {}


@contextmanager
def _open_store() -> Iterator[None]:
    """Open the store to ask it.

    Raises:
        LostRankError: It is gone with the rank that held it.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's errors of the store
        raise LostRankError(f"rank 0, or whoever held the store of the ranks, has left: {error}") from error


def ranks_shown(ranks: Sequence[int]) -> str:
    """Name ranks for a message.

    Example:
        >>> ranks_shown([1]), ranks_shown([0, 2, 3]), ranks_shown(range(20))
        ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
