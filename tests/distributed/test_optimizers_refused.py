"""What ranks cannot do with an optimizer is refused before training, by name.

What they can do with sparse rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from optrun.api import compose
from optrun.base.errors import ConfigError
from optrun.optimizer.build import build_optimizer, refuse_unshardable
from optrun.optimizer.rehearsal import tried
from optrun.optimizer.sparse import refuse_sparse_gradients
from optrun.testing import check_optimizer
from tests.ranks import run_ranks


class Elementwise(Optimizer):
    """A plain optimizer that never thought of shards, and needs not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, param: Tensor) -> Tensor:
        """What the parameter moves along."""
        assert param.grad is not None
        moment = self.state[param].setdefault("moment", torch.zeros_like(param))
        return moment.mul_(0.9).add_(param.grad).sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param), alpha=group["lr"])


class OwnPiece(Elementwise):
    """Normalises by what this rank holds: a number for each rank."""

    def direction(self, param: Tensor) -> Tensor:
        """By the norm of the piece."""
        assert param.grad is not None
        piece = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
        return param.grad / (1e-6 + piece.norm().item())


class WholeAlone(Elementwise):
    """Takes the storage of a parameter."""

    def direction(self, param: Tensor) -> Tensor:
        """By numpy, which knows no shards."""
        assert param.grad is not None
        return torch.from_numpy(param.grad.numpy()) * 0.1


class PlainState(Elementwise):
    """Steps right, and keeps its moment where no checkpoint of ranks can put it together."""

    def direction(self, param: Tensor) -> Tensor:
        """By a moment of this rank's piece."""
        assert param.grad is not None
        piece = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
        self.state[param].setdefault("moment", torch.zeros_like(piece)).mul_(0.9).add_(piece)
        return param.grad


def shards() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(11, 9), nn.Tanh(), nn.Linear(9, 1))
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def foreign_over_shards(_rank: int) -> None:
    for cls, fact in (
        (Elementwise, None),
        (OwnPiece, "not those of one process"),
        (WholeAlone, "it fails: "),
        (PlainState, "/moment has shape"),
    ):
        groups = [{"params": list(shards().named_parameters())}]

        def built(cls: Any = cls, groups: Any = groups) -> Optimizer:
            def build(own: Any) -> Optimizer:
                return cls([dict(group) for group in own], lr=0.1)  # type: ignore[no-any-return]

            return tried(build, groups, key="optimizer=mine", owner=cls.__name__, hint="Mend it.")

        before = torch.get_rng_state()
        if fact is None:
            assert isinstance(built(), cls)
        else:
            with pytest.raises(
                ConfigError, match="optimizer=mine: tried on small shards"
            ) as refused:
                built()
            for part in (cls.__name__, "distributed=fsdp", fact, "distributed=ddp"):
                assert part in str(refused.value)
        assert torch.equal(torch.get_rng_state(), before), "no random number of the run's is drawn"


def library_over_shards(_rank: int) -> None:
    from optrun.config.schema.optimizer import PytorchOptimizerConfig

    def built(name: str) -> Optimizer:
        config = PytorchOptimizerConfig(name=name, default_lr=1e-3, weight_decay=0.01, kwargs={})
        return build_optimizer(config, [{"params": list(shards().named_parameters())}], lr=0.01)

    assert type(built("lion")).__name__ == "Lion"
    with pytest.raises(
        ConfigError, match=r"optimizer.name=soap: .* cannot train with distributed=fsdp: "
    ):
        built("soap")


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


def test_a_foreign_optimizer_is_tried_on_shards(tmp_path: Path) -> None:
    run_ranks(tmp_path, foreign_over_shards)


def test_one_of_the_library_is_tried_on_shards(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer")
    run_ranks(tmp_path, library_over_shards)


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
    refuse_unshardable(
        compose(["optimizer=pytorch_optimizer", "optimizer.name=lion"]).optimizer, "fsdp"
    )


def test_authors_check_shards_too() -> None:
    check_optimizer("muon", lr=0.05, ranks=2)
    with pytest.raises(AssertionError, match=r"adafactor: in shards on 2 ranks: .*is sharded"):
        check_optimizer("adafactor", lr=0.2, ranks=2)
