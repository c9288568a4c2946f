"""How long a rank may be silent, by what it is at; names as in torchtitan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from optrun.distributed.heartbeat import Heartbeat, Phase

_FIRST_SECONDS = 300.0
"""At least, until the first step is done where nothing else is said.

Libraries are imported, kernels compiled.
"""


@dataclass(frozen=True)
class Limit:
    """Seconds without a sign of life, and what says so."""

    seconds: float
    what: str
    """Of what, for messages."""
    said_by: str
    """Where the number stands."""
    key: str
    """That raises it."""

    def __str__(self) -> str:
        """Name it for messages."""
        return f"{self.seconds:g} s ({self.said_by}, the limit {self.what})"


@dataclass(frozen=True)
class Limits:
    """The limits of a run."""

    meeting: float
    """Seconds that ranks wait for each other to come."""
    first_step: Limit
    step: Limit
    save: Limit
    is_early: bool = False
    """Whether they are those of who acts before a rank is ended."""

    @classmethod
    def of(cls, values: Mapping[str, float | None], share: float = 1.0) -> Self:
        """Read them from the values of `distributed`.

        Args:
            values: By key; those of a run without ranks, or of an older one, lack some.
            share: Below 1: of each, for who acts before a rank is ended.
        """
        meeting = values["timeout_seconds"]
        assert meeting is not None

        def limit(name: str, what: str, least: float = 0.0) -> Limit:
            key, given = f"distributed.{name}", values.get(name)
            if given is not None:
                return Limit(share * given, what, key, key)
            at_least = f", {least:g} s at least" if least > meeting else ""
            return Limit(
                share * max(meeting, least), what, f"distributed.timeout_seconds{at_least}", key
            )

        first = limit("init_timeout_seconds", "until the first step is done", _FIRST_SECONDS)
        step = limit("train_timeout_seconds", "of a step")
        save = limit("save_timeout_seconds", "of a save")
        return cls(meeting, first, step, save, is_early=share < 1)

    @property
    def longest(self) -> float:
        """Seconds after which no rank waits for another one any more."""
        return max(self.meeting, self.first_step.seconds, self.step.seconds, self.save.seconds)

    @property
    def shortest(self) -> float:
        """Seconds after which the first rank may be found silent."""
        return min(self.first_step.seconds, self.step.seconds, self.save.seconds)

    def at(self, heartbeat: Heartbeat) -> Limit:
        """Pick the limit of what a rank is at."""
        if heartbeat.phase is Phase.waiting:
            return self._of_others(heartbeat)
        if heartbeat.phase in (Phase.saving, Phase.publishing):
            return self.save
        return self.step if heartbeat.done else self.first_step

    def _of_others(self, heartbeat: Heartbeat) -> Limit:
        """Pick the limit of a rank that waits for others, which may be at anything.

        The longest counts, so that it is not ended for the time that they may take. Who acts before
        the end takes the
        shortest: the rank that is waited for may be ended by that, on another machine.
        """
        # Others may still be in their first step when this one has done it, and no longer when it
        # has done two.
        found = (
            [self.step, self.save]
            if heartbeat.done > 1
            else [self.first_step, self.step, self.save]
        )
        pick = min if self.is_early else max
        return replace(pick(found, key=lambda limit: limit.seconds), what="of what other ranks do")
