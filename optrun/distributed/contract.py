"""One contract for a start: every rank proves that it runs the same thing, before a step and at each save."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from optrun.base.errors import ConfigError

_NAMED = 3
"""Keys that a message names."""
_LONGEST = 60
"""Characters of a value in a message."""


class Ranks(Protocol):
    """What settles a question over ranks: a meeting, or a world."""

    @property
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    def size(self) -> int:
        """Count the ranks."""

    def settle(self, key: str, value: object, judge: Callable[[list[Any]], Any]) -> Any:
        """Judge what all ranks tell; every rank has the same result."""


def refuse_different(ranks: Ranks, facts: Mapping[str, object], key: str = "contract") -> None:
    """Refuse ranks that would not run the same thing; every rank comes to the same message.

    Each tells one digest. The facts themselves are told where digests differ, by rank 0 and the first that differs.

    Args:
        ranks: All of them take part.
        facts: By dotted name; what JSON cannot hold counts as its text.
        key: Used once.

    Raises:
        ConfigError: With machine and rank, key and both values.
    """
    if ranks.size == 1:
        return
    own = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    others = ranks.settle(key, digest, _different)
    if others:
        told = [socket.gethostname(), own] if ranks.rank in (0, others[0]) else None
        raise ConfigError(ranks.settle(f"{key}/facts", told, lambda every: _difference(every, others)))


def _different(every: Sequence[object]) -> list[int]:
    return [rank for rank, theirs in enumerate(every) if theirs != every[0]]


def _difference(every: Sequence[Any], others: Sequence[int]) -> str:
    """Describe what differs between rank 0 and the first rank that is another one."""
    (host, ours), (other_host, theirs) = every[0], every[others[0]]
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    parts = [
        f"{name}={_shown(theirs.get(name))} on {other_host} (rank {others[0]}), {_shown(ours.get(name))} on {host} "
        "(rank 0)"
        for name in names[:_NAMED]
    ]
    more = f"; {len(names) - _NAMED} more keys" if len(names) > _NAMED else ""
    also = f" {len(others) - 1} more ranks differ from rank 0." if len(others) > 1 else ""
    return f"The ranks would not run the same: {'; '.join(parts)}{more}. Expected the same on all ranks.{also}"


def _shown(value: str | None) -> str:
    if value is None:
        return "nothing"
    text = value.strip('"')
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
