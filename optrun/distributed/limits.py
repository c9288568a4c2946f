"""How long a rank may be silent: `distributed.timeout_seconds`."""

from __future__ import annotations

from optrun.distributed.heartbeat import Phase, RankStatus

KEY = "distributed.timeout_seconds"
_FIRST_STEP_SECONDS = 300.0
"""At least, until the first step of a start is done: libraries are imported, kernels compiled."""


def longest_silence(timeout_seconds: float) -> float:
    """Return the seconds after which no rank waits for another one any more."""
    return max(timeout_seconds, _FIRST_STEP_SECONDS)


def allowed_silence(status: RankStatus, timeout_seconds: float) -> float:
    """Return how many seconds a rank may be silent after this sign of life.

    Args:
        status: Its last. A rank that waits may be one step ahead of a rank in its first step.
        timeout_seconds: Of the configuration.
    """
    first_steps = 1 if status.phase is Phase.waiting else 0
    if status.done > first_steps:
        return timeout_seconds
    return longest_silence(timeout_seconds)


def describe_limit(status: RankStatus, timeout_seconds: float) -> str:
    """Name the limit of a rank, for messages.

    Example:
        >>> early = RankStatus(1, 0, Phase.training, 0, 0.0)
        >>> describe_limit(early, 5)
        '300 s (distributed.timeout_seconds, 300 s at least until the first step is done)'
    """
    seconds = allowed_silence(status, timeout_seconds)
    if seconds > timeout_seconds:
        return f"{seconds:g} s ({KEY}, {seconds:g} s at least until the first step is done)"
    return f"{seconds:g} s ({KEY})"
