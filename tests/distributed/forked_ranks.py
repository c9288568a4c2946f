"""`python -m tests.distributed.forked_ranks certify resume ...`.

Agents fork their ranks, with all imports done.

A rank's start takes most of its time, and a proof over nodes starts hundreds. The disk is slow, as
in
`tests.faults.slow_disk`, so that kills fall inside saves.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from optrun.cli import main as cli
from optrun.cli import train
from tests.faults.slow_disk import fsync
from tests.preloaded import fork_ranks

SPARES = 24
"""Ranks that an agent can start: as many as kills, and the first."""
_train = train.run


def run(*given: Any) -> Any:
    fork_ranks(SPARES)
    return _train(*given)


if __name__ == "__main__":
    importlib.import_module("tests.heavy_imports")
    os.fsync, train.run = fsync, run
    cli.main()
