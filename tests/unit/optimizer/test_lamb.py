"""LAMB against a few lines of float64, and what it shows of itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optrun.config.schema.optimizer import LambConfig
from optrun.config.schema.ranges import defaults
from optrun.optimizer import Lamb
from optrun.optimizer.lamb_rule import trust_ratios
from tests.optimizer_cases import set_grads, toy

RULE = defaults(LambConfig)
numbers = (
    st.just(0.0) | st.floats(0.01, 3) | st.floats(-3, -0.01)
)  # tiny ones make ratios of rounding errors


def reference(
    w: Tensor,
    grads: list[Tensor],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    wd: float,
    always: bool,
) -> Tensor:
    """SEMANTICS in six lines."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        r = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps) + wd * w
        adapt = (wd > 0 or always) and w.norm() > 0 and r.norm() > 0
        w = w - lr * (w.norm() / r.norm() if adapt else 1.0) * r
    return w


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    start=st.lists(numbers, min_size=3, max_size=3),
    grads=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4),
    lr=st.floats(0, 0.5),
    b1=st.floats(0.01, 0.99),
    b2=st.floats(0.01, 0.999),
    eps=st.floats(1e-6, 0.1),
    wd=st.just(0.0) | st.floats(0.001, 0.5) | st.floats(-0.5, -0.001),
    always=st.booleans(),
    foreach=st.booleans(),
)
def test_is_its_formula(
    start: list[float],
    grads: list[list[float]],
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    wd: float,
    always: bool,
    foreach: bool,
) -> None:
    given_grads = [torch.tensor(g, dtype=torch.float64) for g in grads]
    weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    want = reference(
        weight.detach().clone(), given_grads, lr=lr, b1=b1, b2=b2, eps=eps, wd=wd, always=always
    )
    optimizer = Lamb(
        [weight],
        lr=lr,
        betas=(b1, b2),
        eps=eps,
        weight_decay=wd,
        always_adapt=always,
        foreach=foreach,
    )
    for grad in given_grads:
        weight.grad = grad
        optimizer.step()
    torch.testing.assert_close(weight.detach(), want, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(scale=st.floats(1e-3, 1e3), foreach=st.booleans())
def test_an_adapted_step_is_as_long_as_the_weights_times_lr(scale: float, foreach: bool) -> None:
    weight = torch.nn.Parameter(scale * torch.tensor([3.0, -4.0], dtype=torch.float64))
    optimizer = Lamb([("w", weight)], lr=0.1, foreach=foreach)
    weight.grad = torch.tensor([0.3, 1.0], dtype=torch.float64)
    before = weight.detach().clone()
    optimizer.step()
    assert math.isclose(
        (weight.detach() - before).norm().item(), 0.1 * before.norm().item(), rel_tol=1e-9
    )


def test_first_step_by_hand() -> None:
    """r = sign(g) + 0.1 w = (1.3, -0.6), |w| = 5, |r| = sqrt(2.05)."""
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
    optimizer = Lamb([("w", weight)], lr=0.1, eps=0.0, weight_decay=0.1)
    weight.grad = torch.tensor([2.0, -7.0], dtype=torch.float64)
    optimizer.step()
    ratio = 5 / math.sqrt(1.3**2 + 0.6**2)
    assert optimizer.trust_ratios == pytest.approx({"w": ratio})
    assert weight.tolist() == pytest.approx([3 - 0.1 * ratio * 1.3, 4 + 0.1 * ratio * 0.6])


@pytest.mark.parametrize("mode", ["adapted", "decoupled"])
def test_a_negative_decay_adapts_nothing(mode: str) -> None:
    """It is applied, and counts as none where the trust ratio depends on decay, as in Paddle."""
    for always in (False, True):
        weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        optimizer = Lamb(
            [("w", weight)], weight_decay=-0.5, always_adapt=always, weight_decay_mode=mode
        )
        weight.grad = torch.zeros(2)
        optimizer.step()
        assert weight.norm().item() > 5.0
        assert optimizer.adapted("w", optimizer.param_groups[0]) == always
        assert (optimizer.trust_ratios["w"] != 1.0) == (always and mode == "adapted")


def test_bounds_of_the_ratio() -> None:
    """A bound of |w| below 1 counts, and where a norm is 0 the ratio is 1 whatever its bounds
    are.
    """
    twos = torch.tensor([2.0, 2.0])
    bounded = trust_ratios({**RULE, "max_param_norm": 0.5}, torch.tensor([0.1, 1.0]), twos)
    assert bounded.tolist() == pytest.approx([0.05, 0.25])
    zeros = trust_ratios(
        {**RULE, "min_trust": 3.0}, torch.tensor([0.0, 2.0, 2.0]), torch.tensor([2.0, 0.0, 2.0])
    )
    assert zeros.tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("foreach", [False, True])
def test_trust_ratios_say_who_was_adapted(foreach: bool) -> None:
    params = toy()
    optimizer = Lamb(
        params.items(),
        exclude_from_weight_decay=["gain"],
        exclude_from_layer_adaptation=["bias$"],
        foreach=foreach,
    )
    set_grads(params, 0)
    optimizer.step()
    ratios = optimizer.trust_ratios
    assert set(ratios) == set(params)
    assert ratios["gain"] == ratios["body.bias"] == ratios["start"] == 1.0
    assert ratios["body.weight"] != 1.0
    group = optimizer.param_groups[0]
    assert [optimizer.adapted(name, group) for name in params] == [
        True,
        False,
        False,
        True,
    ]
    params["body.weight"].grad = None
    optimizer.step()
    assert "body.weight" not in optimizer.trust_ratios


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_entry_spoils_no_other(foreach: bool, bad: float) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([weight], lr=0.1, weight_decay=0.1, foreach=foreach)
    weight.grad = torch.tensor([1.0, bad, 1.0])
    optimizer.step()
    assert torch.isfinite(weight).tolist() == [True, False, True]


def test_group_patterns_and_the_optimizers_own() -> None:
    params = toy()
    optimizer = Lamb(
        [
            {
                "params": [
                    ("body.weight", params["body.weight"]),
                    ("body.bias", params["body.bias"]),
                ]
            },
            {
                "params": [("gain", params["gain"]), ("start", params["start"])],
                "exclude_from_weight_decay": ["^start$"],
                "always_adapt": True,
            },
        ],
        exclude_from_weight_decay=["bias"],
    )
    first, second = optimizer.param_groups
    decayed = {p for name, p in params.items() if optimizer.decays(name)}
    assert decayed == {params["body.weight"], params["gain"]}
    assert optimizer.adapted("start", second)
    assert not optimizer.adapted("body.bias", first)


def test_a_factor_that_begins_at_zero_takes_one_step_without_a_ratio() -> None:
    """As B of a LoRA.

    The first step has the ratio 1, and the next about lr, for B is as large as that step then.
    """
    b = torch.nn.Parameter(torch.zeros(8, 4))
    optimizer = Lamb([("lora_B", b)], lr=0.01)
    ratios = []
    for seed in range(2):
        b.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)).abs() + 1
        optimizer.step()
        ratios.append(optimizer.trust_ratios["lora_B"])
    assert ratios[0] == 1.0
    assert ratios[1] == pytest.approx(0.01, rel=0.2)


