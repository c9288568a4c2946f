"""The simulated runs of the report serve the card of a run, too."""

from __future__ import annotations

from tests.unit.report.conftest import make_run

__all__ = ["make_run"]
