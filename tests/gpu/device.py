"""Which device the tests of this folder run on.

`OPTRUN_GPU_DRY=1` runs them on the CPU as far as that goes, so that the tests themselves are tested
where there is no CUDA device.
"""

from __future__ import annotations

import os

DRY = os.environ.get("OPTRUN_GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