def test_patterns_need_names() -> None:
    with pytest.raises(
        ValueError, match=r"exclude_from_weight_decay=\['bias'\]: the parameters have no names"
    ):
        Lamb(toy().values(), exclude_from_weight_decay=["bias"])
    Lamb(toy().items(), exclude_from_weight_decay=["nobody"], unmatched_patterns="ignore")
    with pytest.raises(TypeError, match="no option 'unmatched_patterns'"):
        Lamb([{"params": list(toy().items()), "unmatched_patterns": "ignore"}])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_are_a_float32_run_rounded(foreach: bool, dtype: torch.dtype) -> None:
    low = toy(dtype)
    full = {name: torch.nn.Parameter(param.detach().float()) for name, param in low.items()}
    runs = [
        (low, Lamb(low.items(), lr=1e-3, master_weights=True, foreach=foreach)),
        (full, Lamb(full.items(), lr=1e-3, foreach=foreach)),
    ]
    for step in range(10):
        set_grads(low, step)
        for name, param in full.items():
            param.grad = low[name].grad.float()
        for _, optimizer in runs:
            optimizer.step()
    for name, param in full.items():
        assert torch.equal(low[name], param.to(dtype)), name


def test_groups_that_differ_in_numbers_are_one_batch() -> None:
    params = {f"block.{i}": torch.nn.Parameter(torch.ones(2)) for i in range(30)}
    groups = [
        {"params": [pair], "lr_scale": 0.9**i, "weight_decay": 0.01 * i}
        for i, pair in enumerate(params.items())
    ]
    optimizer = Lamb(groups, lr=0.1)
    for param in params.values():
        param.grad = torch.ones(2)
    batches = optimizer.gather()
    assert [len(batch.params) for batch in batches] == [30]


def test_global_step_counts_steps_and_not_gradients() -> None:
    for step_count, t in (("parameter", 1), ("optimizer", 5)):
        params = toy()
        optimizer = Lamb(params.items(), step_count=step_count)
        for step in range(5):
            set_grads(params, step)
            if step < 4:
                params["gain"].grad = None
            optimizer.step()
        assert optimizer.state[params["gain"]]["step"] == t
