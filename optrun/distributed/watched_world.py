"""A world whose ranks are seen to wait, and that names it when one is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.verdict import LostRankError, is_lost_rank
from optrun.distributed.world import World


class WatchedWorld(World):
    """Several ranks; what they tell each other is a sign of life."""

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gather each rank's numbers, as `World.all_gather`."""
        with _waiting():
            return super().all_gather(values)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather each rank's object, as `World.gather_objects`."""
        with _waiting():
            return super().gather_objects(value)

    def broadcast(self, value: Any) -> Any:
        """Send what rank 0 has, as `World.broadcast`."""
        with _waiting():
            return super().broadcast(value)


@contextmanager
def _waiting() -> Iterator[None]:
    """Show that this rank waits for the others.

    Raises:
        LostRankError: One of them has left, or does not answer.
    """
    before = beat(Phase.waiting)
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise LostRankError(f"another rank does not answer: {str(error).splitlines()[0]}") from error
    beat(before)
