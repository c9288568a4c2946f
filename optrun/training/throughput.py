"""Throughput since the last metrics line, of training alone."""

from __future__ import annotations

from collections.abc import Callable


class Throughput:
    """Counts what was trained on, and for how long.

    Args:
        clock: Seconds, monotonic.
        samples_at_peak: Samples per second of devices that are never idle; None: not known.
    """

    def __init__(self, clock: Callable[[], float], samples_at_peak: float | None = None) -> None:
        self.clock = clock
        self.samples_at_peak = samples_at_peak
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
        """Compute tokens and samples per second, and model FLOPs utilization; nothing if there were none."""
        elapsed = max(self.clock() - self.begun, 1e-9)
        counted = {"perf/tokens_per_second": self.tokens, "perf/samples_per_second": self.samples}
        found = {name: count / elapsed for name, count in counted.items() if count}
        if self.samples and self.samples_at_peak:
            found["perf/mfu"] = self.samples / elapsed / self.samples_at_peak
        return found
