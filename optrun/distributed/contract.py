"""One contract for all ranks of a start, and one refusal for all of them."""

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
"""Most keys in a message."""
_LONGEST = 60
"""Most characters of a value in a message."""
_BEFORE = 23
"""Characters that are shown before the first difference of two long values."""


class Ranks(Protocol):
    """Ranks that can settle a question together: a meeting, or a world."""

    @property
    def rank(self) -> int:
        """Return the number of this process."""

    @property
    def size(self) -> int:
        """Count the ranks."""

    def settle(self, key: str, value: object, judge: Callable[[list[Any]], Any]) -> Any:
        """Judge the values of all ranks; every rank gets the same result."""


def refuse_different(ranks: Ranks, facts: Mapping[str, object], key: str = "contract") -> None:
    """Refuse ranks with different facts, with the same message on every rank.

    Each rank sends a digest. If digests differ, rank 0 and the first other one send their facts.

    Args:
        ranks: All of them take part.
        facts: By dotted name; a value that JSON cannot hold is compared by its text.
        key: Used once.

    Raises:
        ConfigError: With machine and rank, key and both values.
    """
    if ranks.size == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    different_ranks = ranks.settle(key, digest, _ranks_unlike_first)
    if different_ranks:
        message = [socket.gethostname(), texts] if ranks.rank in (0, different_ranks[0]) else None
        raise ConfigError(
            ranks.settle(
                f"{key}/facts",
                message,
                lambda messages: _describe_difference(messages, different_ranks),
            )
        )


def agree(ranks: Ranks, act: Callable[[], T], key: str = "agree") -> T:
    """Run an action on every rank; if one rank refuses, all do.

    Args:
        ranks: All of them take part.
        act: Without messages between ranks; each keeps its own result.
        key: Used once.

    Raises:
        OptrunError: This rank's own, or that of the first rank that has one.
    """
    if ranks.size == 1:
        return act()
    try:
        result = act()
    except OptrunError as error:
        ranks.settle(key, [error.exit_code, socket.gethostname(), str(error)], _first_refusal)
        raise
    refusal = ranks.settle(key, None, _first_refusal)
    if refusal is not None:
        rank, code, host, message = refusal
        raise kind_of(code)(f"rank {rank} on {host}: {message}")
    return result


def _first_refusal(refusals: Sequence[Any]) -> list[Any] | None:
    """Return the first refusal with its rank in front; None: no rank refuses."""
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            return [rank, *refusal]
    return None


def _ranks_unlike_first(values: Sequence[object]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _describe_difference(messages: Sequence[Any], different_ranks: Sequence[int]) -> str:
    """Describe how the facts of rank 0 and of the first other rank differ."""
    other_rank = different_ranks[0]
    host, facts = messages[0]
    other_host, other_facts = messages[other_rank]
    names = [name for name in {**facts, **other_facts} if facts.get(name) != other_facts.get(name)]
    parts = [
        f"{name}={_shorten(other_facts.get(name), facts.get(name))} on {other_host}"
        f" (rank {other_rank}), {_shorten(facts.get(name), other_facts.get(name))} on {host}"
        " (rank 0)"
        for name in names[:_NAMED]
    ]
    more = f"; {len(names) - _NAMED} more keys" if len(names) > _NAMED else ""
    also = ""
    if len(different_ranks) > 1:
        also = f" {len(different_ranks) - 1} more ranks differ from rank 0."
    return (
        f"The ranks would not run the same: {'; '.join(parts)}{more}. Expected the same on all"
        f" ranks.{also}"
    )


def _shorten(value: str | None, other: str | None) -> str:
    """Shorten a long value to the part around its first difference from the other.

    Example:
        >>> _shorten('"' + 50 * "x " + 'lr=1"', '"' + 50 * "x " + 'lr=2"')
        '...x x x x x x x x x x lr=1'
    """
    if value is None:
        return "nothing"
    text = value.strip('"')
    if len(text) <= _LONGEST:
        return text
    pairs = enumerate(zip(text, (other or "").strip('"'), strict=False))
    first_difference = next((at for at, (ours, theirs) in pairs if ours != theirs), 0)
    begin = max(0, first_difference - _BEFORE)
    head = "..." if begin else ""
    tail = "..." if len(text) > begin + _LONGEST else ""
    return f"{head}{text[begin : begin + _LONGEST]}{tail}"
