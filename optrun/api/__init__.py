"""optrun from Python: what `optrun.run`, `optrun.sweep`, `optrun.compose` and `optrun.load_run` are."""

from optrun.api.saved_run import Result, Run, load_run
from optrun.api.start import SweepResult, compose, run, sweep

__all__ = ["Result", "Run", "SweepResult", "compose", "load_run", "run", "sweep"]
