"""List the CUDA devices in a process of its own: the sweep's process never starts CUDA."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the UUIDs of the visible devices, by index, as one JSON line."""
    import torch

    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    sys.stdout.write(json.dumps(uuids) + "\n")


if __name__ == "__main__":
    main()
