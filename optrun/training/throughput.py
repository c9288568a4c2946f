"""Throughput since the last metrics line, of training alone."""

from __future__ import annotations

from collections.abc import Callable


class Throughput:
    """Counts what was trained on, and for how long.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.begun, self.tokens, self.samples = self.clock(), 0, 0

    def add(self, tokens: int, samples: int) -> None:
        """Count a micro-batch."""
        self.tokens += tokens
        self.samples += samples

    def leave_out(self, seconds: float) -> None:
        """Leave out time that something else took: an evaluation, the copy for a checkpoint."""
        self.begun += seconds

    def rates(self) -> dict[str, float]:
        """Tokens and samples per second, as metrics; nothing where there were none."""
        elapsed = max(self.clock() - self.begun, 1e-9)
        counted = {"perf/tokens_per_second": self.tokens, "perf/samples_per_second": self.samples}
        return {name: count / elapsed for name, count in counted.items() if count}
