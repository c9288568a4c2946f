"""What a step costs the host, beside torch's fused AdamW: many tensors, hardly any numbers in them.

    python benchmarks/host_cost.py [--tensors 199] [--size 8] [--groups 1] [--steps 50] [--rounds 9]

Every optimizer steps tensors of its own, on one CPU thread, by the kernel that it takes by default.
In each round it takes `--steps` steps in a loop of its own, after a few that are not timed. The
table has the fastest round of each and its ratio to the fastest round of fused AdamW: what else
runs on the machine can only add time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.optimizer import (
    Adamax,
    AdamWDL,
    AdEMAMix,
    Lamb,
    LazyAdam,
    Lion,
    Mars,
    ScheduleFreeAdamW,
)
from optrun.optimizer.kernels.report import kernel_of

REFERENCE = "torch AdamW, fused"
OURS: Sequence[type[Optimizer]] = (
    Lamb,
    Adamax,
    AdamWDL,
    LazyAdam,
    Lion,
    ScheduleFreeAdamW,
    AdEMAMix,
    Mars,
)
WARM_UP_STEPS = 10


def parameter_groups(tensors: int, size: int, groups: int) -> list[dict[str, object]]:
    """Make named parameters with gradients, dealt out over so many groups."""
    generator = torch.Generator().manual_seed(0)
    named = []
    for index in range(tensors):
        param = Parameter(torch.randn(size, generator=generator))
        param.grad = torch.randn(size, generator=generator)
        named.append((f"layer.{index}.weight", param))
    return [{"params": named[first::groups]} for first in range(groups)]


def seconds_per_step(optimizer: Optimizer, steps: int) -> float:
    """Time steps in a loop that does nothing else."""
    for _ in range(WARM_UP_STEPS):
        optimizer.step()
    begin = time.thread_time()
    for _ in range(steps):
        optimizer.step()
    return (time.thread_time() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=199)
    parser.add_argument("--size", type=int, default=8, help="numbers in each tensor")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50, help="in a round")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = (arguments.tensors, arguments.size, arguments.groups)
    optimizers: dict[str, Optimizer] = {
        REFERENCE: torch.optim.AdamW(parameter_groups(*shape), fused=True)
    }
    for cls in OURS:
        optimizer = cls(parameter_groups(*shape))
        optimizers[f"{cls.__name__}, {kernel_of(optimizer, 'cpu')}"] = optimizer
    fastest = dict.fromkeys(optimizers, float("inf"))
    for _ in range(arguments.rounds):
        for name, optimizer in optimizers.items():
            fastest[name] = min(fastest[name], seconds_per_step(optimizer, arguments.steps))
    print(
        f"{arguments.tensors} tensors of {arguments.size} numbers in {arguments.groups} group(s),"
        f" one CPU thread; the fastest of {arguments.rounds} rounds of {arguments.steps} steps."
    )
    print("\n| a step of | ms | over fused AdamW |\n| --- | --- | --- |")
    for name, seconds in fastest.items():
        print(f"| {name} | {seconds * 1e3:.3f} | {seconds / fastest[REFERENCE]:.2f} |")


if __name__ == "__main__":
    main()
