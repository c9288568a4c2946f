"""Metrics to other trackers, each an extra, imported only when used."""

from optrun.tracking.trackers import build_tracker, require_tracker

__all__ = ["build_tracker", "require_tracker"]
