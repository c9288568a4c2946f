"""Metrics to other trackers, each an extra, imported only when used."""

from optrun.tracking.trackers import Tracker, build_tracker, require_tracker

__all__ = ["Tracker", "build_tracker", "require_tracker"]
