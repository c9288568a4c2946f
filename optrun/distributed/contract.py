"""Compare the facts of a start over all ranks, and let all ranks refuse if one does."""

import json
import os
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
    """Ranks that can combine their values: a `Rendezvous`, or a `World`."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, key: str, value: object, combine: Callable[[list[Any]], Any]) -> Any:
        """Combine the values of all ranks, by rank; return the result on every rank."""


def refuse_different(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """Refuse ranks with different facts, with the same message on every rank.

    Args:
        ranks: All of them must call this.
        facts: Values by dotted name; a value without a JSON form is compared by its `str`.

    Raises:
        ConfigError: Facts differ. The message names the first rank that differs from rank 0, both
            machines, and up to three keys with both values.
    """
    if ranks.size == 1:
        return
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    message = ranks.all_reduce("contract", [socket.gethostname(), texts], _describe_difference)
    if message is not None:
        raise ConfigError(message)


def call_on_all(ranks: Ranks, act: Callable[[], T]) -> T:
    """Call a function on every rank; if it raises an OptrunError on one, every rank raises one.

    So no rank goes on alone, and waits for those that failed. Any other error is raised on its rank
    only.

    Args:
        ranks: All of them must call this.
        act: Sends nothing between ranks.

    Returns:
        The result of this rank.

    Raises:
        OptrunError: The error of this rank if it has one; else an error of the same class as that
            of the first failing rank, with its number and machine.
    """
    if ranks.size == 1:
        return act()
    # Each rank sends its error or None, once; `_first_error` returns the first one on every rank.
    try:
        result = act()
    except OptrunError as error:
        error_record = [error.exit_code, socket.gethostname(), str(error)]
        ranks.all_reduce("errors", error_record, _first_error)
        raise
    first_error = ranks.all_reduce("errors", None, _first_error)
    if first_error is not None:
        rank, code, host, message = first_error
        # The class of errors with this exit code.
        raise kind_of(code)(f"rank {rank} on {host}: {message}")
    return result


def _first_error(errors: Sequence[Any]) -> list[Any] | None:
    """Return [rank, *error] of the first rank with an error; None if all entries are None."""
    for rank, error in enumerate(errors):
        if error is not None:
            return [rank, *error]
    return None


def _describe_difference(values: Sequence[Any]) -> str | None:
    """Describe how the first rank with other facts than rank 0 differs from rank 0.

    Args:
        values: By rank: its host, and its facts as name -> JSON text.

    Returns:
        The message, with up to three keys; None if the facts of all ranks are equal.
    """
    host, facts = values[0]
    differing_ranks = [rank for rank, (_, rank_facts) in enumerate(values) if rank_facts != facts]
    if not differing_ranks:
        return None
    rank = differing_ranks[0]
    rank_host, rank_facts = values[rank]
    keys = [key for key in {**facts, **rank_facts} if facts.get(key) != rank_facts.get(key)]
    differences = []
    for key in keys[:_MAX_KEYS]:
        value = _shorten(facts.get(key), rank_facts.get(key))
        rank_value = _shorten(rank_facts.get(key), facts.get(key))
        differences.append(
            f"{key}={rank_value} on {rank_host} (rank {rank}), {value} on {host} (rank 0)"
        )
    more_keys = f"; {len(keys) - _MAX_KEYS} more keys" if len(keys) > _MAX_KEYS else ""
    more_ranks = len(differing_ranks) - 1
    also = f" {more_ranks} more ranks differ from rank 0." if more_ranks else ""
    return (
        f"The ranks were started differently: {'; '.join(differences)}{more_keys}. Start all ranks"
        f" with the same code and configuration.{also}"
    )


def _shorten(value: str | None, other: str | None) -> str:
    """Shorten a JSON text to 60 characters around its first difference from another one.

    Quotes around it are left out. None, a missing value, becomes "nothing".

    Example:
        >>> _shorten('"' + 50 * "x " + 'lr=1"', '"' + 50 * "x " + 'lr=2"')
        '...x x x x x x x x x x lr=1'
    """
    if value is None:
        return "nothing"
    text = value.strip('"')
    if len(text) <= _MAX_CHARACTERS:
        return text
    # The length of what both have in common.
    first_difference = len(os.path.commonprefix([text, (other or "").strip('"')]))  # noqa: RUF071  # characters, no paths
    begin = max(0, first_difference - _CONTEXT)
    end = begin + _MAX_CHARACTERS
    head = "..." if begin > 0 else ""
    tail = "..." if len(text) > end else ""
    return f"{head}{text[begin:end]}{tail}"
