"""What a step of each optimizer costs on a CPU, beside torch's fused AdamW and other packages, in one run.

    python benchmarks/optimizer_step.py [--threads 2] [--rounds 15] [--layers 12] [--vocabulary 30522] [--only REGEX]
                                        [--write]

Weights and gradients have the shapes of BERT-base, in one group unless it says otherwise. Contenders take turns: in
each round every one takes a step, and its time is divided by that of fused AdamW in the same round. The table has the
median of these ratios, the half of the rounds that lies in the middle, and the memory a step takes at its peak.
`--write` puts it into docs/performance.md. `--drift 10000` measures rounding instead: how far float32 weights are from
those of the float64 loop after so many steps.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from optrun.artifacts.provenance import hardware, versions
from optrun.optimizer import Adamax, AdamW, AdamWDL, Lamb, LazyAdam
from optrun.optimizer.kernels.choice import VARIABLE, why_not_compiled

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- step: begin -->", "<!-- step: end -->"
LR = 1e-9
"""So small that the weights, which all contenders share, stay what they are."""
REFERENCE = "torch AdamW, fused"


def bert(layers: int, vocabulary: int) -> dict[str, Parameter]:
    shapes = {"word": (vocabulary, 768), "position": (512, 768), "type": (2, 768), "norm.w": (768,), "norm.b": (768,)}
    for layer in range(layers):
        for name in ("query", "key", "value", "output"):
            shapes |= {f"{layer}.{name}.w": (768, 768), f"{layer}.{name}.b": (768,)}
        shapes |= {f"{layer}.up.w": (3072, 768), f"{layer}.up.b": (3072,), f"{layer}.down.w": (768, 3072)}
        shapes |= {f"{layer}.{name}": (768,) for name in ("down.b", "norm1.w", "norm1.b", "norm2.w", "norm2.b")}
    shapes |= {"pooler.w": (768, 768), "pooler.b": (768,)}
    generator = torch.Generator().manual_seed(0)
    params = {}
    for name, shape in shapes.items():
        params[name] = Parameter(0.02 * torch.randn(shape, generator=generator))
        params[name].grad = 1e-3 * torch.randn(shape, generator=generator)
    return params


@contextmanager
def kernel(name: str) -> Iterator[None]:
    os.environ[VARIABLE] = name
    yield
    del os.environ[VARIABLE]


def by(name: str, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def step() -> None:
        with kernel(name):
            optimizer.step()

    return step


def peer(module: str, name: str, params: dict[str, Parameter], **options: Any) -> Callable[[], object] | None:
    """A step of another package's class; None where it is not installed."""
    try:
        made = getattr(importlib.import_module(module), name)(params.values(), lr=LR, **options)
    except ImportError:
        return None
    return lambda: made.step()  # some wrap their step


def contenders(params: dict[str, Parameter]) -> dict[str, Callable[[], object] | None]:
    copies = [torch.empty_like(param) for param in params.values()]

    def copy() -> None:
        with torch.no_grad():
            for target, param in zip(copies, params.values(), strict=True):
                target.copy_(param)

    listed = list(params.items())
    groups = [{"params": listed[i::28], "lr_scale": 0.9**i} for i in range(min(28, len(listed)))]
    found: dict[str, Callable[[], object] | None] = {
        REFERENCE: torch.optim.AdamW(params.values(), lr=LR, fused=True).step,
        "a copy of the weights": copy,
        "optrun AdamW": AdamW(listed, lr=LR).step,
    }
    there = ["loop", "fused"] + ([] if why_not_compiled() else ["compiled"])
    for made in (AdamWDL, LazyAdam, Adamax, Lamb):
        optimizer = made(listed, lr=LR)
        for name in there:
            if (made, name) != (Adamax, "fused"):
                found[f"optrun {made.__name__}, {name}"] = by(name, optimizer)
    found["optrun Lamb, 28 groups"] = by("auto", Lamb(groups, lr=LR))
    found["optrun Lamb, foreach"] = by("foreach", optimizer)
    found["torch Adamax"] = peer("torch.optim", "Adamax", params)
    found["timm Lamb"] = peer("timm.optim", "Lamb", params, max_grad_norm=None)
    found["pytorch_optimizer Lamb"] = peer("pytorch_optimizer", "Lamb", params)
    return found


def peak_memory(step: Callable[[], object]) -> int | None:
    """Bytes a step takes besides what is there before it; None where the system does not tell (Linux does)."""

    def told(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    try:
        ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back, and counts when it is taken
        step()
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = told("VmRSS")
        step()
        return max(0, told("VmHWM") - before)
    except OSError:
        return None


def measure(given: argparse.Namespace) -> str:
    params = bert(given.layers, given.vocabulary)
    steps = {k: v for k, v in contenders(params).items() if k == REFERENCE or re.search(given.only, k)}
    seconds: dict[str, list[float]] = {name: [] for name, step in steps.items() if step is not None}
    for turn in range(given.rounds + 1):
        for name in seconds:
            step = steps[name]
            assert step is not None
            begun = time.perf_counter()
            step()
            if turn:  # the first makes the state
                seconds[name].append(time.perf_counter() - begun)
    rows = ["| a step of | CPU: ratio | middle half | extra memory | GPU |", "| --- | --- | --- | --- | --- |"]
    for name, step in steps.items():
        if step is None:
            rows.append(f"| {name} | not installed | | | |")
            continue
        ratios = sorted(own / base for own, base in zip(seconds[name], seconds[REFERENCE], strict=True))
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        extra = peak_memory(step)
        memory = "not known" if extra is None else f"{extra / 1e6:.0f} MB"
        rows.append(f"| {name} | {statistics.median(ratios):.2f} | {spread} | {memory} | not measured |")
    here, used = hardware("cpu", given.threads), versions()
    elements = sum(param.numel() for param in params.values())
    base = statistics.median(seconds[REFERENCE])
    told = (
        f"{here['processor']}, {here['cores']} cores, {given.threads} threads; torch {used['torch']}; "
        f"{elements / 1e6:.0f} million float32 weights in {len(params)} tensors; {given.rounds} rounds, "
        f"1.00 is {base * 1e3:.0f} ms."
    )
    return "\n".join([told, "", *rows])


def drift(steps: int) -> str:
    """Largest error of a weight against the float64 loop, relative to how far the weights went."""
    rows = ["| kernel | lamb | adamax | adamwdl | lazy_adam |", "| --- | --- | --- | --- | --- |"]

    def weights(made: Any, dtype: torch.dtype, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        param = Parameter(torch.randn(256, generator=generator).to(dtype))
        optimizer = made([param], lr=1e-3)
        with kernel(name):
            for _ in range(steps):
                param.grad = (torch.randn(256, generator=generator) + param.detach().float()).to(dtype)
                optimizer.step()
        return param.detach().double()

    makers = (Lamb, Adamax, AdamWDL, LazyAdam)
    exact = [weights(made, torch.float64, "loop") for made in makers]
    for name in ("loop", "foreach", "fused") + (() if why_not_compiled() else ("compiled",)):
        errors = [weights(made, torch.float32, name) - truth for made, truth in zip(makers, exact, strict=True)]
        rows.append(f"| {name} | " + " | ".join(f"{error.abs().max().item():.1e}" for error in errors) + " |")
    return "\n".join([f"Largest error of a weight after {steps:,} steps, against the loop in float64:", "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--only", default="", help="contenders whose name has this in it")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--drift", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = drift(given.drift) if given.drift else measure(given)
    print(table)
    if given.write and not given.drift:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
