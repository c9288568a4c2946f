"""`python -m tests.faults.slow_disk ...`.

Optrun on a disk that takes its time, so that a kill falls inside a save.

In memory, or on a quick disk, a save is over before another process has seen that it began.
"""

from __future__ import annotations

import os
import time
from typing import Any

from optrun.cli import main as cli

_fsync = os.fsync


def fsync(descriptor: Any) -> None:
    time.sleep(0.004)
    _fsync(descriptor)


if __name__ == "__main__":
    os.fsync = fsync
    cli.main()
