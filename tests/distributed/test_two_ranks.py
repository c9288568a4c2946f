"""Two gloo ranks on CPU.

What a sharded step costs in collectives, and state that moves to one process and back.

That the steps are those of one process stands in `test_optimizers.py`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from optrun.optimizer import Lamb
from optrun.optimizer.state import load_named_state, named_state
from tests.optimizer_cases import CASES
from tests.ranks import run_ranks

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "lamb": {"exclude_from_weight_decay": ["bias$"], "weight_decay": 0.1},
    "lazy_adam": {"weight_decay": 0.1, "grad_centralization": True},
    "adamwdl": {"decay_form": "paddlenlp"},
}


def small_model() -> nn.Module:
    """Uneven shapes, and one bias of a single element, so that a rank holds an empty shard."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1)
    )
    return model.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(11, (8,), generator=generator)
    return x, torch.randn(8, 1, generator=generator, dtype=torch.float64)


def train(model: nn.Module, optimizer: Any, steps: range, part: slice) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        (model(x[part]) - y[part]).square().mean().backward()
        optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As a layer-wise run would have: scales from the embedding up."""
    return [
        {"params": [(n, p)], "lr_scale": 0.5 + 0.1 * i}
        for i, (n, p) in enumerate(model.named_parameters())
    ]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[1], model[4]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def close(
    found: dict[str, Tensor], wanted: dict[str, Tensor], what: str, tolerance: float = 1e-11
) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def one_collective_for_all_norms(rank: int) -> None:
    part = slice(4 * rank, 4 * rank + 4)
    for foreach in (None, True):
        model = sharded(small_model())
        optimizer = Lamb(groups(model), lr=0.05, foreach=foreach)
        train(model, optimizer, range(1), part)
        optimizer.zero_grad()
        x, y = batch(1)
        (model(x[part]) - y[part]).square().mean().backward()
        with CommDebugMode() as communication:
            optimizer.step()
        assert communication.get_total_counts() == 1, communication.get_comm_counts()
    plain = small_model()
    other = Lamb(groups(plain), lr=0.05)
    train(plain, other, range(2), slice(None))
    assert optimizer.trust_ratios == pytest.approx(other.trust_ratios, rel=1e-11)


COLLECTIVES = {"lamb": 1, "mars": 1, "muon": 2}
"""Of a sharded step, whatever the model; every other optimizer has none."""


def collectives_of_each(rank: int) -> None:
    for case in (case for case in CASES if case.shards):
        model = sharded(small_model())
        optimizer = case.build(groups(model), **OPTIONS.get(case.name, {}))
        x, y = batch(1)
        (model(x[4 * rank : 4 * rank + 4]) - y[4 * rank : 4 * rank + 4]).square().mean().backward()
        with CommDebugMode() as communication:
            optimizer.step()
        assert communication.get_total_counts() == COLLECTIVES.get(case.name, 0), case.name


def state_moves_between_shards_and_one_process(rank: int) -> None:
    part = slice(4 * rank, 4 * rank + 4)
    for case in (case for case in CASES if case.shards):
        options = OPTIONS.get(case.name, {})
        model = sharded(small_model())
        optimizer = case.build(groups(model), **options)
        train(model, optimizer, range(2), part)
        weights = {name: whole(param) for name, param in model.named_parameters()}
        tensors, meta = named_state(optimizer)
        tensors = {key: whole(value).clone() for key, value in tensors.items()}

        plain = small_model()
        plain.load_state_dict(weights)
        resumed = case.build(groups(plain), **options)
        load_named_state(resumed, tensors, json.loads(json.dumps(meta)))
        train(plain, resumed, range(2, STEPS), slice(None))
        wanted = {name: param.detach() for name, param in plain.named_parameters()}

        again = small_model()
        again.load_state_dict(weights)
        again = sharded(again)
        loaded = case.build(groups(again), **options)
        load_named_state(loaded, tensors, meta)
        train(again, loaded, range(2, STEPS), part)
        close(
            {n: whole(p) for n, p in again.named_parameters()},
            wanted,
            f"{case.name} by named state",
        )

        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        third = small_model()
        third.load_state_dict(weights)
        third = sharded(third)
        restored = case.build(groups(third), **options)
        set_optimizer_state_dict(third, restored, saved)
        train(third, restored, range(2, STEPS), part)
        close(
            {n: whole(p) for n, p in third.named_parameters()},
            wanted,
            f"{case.name} by torch's checkpoint",
        )


def test_norms_are_global_in_one_collective(tmp_path: Path) -> None:
    run_ranks(tmp_path, one_collective_for_all_norms)


def test_a_step_costs_few_collectives(tmp_path: Path) -> None:
    run_ranks(tmp_path, collectives_of_each)


@pytest.mark.slow
def test_state_moves_between_shards_and_one_process(tmp_path: Path) -> None:
    run_ranks(tmp_path, state_moves_between_shards_and_one_process)
