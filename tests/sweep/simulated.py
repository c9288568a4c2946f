"""The real program on a machine with two simulated devices.

`python -m tests.sweep.simulated -m ...`.

Only what torch would answer is simulated. The sweep's process starts its workers as ever; they run
this module, too.
"""

from __future__ import annotations

import sys

from optrun.cli import main as cli
from optrun.cli import sweep_worker
from optrun.sweeper import devices, launch

if __name__ == "__main__":
    if all(argument.isdecimal() for argument in sys.argv[1:]):  # the locks of a worker
        launch.refuse_unseen = lambda visible: None
        launch.serve(
            [int(argument) for argument in sys.argv[1:]],
            sweep_worker.train_job,
        )
    else:
        devices._ask_torch = lambda visible: ["aaaa-0", "bbbb-1"]
        launch.Server.module = "tests.sweep.simulated"
        sys.exit(cli.run(sys.argv[1:]))
