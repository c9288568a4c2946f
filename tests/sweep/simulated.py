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
    if not sys.argv[1:]:  # a worker
        launch.refuse_unseen = lambda visible: None
        launch.serve(sweep_worker.train_job)
    else:
        devices.visible_devices = lambda: ["0", "1"]
        launch.LaunchProcess.module = "tests.sweep.simulated"
        sys.exit(cli.run(sys.argv[1:]))
