"""Every optimizer on 2 and 4 gloo ranks, whole (DDP), sharded (FSDP2) and both (HSDP), against
one process in float64.

The ranks are started once for a layout and note for each case how far they are from one process;
the tests read that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optrun.base.errors import ConfigError
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.classes import class_of
from optrun.optimizer.clip import build_clip
from optrun.scheduler import build_scheduler
from tests.distributed.promised import promised
from tests.optimizer_cases import CASES, GOOD, GOOD_IDS
from tests.ranks import run_ranks

STEPS = 5
BATCH = 8


class Net(nn.Module):
    """Several matrices, uneven shapes, names of their own, and a bias of one element.

    A rank holds an empty shard.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 13)
        self.gain = nn.LayerNorm(13)
        self.middle = nn.Linear(13, 9)
        self.last = nn.Linear(9, 10)
        self.head = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, 1)."""
        hidden = torch.tanh(self.gain(self.body(self.table(x))))
        return self.head(torch.tanh(self.last(torch.tanh(self.middle(hidden)))))  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(11, (BATCH,), generator=generator)
    return x, torch.randn(BATCH, 1, generator=generator, dtype=torch.float64)


@dataclass
class Run:
    """What is trained with, beside the layout.

    Attributes:
        name: Of the optimizer.
        options: Its keywords.
        clip: Its name and options.
        scheduler: A schedule over the steps.
        rules: By a part of the name, what a parameter's group has besides.
        dtype: Of the weights.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: tuple[str, Mapping[str, Any]] = ("none", {})
    scheduler: str | None = None
    rules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Layer-wise: scales from the embedding up."""
        out = []
        for index, (name, param) in enumerate(model.named_parameters()):
            extra = [rule for part, rule in self.rules.items() if part in name]
            out.append(
                {
                    "params": [(name, param)],
                    "lr_scale": 0.5 + 0.1 * index,
                    **(extra[0] if extra else {}),
                }
            )
        return out

    def train(
        self, model: nn.Module, over: nn.Module | None = None, part: slice = slice(None)
    ) -> list[float]:
        """The gradient norms of the steps.

        Args:
            model: Holds the parameters.
            over: What the forward pass goes through, where it is another module.
            part: This rank's of each batch.
        """
        lr = next(case.lr for case in CASES if case.name == self.name)
        optimizer = build_optimizer(self.name, self.groups(model), **{"lr": lr, **self.options})
        clip = build_clip(self.clip[0], **self.clip[1])
        scheduler = None
        if self.scheduler is not None:
            scheduler = build_scheduler(
                optimizer,
                self.scheduler,
                num_training_steps=STEPS,
                num_warmup_steps=2,
            )
        norms = []
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            ((over or model)(x[part]).double() - y[part]).square().mean().backward()
            norms.append(float(clip(optimizer)))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return norms


def runs() -> Iterator[tuple[str, Run]]:
    """All that the table of optimizers has, and what goes around and between optimizers."""
    for (case, options), name in zip(GOOD, GOOD_IDS, strict=True):
        yield name, Run(case.name, options)
    yield "adam-amsgrad", Run("adam", {"amsgrad": True})
    yield "lamb-loop", Run("lamb", {"foreach": False})
    yield "lamb-foreach", Run("lamb", {"foreach": True})
    yield (
        "adamwdl-ratios",
        Run("adamwdl", {"layerwise_decay": 0.8, "set_param_lr_fun": lambda *_: 0.3}),
    )
    yield "decay-of-the-step", Run("lamb", {"weight_decay": lambda step: 0.1 * step})
    yield (
        "rule-beside",
        Run("lamb", rules={"middle": {"optimizer": "sgd", "momentum": 0.9}, "head": {"lr": 0.02}}),
    )
    yield "rule-muon", Run("lamb", rules={"body.weight": {"optimizer": "muon"}})
    yield "muon-plain-momentum", Run("muon", {"nesterov": False})
    for scheduler in ("cosine", "linear", "inverse_sqrt"):
        yield f"schedule-{scheduler}", Run("lamb", {"weight_decay": 0.1}, scheduler=scheduler)
    yield "clip-global", Run("adamw", clip=("global_norm", {"max_norm": 0.1}))
    yield "clip-muon", Run("muon", clip=("global_norm", {"max_norm": 0.1}))
    yield "clip-norm", Run("lamb", clip=("norm", {"max_norm": 0.05}))
    yield "clip-value", Run("sgd", clip=("value", {"max_value": 0.01}))


RUNS = dict(runs())


@cache
def alone(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms after training in one process."""
    model = net().to(RUNS[name].dtype)
    norms = RUNS[name].train(model)
    assert all(
        not torch.equal(param, before)
        for param, before in zip(model.parameters(), net().parameters(), strict=True)
    )
    return {key: param.detach() for key, param in model.named_parameters()}, norms


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """In two groups, each gathered once a step.

    Optimizers see nothing of it, and collectives are what takes time.
    """
    fully_shard(model.body, mesh=mesh, reshard_after_forward=False)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for n, p in model.named_parameters()
    }


def farthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The greatest difference of any weight, over the largest weight."""
    largest = max(value.abs().max().item() for value in wanted.values())
    return max((found[name] - value).abs().max().item() for name, value in wanted.items()) / largest


def measure(rank: int, ranks: int, layout: str, folder: str) -> None:
    part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    found: dict[str, Any] = {}
    mesh: Any = None
    if layout != "ddp":
        shape, names = (
            ((ranks,), ("shard",))
            if layout == "fsdp"
            else ((2, ranks // 2), ("replicate", "shard"))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for name, run in RUNS.items():
        model = net().to(run.dtype)
        try:
            if layout == "ddp":
                norms = run.train(model, DistributedDataParallel(model), part)
            else:
                norms = run.train(sharded(model, mesh), None, part)
        except ConfigError as error:
            found[name] = str(error)
            continue
        weights = whole(model)
        if rank == 0:
            wanted, wanted_norms = alone(name)
            worst = max(abs(a - b) / (b or 1.0) for a, b in zip(norms, wanted_norms, strict=True))
            found[name] = [farthest(weights, wanted), worst]
    if rank == 0:
        Path(folder, f"{layout}-{ranks}.json").write_text(json.dumps(found), encoding="utf-8")


def two_whole(rank: int, folder: str) -> None:
    measure(rank, 2, "ddp", folder)


def two_sharded(rank: int, folder: str) -> None:
    measure(rank, 2, "fsdp", folder)


def four_whole(rank: int, folder: str) -> None:
    measure(rank, 4, "ddp", folder)


def four_sharded(rank: int, folder: str) -> None:
    measure(rank, 4, "fsdp", folder)


def four_both(rank: int, folder: str) -> None:
    measure(rank, 4, "hsdp", folder)


LAYOUTS: dict[str, tuple[Callable[[int, str], None], int]] = {
    "ddp-2": (two_whole, 2),
    "fsdp-2": (two_sharded, 2),
    "ddp-4": (four_whole, 4),
    "fsdp-4": (four_sharded, 4),
    "hsdp-4": (four_both, 4),
}

WHOLE = {case.name for case in CASES if not case.shards}

TOLERANCES = promised("optimizer=", "`ddp`")
"""Of every optimizer, whatever the layout."""

SLOW = {"ddp-4", "fsdp-4", "hsdp-4"}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LAYOUTS]
)
def test_ranks_are_one_process(layout: str, tmp_path: Path) -> None:
    check, ranks = LAYOUTS[layout]
    run_ranks(tmp_path, partial(check, folder=str(tmp_path)), ranks)
    found = json.loads((tmp_path / f"{layout}.json").read_text(encoding="utf-8"))
    assert list(found) == list(RUNS)
    far = {}
    for name, run in RUNS.items():
        if run.name in WHOLE and not layout.startswith("ddp"):
            assert "'table.weight' is sharded" in found[name]
            assert "lamb" in found[name]
        elif max(found[name]) > TOLERANCES[run.name]:  # of weights and of norms
            far[name] = found[name]
    assert not far


def zero_redundancy_is_one_process(rank: int) -> None:
    """Each rank steps a part of the parameters and sends them to the others."""
    del rank
    for case in CASES:
        model, other = net(), net()
        if case.name == "muon":  # its class takes matrices alone, as torch's does
            for one in (model, other):
                for param in one.parameters():
                    param.requires_grad_(param.dim() == 2)
        params, others = (
            [param for param in one.parameters() if param.requires_grad] for one in (model, other)
        )
        make = class_of(case.name)
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=make, lr=case.lr)
        alone = make(others, lr=case.lr)
        for step in range(3):
            x, y = batch(step)
            for one, its_optimizer in ((model, optimizer), (other, alone)):
                its_optimizer.zero_grad()
                nn.functional.mse_loss(one(x), y).backward()
                its_optimizer.step()
        for param, expected in zip(params, others, strict=True):
            assert torch.equal(param, expected), case.name


@pytest.mark.slow
def test_zero_redundancy_optimizer_of_torch(tmp_path: Path) -> None:
    run_ranks(tmp_path, zero_redundancy_is_one_process)
