"""How long a rank may be silent: `distributed.timeout_seconds`."""

from optrun.distributed.heartbeat import Phase, RankStatus

KEY = "distributed.timeout_seconds"
_FIRST_STEP_SECONDS = 300.0
"""Shortest limit until the first step of a start is done: libraries are imported, kernels compiled.
"""


def longest_silence(timeout_seconds: float) -> float:
    """Return the longest silence allowed to any rank, in seconds: at least 300."""
    return max(timeout_seconds, _FIRST_STEP_SECONDS)


def allowed_silence(status: RankStatus, timeout_seconds: float) -> float:
    """Return the allowed silence of a rank after its last heartbeat, in seconds.

    That is `timeout_seconds`; but at least 300 until every rank has done its first step.

    Args:
        status: The last heartbeat.
        timeout_seconds: The option `distributed.timeout_seconds`.
    """
    # A rank that waits for others may have done its first step while they still compile theirs.
    steps_needed = 2 if status.phase is Phase.waiting else 1
    if status.done >= steps_needed:
        return timeout_seconds
    return longest_silence(timeout_seconds)


def describe_limit(status: RankStatus, timeout_seconds: float) -> str:
    """Write the allowed silence of a rank with its option, for messages.

    Example:
        >>> early = RankStatus(1, 0, Phase.training, 0, 0.0)
        >>> describe_limit(early, 5)
        '300 s (distributed.timeout_seconds, 300 s at least until the first step is done)'
    """
    seconds = allowed_silence(status, timeout_seconds)
    if seconds > timeout_seconds:
        return f"{seconds:g} s ({KEY}, {seconds:g} s at least until the first step is done)"
    return f"{seconds:g} s ({KEY})"
