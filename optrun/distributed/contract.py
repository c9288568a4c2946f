"""Compare the facts of a start over all ranks, and let all ranks refuse if one does."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from optrun.base.errors import ConfigError, OptrunError
from optrun.distributed.verdict import kind_of

T = TypeVar("T")
_MAX_KEYS = 3
"""Most keys in a message."""
_MAX_CHARACTERS = 60
"""Most characters of a value in a message."""
_CONTEXT = 23
"""Characters that are shown before the first difference of two long values."""


class Ranks(Protocol):
    """Ranks that can judge values together: a `Meeting`, or a `World`."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def settle(self, key: str, value: object, judge: Callable[[list[Any]], Any]) -> Any:
        """Call `judge` with the values of all ranks, by rank; every rank gets its result."""


def refuse_different(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Refuse ranks with different facts, with the same message on every rank.

    Args:
        ranks: All of them must call this.
        facts: Values by dotted name; a value that JSON cannot hold is compared by its `str`.

    Raises:
        ConfigError: With the first rank that differs from rank 0, their machines, and up to three
            keys with both values.
    """
    if ranks.size == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    message = ranks.settle("contract", [socket.gethostname(), texts], _describe_difference)
    if message is not None:
        raise ConfigError(message)


def agree(ranks: Ranks, act: Callable[[], T]) -> T:
    """Call a function on every rank; if it raises an OptrunError on one, every rank raises one.

    Args:
        ranks: All of them must call this.
        act: Sends nothing between ranks.

    Returns:
        The result of this rank.

    Raises:
        OptrunError: This rank's own, else one of the same kind as that of the first rank that has
            one, with its rank and machine.
    """
    if ranks.size == 1:
        return act()
    try:
        result = act()
    except OptrunError as error:
        ranks.settle("agree", [error.exit_code, socket.gethostname(), str(error)], _first_refusal)
        raise
    refusal = ranks.settle("agree", None, _first_refusal)
    if refusal is not None:
        rank, code, host, message = refusal
        raise kind_of(code)(f"rank {rank} on {host}: {message}")
    return result


def _first_refusal(refusals: Sequence[Any]) -> list[Any] | None:
    """Return the first refusal, its rank prepended; None if all values are None."""
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            return [rank, *refusal]
    return None


def _describe_difference(values: Sequence[Any]) -> str | None:
    """Describe how the first rank with other facts than rank 0 differs from it.

    Args:
        values: Host and facts of each rank, by rank.

    Returns:
        None if the facts of all ranks are equal.
    """
    host, facts = values[0]
    ranks = [rank for rank, (_, other_facts) in enumerate(values) if other_facts != facts]
    if not ranks:
        return None
    other_host, other_facts = values[ranks[0]]
    names = [name for name in {**facts, **other_facts} if facts.get(name) != other_facts.get(name)]
    differences = []
    for name in names[:_MAX_KEYS]:
        value = _shorten(facts.get(name), other_facts.get(name))
        other_value = _shorten(other_facts.get(name), facts.get(name))
        differences.append(
            f"{name}={other_value} on {other_host} (rank {ranks[0]}), {value} on {host} (rank 0)"
        )
    more = f"; {len(names) - _MAX_KEYS} more keys" if len(names) > _MAX_KEYS else ""
    also = f" {len(ranks) - 1} more ranks differ from rank 0." if len(ranks) > 1 else ""
    return (
        f"The ranks would not run the same: {'; '.join(differences)}{more}. Expected the same on"
        f" all ranks.{also}"
    )


def _shorten(value: str | None, other: str | None) -> str:
    """Shorten a value to the 60 characters around its first difference from the other.

    Quotes around it are left out; None, a missing value, is "nothing".

    Example:
        >>> _shorten('"' + 50 * "x " + 'lr=1"', '"' + 50 * "x " + 'lr=2"')
        '...x x x x x x x x x x lr=1'
    """
    if value is None:
        return "nothing"
    text = value.strip('"')
    if len(text) <= _MAX_CHARACTERS:
        return text
    pairs = enumerate(zip(text, (other or "").strip('"'), strict=False))
    first_difference = next((at for at, (ours, theirs) in pairs if ours != theirs), 0)
    begin = max(0, first_difference - _CONTEXT)
    head = "..." if begin else ""
    tail = "..." if len(text) > begin + _MAX_CHARACTERS else ""
    return f"{head}{text[begin : begin + _MAX_CHARACTERS]}{tail}"
