"""Time and memory of a loss over a large vocabulary.

All logits, chunks of them, torch's own function.

    python benchmarks/chunked_loss.py [--rows 1024] [--width 512] [--vocabulary 128256] [--repeats
    3]

Forward and backward of the output head and the loss alone, in float32, each in a process of its own
on one thread. The memory is the peak over that of states and weights; the gradient of the weights
is a part of it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

from optrun.model import chunked_loss

WAYS = ("all logits", "optrun", "torch, chunk of 128", "torch, default chunk")


def loss(way: str, states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean loss."""
    if way == "all logits":
        return functional.cross_entropy(functional.linear(states, weight), targets)
    if way == "optrun":
        found: Tensor = chunked_loss._RowLosses.apply(states, weight, None, targets)[0].mean()
        return found
    chunk = 128 if "128" in way else None
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    own: Tensor = functional.linear_cross_entropy(states, weight, targets, options=options)
    return own


def measure(way: str, rows: int, width: int, vocabulary: int, repeats: int) -> None:
    """Print seconds (CPU) and MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states, weight = (
        torch.randn(rows, width).requires_grad_(),
        torch.randn(vocabulary, width).mul_(0.02).requires_grad_(),
    )
    targets = torch.randint(vocabulary, (rows,))
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(repeats):
        states.grad = weight.grad = None
        begun = time.process_time()
        loss(way, states, weight, targets).backward()
        seconds.append(time.process_time() - begun)
    print(
        statistics.median(seconds),
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="measured in this process")
    given = parser.parse_args()
    if given.way is not None:
        measure(given.way, given.rows, given.width, given.vocabulary, given.repeats)
        return
    print("| loss | CPU seconds | memory, MiB |\n| --- | --- | --- |")
    for way in WAYS if hasattr(torch.nn, "LinearCrossEntropyOptions") else WAYS[:2]:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--way", way], check=True, capture_output=True, text=True
        )
        seconds, memory = map(float, done.stdout.split())
        print(f"| {way} | {seconds:.1f} | {memory:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
