"""optrun from Python: `run`, `sweep`, `compose`, `load_run` and `transfer`."""

from optrun.api.saved_run import Result, Run, load_run
from optrun.api.start import SweepResult, compose, run, sweep, transfer

__all__ = ["Result", "Run", "SweepResult", "compose", "load_run", "run", "sweep", "transfer"]
