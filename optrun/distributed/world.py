"""The ranks of a run, and the collectives between them on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from optrun.base.errors import first_line
from optrun.distributed.contract import call_on_all
from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.verdict import LostRankError, is_lost_rank

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks that train one model; a run in one process has one.

    Collectives of a world use gloo groups on the CPU, not the group of the gradients: no device is
    waited for, and the thread that writes checkpoints has a group of its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among those of this machine; picks the device."""
    local_size: int = 1
    """Number of ranks on this machine."""
    control: ProcessGroup | None = None
    """Group of the training thread; None in one process."""
    saving: ProcessGroup | None = None
    """Group of the thread that writes checkpoints; None in one process."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes metrics, trackers, summary and report."""
        return self.rank == 0

    @classmethod
    def join(cls, backend: str, timeout: timedelta) -> Self:
        """Initialize the process groups from the environment variables of torchrun.

        The default group is left as it is if it exists.

        Args:
            backend: Backend of the default group, such as `gloo` or `cpu:gloo,cuda:nccl`.
            timeout: Time after which a collective raises.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timeout)
        return cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=int(os.environ.get("LOCAL_RANK", dist.get_rank())),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
            control=dist.new_group(backend="gloo", timeout=timeout),
            saving=dist.new_group(backend="gloo", timeout=timeout),
        )

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gather the numbers of each rank, by rank, on every rank.

        Args:
            values: As many on every rank; sent as float64.

        Raises:
            LostRankError: Another rank has left, or does not answer in time.
        """
        if self.size == 1:
            return [list(values)]
        import torch

        row = torch.tensor(values, dtype=torch.float64)
        rows: list[list[float]] = self.gather_tensors(row).tolist()
        return rows

    def gather_tensors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks on every rank: (...) becomes (ranks, ...).

        All ranks must pass the same shape. The result is on the device of the tensor; for a GPU the
        host does not wait.
        """
        import torch
        import torch.distributed as dist

        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        # None: the default group, whose backend is the one of the device.
        group = self.control if tensor.device.type == "cpu" else None
        with _waiting():
            dist.all_gather(rows, tensor, group=group)
        return torch.stack(rows)

    def gather_objects(self, value: T) -> list[T]:
        """Gather the objects of all ranks, by rank, on every rank; they are pickled on the way."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values = [value] * self.size
        with _waiting():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def call_on_all(self, act: Callable[[], T]) -> T:
        """Call a function on every rank; if it raises an OptrunError on one, every rank raises one.

        See `optrun.distributed.contract.call_on_all`.
        """
        return call_on_all(self, act)

    def call_on_main(self, act: Callable[[], T]) -> T:
        """Call a function on rank 0 alone, and broadcast its result to every rank.

        Every rank must call this; the others wait for rank 0.

        Args:
            act: Sends nothing between ranks. Its result is pickled on the way.

        Raises:
            OptrunError: On every rank, if the function raises one on rank 0.
        """
        # The result of other ranks, None, is replaced by that of rank 0.
        result = self.call_on_all(lambda: act() if self.is_main else None)
        return cast("T", self.broadcast(result))

    def all_reduce(self, key: str, value: object, combine: Callable[[list[Any]], T]) -> T:  # noqa: ARG002
        """Combine the values of all ranks; every rank calls `combine` and gets its result.

        `key` is unused; only `Rendezvous.all_reduce`, which sends by a store, needs it.
        """
        return combine(self.gather_objects(value))

    def merge_names(self, names: list[str]) -> list[str]:
        """Merge the names of all ranks: in the order of ranks, without duplicates."""
        return list(dict.fromkeys(chain.from_iterable(self.gather_objects(names))))

    def broadcast(self, value: T) -> T:
        """Send the value of rank 0 to every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with _waiting():
            dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather([0.0])


ALONE = World()
"""A run in one process."""


@contextmanager
def _waiting() -> Iterator[None]:
    """Report the phase `waiting` while a collective runs, and the phase before when it is done.

    After an error the phase stays `waiting`: this rank waits for one that is lost.

    Raises:
        LostRankError: Another rank has left, or does not answer in time.
    """
    phase_before = beat(Phase.waiting)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise LostRankError(f"another rank does not answer: {first_line(error)}") from error
    beat(phase_before)
