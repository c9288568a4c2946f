"""What a step of each optimizer costs, beside torch's fused AdamW and other packages, in one run.

    python benchmarks/optimizer_step.py [--threads N] [--rounds 9] [--layers 12]
        [--vocabulary 30522] [--only REGEX]
    python benchmarks/optimizer_step.py --drift 10000

Weights and gradients have the shapes of BERT-base, in one group unless it says otherwise; on the
CPU, and on a GPU where there is one. Contenders take turns: in each round every one takes a step
right after one of fused AdamW, over whose time its own is divided. The table has the median of
these ratios, the half of the rounds that lies in the middle, and the memory that a step takes at
its peak besides what was there before. All contenders work on the same two moments, so that the
whole of BERT-base takes 4 GB. `--drift` measures rounding instead: how far float32 weights are from
those of the float64 loop after so many steps.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ratios import cells
from torch import Tensor
from torch.nn import Parameter

from optrun.base.errors import ConfigError
from optrun.optimizer import (
    Adamax,
    AdamW,
    AdamWDL,
    AdEMAMix,
    Lamb,
    LazyAdam,
    Lion,
    Mars,
    ScheduleFreeAdamW,
)
from optrun.optimizer.kernels.choice import NAMES, VARIABLE
from optrun.optimizer.kernels.library import library
from optrun.optimizer.kernels.report import kernel_of

LR = 1e-9
"""So small that the weights, which all contenders share, stay what they are."""
REFERENCE = "torch AdamW, fused"
Step = Callable[[], object]


def bert(layers: int, vocabulary: int, device: str) -> dict[str, Parameter]:
    shapes = {
        "word": (vocabulary, 768),
        "position": (512, 768),
        "type": (2, 768),
        "norm.w": (768,),
        "norm.b": (768,),
    }
    for layer in range(layers):
        for name in ("query", "key", "value", "output"):
            shapes |= {f"{layer}.{name}.w": (768, 768), f"{layer}.{name}.b": (768,)}
        shapes |= {
            f"{layer}.up.w": (3072, 768),
            f"{layer}.up.b": (3072,),
            f"{layer}.down.w": (768, 3072),
        }
        shapes |= {
            f"{layer}.{name}": (768,)
            for name in ("down.b", "norm1.w", "norm1.b", "norm2.w", "norm2.b")
        }
    shapes |= {"pooler.w": (768, 768), "pooler.b": (768,)}
    generator = torch.Generator().manual_seed(0)
    params = {}
    for name, shape in shapes.items():
        params[name] = Parameter((0.02 * torch.randn(shape, generator=generator)).to(device))
        params[name].grad = (1e-3 * torch.randn(shape, generator=generator)).to(device)
    return params


@contextmanager
def kernel(name: str) -> Iterator[None]:
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def kernels(optimizer: torch.optim.Optimizer, device: str) -> Iterable[str]:
    """Those that step an optimizer on a device, the default one first."""
    found = dict.fromkeys([kernel_of(optimizer, device)])
    for name in NAMES:
        try:
            with kernel(name):
                found.setdefault(kernel_of(optimizer, device))
        except ConfigError:  # it is not there
            continue
    return found


def by(name: str, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        with kernel(name):
            optimizer.step()

    return step


def share(optimizer: torch.optim.Optimizer, moments: dict[tuple[Tensor, str], Tensor]) -> None:
    """Take a first step, and put the moments that all optimizers work on into the state that it
    makes.
    """
    optimizer.step()
    for param, state in optimizer.state.items():
        for key, moment in (("exp_avg", "first"), ("exp_avg_sq", "second"), ("exp_inf", "second")):
            if key in state:
                state[key] = moments.setdefault((param, moment), state[key])


def peers(params: dict[str, Parameter], only: str) -> dict[str, Any]:
    """Other packages' classes by name, if `only` is found in it.

    None where one is not installed.
    """
    found: dict[str, Any] = {}
    for name, module, options in (
        ("torch Adamax", "torch.optim", {}),
        ("timm Lamb", "timm.optim", {"max_grad_norm": None}),
        ("pytorch_optimizer Lamb", "pytorch_optimizer", {}),
    ):
        if not re.search(only, name):
            continue
        try:
            found[name] = getattr(importlib.import_module(module), name.split()[1])(
                params.values(), lr=LR, **options
            )
        except (
            ImportError,
            RuntimeError,
        ) as error:  # RuntimeError: a torchvision of another torch, below timm
            print(f"{name} is not measured: {error}", file=sys.stderr)
            found[name] = None
    return found


def contenders(params: dict[str, Parameter], device: str, only: str) -> dict[str, Step | None]:
    """Steps by name: of the reference, and of those in whose name `only` is found.

    The others are not made.
    """
    copies = [torch.empty_like(param) for param in params.values()]
    moments: dict[tuple[Tensor, str], Tensor] = {}

    def copy() -> None:
        with torch.no_grad():
            for target, param in zip(copies, params.values(), strict=True):
                target.copy_(param)

    listed = list(params.items())
    groups = [{"params": listed[i::28], "lr_scale": 0.9**i} for i in range(min(28, len(listed)))]
    reference = torch.optim.AdamW(params.values(), lr=LR, fused=True)
    share(reference, moments)
    found: dict[str, Step | None] = {REFERENCE: reference.step, "a copy of the weights": copy}
    for made in (AdamW, AdamWDL, LazyAdam, Adamax, Lamb, Lion, ScheduleFreeAdamW, AdEMAMix, Mars):
        own = f"optrun {made.__name__}"
        if not any(
            re.search(only, name) for name in (own, *(f"{own}, {kernel}" for kernel in NAMES))
        ):
            continue
        optimizer = made(listed, lr=LR)
        share(optimizer, moments)
        for name in kernels(optimizer, device):
            found |= (
                {own: by("auto", optimizer)}
                if name == "torch"
                else {f"{own}, {name}": by(name, optimizer)}
            )
    if re.search(only, "optrun Lamb, 28 groups"):
        grouped = Lamb(groups, lr=LR)
        share(grouped, moments)
        found["optrun Lamb, 28 groups"] = by("auto", grouped)
    for name, optimizer in peers(params, only).items():
        if optimizer is not None:
            share(optimizer, moments)
        found[name] = optimizer and (
            lambda optimizer=optimizer: optimizer.step()
        )  # some wrap their step
    return found


def peak_memory(step: Step, device: str) -> int | None:
    """Bytes a step takes besides what is there before it.

    None where the system does not tell (Linux does).
    """
    if device == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before

    def told(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    try:
        # What was freed goes back to the system, so that it counts when it is taken again: 3 is
        # M_MMAP_THRESHOLD.
        ctypes.CDLL(None).mallopt(-3, 2**16)
        step()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = told("VmRSS")
        step()
        return max(0, told("VmHWM") - before)
    except OSError:
        return None


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(given: argparse.Namespace, device: str) -> tuple[float, dict[str, str]]:
    """Seconds of the reference, and the cells of each contender on one device."""
    steps = contenders(bert(given.layers, given.vocabulary, device), device, given.only)
    reference = steps[REFERENCE]
    assert reference is not None
    found: dict[str, list[float]] = {name: [] for name in steps if re.search(given.only, name)}
    bases = []
    for turn in range(given.rounds + 1):
        for name, ratios in found.items():
            step = steps[name]
            if step is None:
                continue
            base, own = seconds(reference, device), seconds(step, device)
            if turn:  # the first makes caches
                bases.append(base)
                ratios.append(own / base)
    rows = {}
    for name, ratios in found.items():
        step = steps[name]
        if step is None:
            rows[name] = "not installed | | "
        else:
            extra = peak_memory(step, device)
            rows[name] = (
                f"{cells(ratios)} | {'not known' if extra is None else f'{extra / 1e6:.0f} MB'}"
            )
    return statistics.median(bases), rows


def measure(given: argparse.Namespace) -> str:
    base, cpu = measured(given, "cpu")
    told = [f"1.00 is {base * 1e3:.1f} ms on {given.threads} CPU threads"]
    gpu: dict[str, str] = {}
    if torch.cuda.is_available():
        base, gpu = measured(given, "cuda")
        told.append(f"{base * 1e3:.2f} ms on the GPU")
    params = bert(given.layers, given.vocabulary, "meta")
    count, elements = len(params), sum(param.numel() for param in params.values())
    head = (
        f"{elements / 1e6:.0f} million float32 weights in {count} tensors; {', '.join(told)};"
        f" {given.rounds} rounds."
    )
    columns = "ratio | middle half | extra memory"
    if library().missing:
        head += f" Without the compiled kernel: {library().missing}."
    if not gpu:
        rows = [f"| a step of | CPU: {columns} |", "| --- | --- | --- | --- |"]
        rows += [f"| {name} | {ratios} |" for name, ratios in cpu.items()]
        return "\n".join([head, "", *rows])
    rows = [f"| a step of | CPU: {columns} | GPU: {columns} |", "|" + " --- |" * 7]
    rows += [
        f"| {name} | {cpu.get(name, '– | | ')} | {gpu.get(name, '– | | ')} |"
        for name in {**cpu, **gpu}
    ]
    return "\n".join([head, "", *rows])


def drift(steps: int) -> str:
    """Largest error of a weight against the float64 loop."""

    def weights(made: Any, dtype: torch.dtype, name: str) -> Tensor | None:
        generator = torch.Generator().manual_seed(0)
        param = Parameter(torch.randn(256, generator=generator).to(dtype))
        optimizer = made([param], lr=1e-3)
        if name not in kernels(optimizer, "cpu"):
            return None
        with kernel(name):
            for _ in range(steps):
                param.grad = (torch.randn(256, generator=generator) + param.detach().float()).to(
                    dtype
                )
                optimizer.step()
        return param.detach().double()

    def cell(made: Any, name: str) -> str:
        found = weights(made, torch.float32, name)
        return "–" if found is None else f"{(found - exact[made]).abs().max().item():.1e}"

    makers = (Lamb, Adamax, AdamWDL, LazyAdam, Lion, ScheduleFreeAdamW, AdEMAMix, Mars)
    exact = {made: weights(made, torch.float64, "loop") for made in makers}
    rows = [
        f"| kernel | {' | '.join(made.__name__ for made in makers)} |",
        "| --- " * (len(makers) + 1) + "|",
    ]
    for name in NAMES[1:]:
        cells_of = [cell(made, name) for made in makers]
        if set(cells_of) != {"–"}:
            rows.append(f"| {name} | {' | '.join(cells_of)} |")
    return "\n".join(
        [
            f"Largest error of a weight after {steps:,} steps, against the loop in float64.",
            "",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument(
        "--only", default="", help="contenders in whose name this regular expression is found"
    )
    parser.add_argument("--drift", type=int, default=0, metavar="STEPS")
    given = parser.parse_args()
    torch.set_num_threads(1 if given.drift else given.threads)
    print(drift(given.drift) if given.drift else measure(given))


if __name__ == "__main__":
    main()
