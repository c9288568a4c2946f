"""What all ranks have to say alike: one contract for a start, one refusal for all."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from optrun.base.errors import ConfigError, OptrunError
from optrun.distributed.verdict import kind_of

T = TypeVar("T")
_NAMED = 3
"""Keys that a message names."""
_LONGEST = 60
"""Characters of a value in a message."""
_BEFORE = 23
"""Of them, those that two long values have in common."""


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

    Each tells one digest. The facts themselves are told where digests differ, by rank 0 and the
    first that differs.

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
        raise ConfigError(
            ranks.settle(f"{key}/facts", told, lambda every: _difference(every, others))
        )


def agree(ranks: Ranks, act: Callable[[], T], key: str = "agree") -> T:
    """Run an action on every rank; if one of them refuses, all do.

    Args:
        ranks: All of them take part.
        act: Without messages between ranks; each keeps its own result.
        key: Used once.

    Raises:
        OptrunError: This rank's own, or that of the first rank that has one.
    """
    if ranks.size == 1:
        return act()
    result: list[T] = []
    own: OptrunError | None = None
    try:
        result.append(act())
    except OptrunError as error:
        own = error
    refusal = ranks.settle(
        key, None if own is None else [own.exit_code, socket.gethostname(), str(own)], _first
    )
    if own is not None:
        raise own
    if refusal is not None:
        rank, code, host, message = refusal
        raise kind_of(code)(f"rank {rank} on {host}: {message}")
    return result[0]


def _first(every: Sequence[Any]) -> list[Any] | None:
    return next(
        ([rank, *refusal] for rank, refusal in enumerate(every) if refusal is not None), None
    )


def _different(every: Sequence[object]) -> list[int]:
    return [rank for rank, theirs in enumerate(every) if theirs != every[0]]


def _difference(every: Sequence[Any], others: Sequence[int]) -> str:
    """Describe what differs between rank 0 and the first rank that is another one."""
    (host, ours), (other_host, theirs) = every[0], every[others[0]]
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    parts = [
        f"{name}={_shown(theirs.get(name), ours.get(name))} on {other_host} (rank {others[0]}),"
        f" {_shown(ours.get(name), theirs.get(name))} on {host} (rank 0)"
        for name in names[:_NAMED]
    ]
    more = f"; {len(names) - _NAMED} more keys" if len(names) > _NAMED else ""
    also = f" {len(others) - 1} more ranks differ from rank 0." if len(others) > 1 else ""
    return (
        f"The ranks would not run the same: {'; '.join(parts)}{more}. Expected the same on all"
        f" ranks.{also}"
    )


def _shown(value: str | None, other: str | None) -> str:
    """Show a value, a long one from shortly before the place where it parts from the other.

    Example:
        >>> _shown('"' + 50 * "x " + 'lr=1"', '"' + 50 * "x " + 'lr=2"')
        '...x x x x x x x x x x lr=1'
    """
    if value is None:
        return "nothing"
    text = value.strip('"')
    if len(text) <= _LONGEST:
        return text
    pairs = enumerate(zip(text, (other or "").strip('"'), strict=False))
    same = next((at for at, (own, theirs) in pairs if own != theirs), 0)
    begin = max(0, same - _BEFORE)
    head = "..." if begin else ""
    tail = "..." if len(text) > begin + _LONGEST else ""
    return f"{head}{text[begin : begin + _LONGEST]}{tail}"
