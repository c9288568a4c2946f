"""What ranks cannot do with an optimizer is refused before training, by name.

What they can do with sparse rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optrun.api import compose
from optrun.base.errors import ConfigError
from optrun.config.registry import plugins
from optrun.optimizer.build import build_optimizer, refuse_unshardable
from optrun.optimizer.sparse_gradients import refuse_sparse_gradients
from optrun.testing import check_optimizer
from tests.ranks import run_ranks

STRANGERS = """
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

import optrun
from optrun.config.schema.optimizer_base import OptimizerConfig


@dataclass(kw_only=True)
class Config(OptimizerConfig):
    default_lr: float = 0.01
    weight_decay: float = 0.0


@optrun.register_optimizer("elementwise", schema=Config)
class Elementwise(Optimizer):
    TAKES_SHARDS = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def direction(self, param):
        moment = self.state[param].setdefault("moment", torch.zeros_like(param))
        return moment.mul_(0.9).add_(param.grad).tanh()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param), alpha=group["lr"])


@optrun.register_optimizer("own_piece", schema=Config)
class OwnPiece(Elementwise):
    pass


@optrun.register_optimizer("deaf", schema=Config)
class Deaf(Elementwise):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param), alpha=0.01)
"""


@pytest.fixture
def _strangers(tmp_path: Path) -> Iterator[None]:
    path = tmp_path / "strangers.py"
    path.write_text(STRANGERS, encoding="utf-8")
    plugins.load(str(path))
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


class Rows(nn.Module):
    """A table of which a batch touches some rows, and a head."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, 1)."""
        return self.head(self.table(x))  # type: ignore[no-any-return]


def rows() -> Rows:
    torch.manual_seed(0)
    return Rows(sparse=True).double()


def train(model: nn.Module, over: nn.Module, optimizer: Optimizer, part: slice) -> None:
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(9, (8,), generator=generator)
        optimizer.zero_grad()
        (over(x[part]) - 1.0).square().mean().backward()
        optimizer.step()


def sparse_rows_under_ddp(rank: int) -> None:
    part = slice(4 * rank, 4 * rank + 4)
    for name, options in (
        ("lazy_adam", {"weight_decay": 0.1}),
        ("lazy_adam", {"grad_centralization": True}),
        ("adamwdl", {"lazy_mode": True}),
        ("sgd", {"momentum": 0.9}),
        ("lamb", {}),
    ):
        alone, model = rows(), rows()
        train(alone, alone, build_optimizer(name, groups(alone), lr=0.05, **options), slice(None))
        optimizer = build_optimizer(name, groups(model), lr=0.05, **options)
        train(model, DistributedDataParallel(model, find_unused_parameters=True), optimizer, part)
        assert model.table.weight.grad is not None
        assert model.table.weight.grad.is_sparse
        for (key, found), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-12, atol=1e-12, msg=lambda t, k=f"{name}, {key}": f"{k}: {t}"
            )
        if name != "lamb":
            assert torch.equal(model.table.weight[9:], rows().table.weight[9:]), (
                "rows of no rank stay"
            )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [pair]} for pair in model.named_parameters()]


def test_sparse_rows_under_ddp_are_one_process(tmp_path: Path) -> None:
    run_ranks(tmp_path, sparse_rows_under_ddp)


def test_sparse_gradients_are_refused_where_they_cannot_be_reduced() -> None:
    for distributed, device, facts in (
        (
            "fsdp",
            "cpu",
            ("distributed=fsdp", "table.weight", "FSDP2", "sparse=False", "distributed=ddp"),
        ),
        ("ddp", "cuda", ("distributed=ddp", "table.weight", "on cuda", "sparse=False")),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse_sparse_gradients(rows(), distributed, device)
        for fact in facts:
            assert fact in str(refused.value)
        refuse_sparse_gradients(Rows(sparse=False), distributed, device)
        frozen = rows()
        frozen.table.weight.requires_grad_(False)
        refuse_sparse_gradients(frozen, distributed, device)
    refuse_sparse_gradients(rows(), "ddp")
    refuse_sparse_gradients(rows(), "none", "cuda")


def test_what_is_known_to_take_no_shards_is_refused_before_ranks_start() -> None:
    adafactor, lamb = (
        compose(["optimizer=adafactor"]).optimizer,
        compose(["optimizer=lamb"]).optimizer,
    )
    rule = {"pattern": "head", "optimizer": "adafactor"}
    for config, rules, key in (
        (adafactor, [], "optimizer=adafactor"),
        (lamb, [{"pattern": "x"}, rule], "param_groups.rules[1].optimizer=adafactor"),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse_unshardable(config, "fsdp", rules)
        for fact in (key, "Adafactor", "whole parameters", "distributed=ddp", "adamw"):
            assert fact in str(refused.value)
        for distributed in ("none", "ddp"):
            refuse_unshardable(config, distributed, rules)
    refuse_unshardable(lamb, "fsdp")
    library = compose(["optimizer=pytorch_optimizer", "optimizer.class_name=lion"]).optimizer
    with pytest.raises(ConfigError, match=r"optimizer.class_name=lion: .*distributed=ddp"):
        refuse_unshardable(library, "fsdp")


@pytest.mark.usefixtures("_strangers")
def test_a_stranger_says_itself_that_it_takes_shards() -> None:
    refuse_unshardable(compose(["optimizer=elementwise"]).optimizer, "fsdp")
    for distributed in ("none", "ddp"):
        refuse_unshardable(compose(["optimizer=own_piece"]).optimizer, distributed)
    with pytest.raises(ConfigError) as refused:
        refuse_unshardable(compose(["optimizer=own_piece"]).optimizer, "fsdp")
    for fact in ("optimizer=own_piece", "OwnPiece", "distributed=ddp", "TAKES_SHARDS = True"):
        assert fact in str(refused.value)


@pytest.mark.usefixtures("_strangers")
def test_authors_find_what_is_wrong_with_a_stranger() -> None:
    check_optimizer("elementwise", lr=0.05)
    with pytest.raises(AssertionError, match="do not depend on lr"):
        check_optimizer("deaf", lr=0.05)
