"""The process that asks torch which CUDA devices there are.

So that the sweep's own never starts CUDA.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the UUID of every device that this process sees, by index, as JSON on one line."""
    import torch

    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    sys.stdout.write(json.dumps(uuids) + "\n")


if __name__ == "__main__":
    main()
