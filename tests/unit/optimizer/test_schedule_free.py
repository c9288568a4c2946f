"""Schedule-Free AdamW: what is trained, what is judged, and the way between the two."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from optrun.config import store
from optrun.optimizer import ScheduleFreeAdamW
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.evaluation_weights import evaluation_weights
from optrun.optimizer.state import load_named_state, named_state
from tests.optimizer_cases import set_grads, toy

BETAS = [0.9, 0.9, 0.6, 0.6, 0.95, 0.8]
"""b1 of each step, as a cycled momentum has it."""


def values(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def trained(
    dtype: torch.dtype = torch.float32, steps: int = 3, **options: Any
) -> tuple[dict[str, Any], Any]:
    params = toy(dtype)
    optimizer = ScheduleFreeAdamW(params.items(), lr=0.05, **options)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def test_the_paper_with_x_written_out() -> None:
    """Algorithm 1, all three sequences kept; b1 and the lr move."""
    params = toy(torch.float64)
    optimizer = ScheduleFreeAdamW(params.items(), lr=0.1, weight_decay=0.1, r=1.0, eps=1e-3)
    x = values(params)
    y, z, v = (
        copy.deepcopy(x),
        copy.deepcopy(x),
        {name: torch.zeros_like(value) for name, value in x.items()},
    )
    total = 0.0
    for step, beta in enumerate(BETAS):
        set_grads(params, step)
        lr = 0.1 * (1 + step % 3)
        for group in optimizer.param_groups:
            group["betas"], group["lr"] = (beta, 0.9), lr
        t = step + 1
        weight = t * min(0.1 * t, 0.3) ** 2
        total += weight
        for name, param in params.items():
            g = param.grad
            assert g is not None
            v[name] = 0.9 * v[name] + 0.1 * g**2
            d = g / ((v[name] / (1 - 0.9**t)).sqrt() + 1e-3) + 0.1 * y[name]
            z[name] = z[name] - lr * d
            x[name] = (1 - weight / total) * x[name] + weight / total * z[name]
            y[name] = (1 - beta) * z[name] + beta * x[name]
        optimizer.step()
        for name, param in params.items():
            torch.testing.assert_close(param.detach(), y[name], rtol=1e-12, atol=1e-12)
        with evaluation_weights(optimizer):
            for name, param in params.items():
                torch.testing.assert_close(param.detach(), x[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_weights_come_and_go(dtype: torch.dtype, master_weights: bool) -> None:
    params, optimizer = trained(dtype, master_weights=master_weights)
    before = values(params)
    optimizer.train()
    assert same(params, before), "they stand there already"
    optimizer.eval()
    judged = values(params)
    assert not torch.equal(judged["body.weight"], before["body.weight"])
    optimizer.eval()
    assert same(params, judged)
    with pytest.raises(RuntimeError, match=r"call optimizer.train\(\) before step"):
        optimizer.step()
    optimizer.train()
    near = 1e-6 if dtype == torch.float32 else 0.05
    for name, value in before.items():
        torch.testing.assert_close(params[name].detach(), value, rtol=near, atol=near)
    assert same(params, before) or not (master_weights and dtype == torch.bfloat16), (
        "a master weight keeps every bit"
    )
    set_grads(params, 9)
    optimizer.step()


def test_a_loop_that_saves_as_the_package_says_goes_on() -> None:
    """In `eval()`, the model's weights and `state_dict()`; then both loaded, and `train()`."""
    params, optimizer = trained()
    optimizer.eval()
    saved, weights = copy.deepcopy(optimizer.state_dict()), values(params)
    again = {name: torch.nn.Parameter(value) for name, value in weights.items()}
    other = ScheduleFreeAdamW(again.items(), lr=0.05)
    other.load_state_dict(saved)
    for run, one in ((params, optimizer), (again, other)):
        one.train()
        set_grads(run, 3)
        one.step()
    assert same(again, params)


def test_a_cycled_or_changed_beta_moves_no_average() -> None:
    params, optimizer = trained(torch.float64)
    optimizer.eval()
    before = values(params)
    optimizer.train()
    for group in optimizer.param_groups:
        group["betas"], group["lr"], group["weight_lr_power"] = (0.5, 0.999), 0.0, 0.0
    state = {param: dict(optimizer.state[param]) for param in params.values()}
    set_grads(params, 3)
    optimizer.step()
    optimizer.eval()
    for name, param in params.items():
        share = 1 / (
            1 + state[param]["weight_sum"]
        )  # of a step of lr 0: z stays, and is averaged in
        wanted = (1 - share) * before[name] + share * state[param]["z"]
        torch.testing.assert_close(param.detach(), wanted, rtol=1e-12, atol=1e-12)


def test_beside_another_optimizer_only_its_own_weights_are_averaged() -> None:
    """And a checkpoint holds both kinds of weights for these alone."""

    def built(params: Mapping[str, Any]) -> Any:
        groups = [
            {"params": [(name, param)], **({"optimizer": "sgd"} if name == "gain" else {})}
            for name, param in params.items()
        ]
        return build_optimizer("schedule_free", groups, lr=0.05)

    params = toy()
    optimizer = built(params)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    before = values(params)
    with evaluation_weights(optimizer):
        judged = values(params)
        moved = {name for name, value in before.items() if not torch.equal(judged[name], value)}
        assert moved == set(params) - {"gain"}
    assert same(params, before)
    tensors, meta = named_state(optimizer)
    kept = {name.rpartition("/")[0] for name in tensors if name.endswith("/training_weight")}
    assert kept == set(params) - {"gain"}
    again = {name: torch.nn.Parameter(value) for name, value in judged.items()}
    other = built(again)
    load_named_state(
        other, {key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(meta))
    )
    for run, one in ((params, optimizer), (again, other)):
        set_grads(run, 3)
        one.step()
    assert same(again, params)
    del tensors["body.bias/training_weight"]
    with pytest.raises(ValueError, match=r"lacks the tensor 'body.bias/training_weight'"):
        load_named_state(built(toy()), tensors, meta)


def test_a_first_step_of_a_warm_up_may_have_no_lr() -> None:
    params = toy()
    optimizer = ScheduleFreeAdamW(params.items(), lr=lambda step: 0.01 * step)
    before = values(params)
    set_grads(params, 0)
    optimizer.step()
    assert same(params, before)
    set_grads(params, 1)
    optimizer.step()
    assert all(math.isfinite(param.sum().item()) for param in params.values())


def test_a_schedule_over_it_is_told() -> None:
    hydra = store.open_hydra()

    def note(*words: str) -> str | None:
        return store.typed(
            store.without_hydra(store.compose(hydra, "config", list(words)))
        ).schedule_note()

    said = note("optimizer=schedule_free") or ""
    assert all(
        fact in said
        for fact in ("scheduler=cosine", "optimizer=schedule_free", "scheduler=constant")
    )
    assert note("optimizer=schedule_free", "scheduler=constant") is None
    assert note("optimizer=lion") is None
