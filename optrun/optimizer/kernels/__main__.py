"""Compile the kernel of the optimizers' step beside its source.

`python -m optrun.optimizer.kernels`.
"""

from __future__ import annotations

import sys

from optrun.optimizer.kernels.build import SOURCE, build

if __name__ == "__main__":
    reason = build(SOURCE.parent)
    sys.exit(f"no compiled kernel: {reason}" if reason else None)
