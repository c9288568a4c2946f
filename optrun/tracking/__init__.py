"""Metrics to other trackers, each an extra, imported only when used."""

from optrun.tracking.trackers import TrackedRun, Tracker, build_tracker, require_tracker, scalars

__all__ = ["TrackedRun", "Tracker", "build_tracker", "require_tracker", "scalars"]
