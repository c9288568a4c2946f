"""LazyAdam: torch's Adam where dense, the rows it was given where sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from optrun.optimizer import AdamWDL, LazyAdam
from tests.optimizer_cases import set_grads, toy


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lr=st.floats(1e-4, 0.5),
    b1=st.floats(0.01, 0.99),
    b2=st.floats(0.01, 0.999),
    eps=st.floats(1e-8, 0.1),
    wd=st.floats(0, 1),
    foreach=st.booleans(),
)
def test_dense_is_torchs_adam(
    lr: float, b1: float, b2: float, eps: float, wd: float, foreach: bool
) -> None:
    ours, theirs = toy(torch.float64), toy(torch.float64)
    lazy = LazyAdam(ours.items(), lr=lr, betas=(b1, b2), eps=eps, weight_decay=wd, foreach=foreach)
    adam = torch.optim.Adam(
        theirs.values(), lr=lr, betas=(b1, b2), eps=eps, weight_decay=wd, foreach=False
    )
    for step in range(4):
        for params, optimizer in ((ours, lazy), (theirs, adam)):
            set_grads(params, step)
            if step == 1:
                params["gain"].grad = None
            optimizer.step()
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name], param, rtol=1e-10, atol=1e-10)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes or reads as an index-free whole."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        in_place = func._schema.name.endswith("_") or "detach" in func._schema.name
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, torch.Tensor) and not in_place and not value.is_sparse:
                self.made = max(self.made, value.numel())
        return out


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("lazy", ["lazy_adam", "adamwdl"])
def test_a_sparse_step_costs_its_rows(foreach: bool, lazy: str) -> None:
    table = torch.nn.Parameter(torch.ones(100_000, 4))
    optimizer = (
        LazyAdam([("table", table)], weight_decay=0.1, foreach=foreach)
        if lazy == "lazy_adam"
        else AdamWDL([("table", table)], lazy_mode=True, foreach=foreach)
    )
    rows = torch.tensor([[5, 99_999, 5]])

    def backward() -> None:
        table.grad = torch.sparse_coo_tensor(
            rows, torch.ones(3, 4), table.shape, check_invariants=True
        )

    backward()
    optimizer.step()  # makes the state, once
    backward()
    with Largest() as largest:
        optimizer.step()
    assert largest.made <= 12
    assert (table.detach() != 1).any(dim=1).nonzero().flatten().tolist() == [5, 99_999]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_touched_rows_move_as_a_dense_table_would(foreach: bool, dtype: torch.dtype) -> None:
    """Repeated rows are summed; nesterov and decay reach the rows alone."""
    options = {
        "lr": 0.1,
        "nesterov": True,
        "weight_decay": 0.1,
        "loss_scale": 4.0,
        "foreach": foreach,
    }
    table = torch.nn.Parameter(torch.linspace(-1, 1, 10).reshape(5, 2).to(dtype))
    small = torch.nn.Parameter(table.detach()[[1, 4]].clone())
    sparse, dense = LazyAdam([table], **options), LazyAdam([small], **options)
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0.5]], dtype=dtype)
    for _ in range(3):
        table.grad = torch.sparse_coo_tensor(
            torch.tensor([[4, 1, 4]]), values, (5, 2), check_invariants=True
        )
        small.grad = torch.stack([values[1], values[0] + values[2]])
        sparse.step()
        dense.step()
    assert torch.equal(table.detach()[[1, 4]], small.detach())
    assert torch.equal(
        table.detach()[[0, 2, 3]], torch.linspace(-1, 1, 10).reshape(5, 2).to(dtype)[[0, 2, 3]]
    )
    for slot in ("exp_avg", "exp_avg_sq"):
        assert not sparse.state[table][slot][[0, 2, 3]].any()


@pytest.mark.parametrize("foreach", [False, True])
def test_each_group_has_its_own_loss_scale(foreach: bool) -> None:
    """A gradient times 4, taken with loss_scale=4, is the gradient.

    Beside a group whose gradients are not scaled.
    """
    scaled, plain = toy(torch.float64), toy(torch.float64)
    names = list(plain)
    groups = [
        {"params": [(names[0], scaled[names[0]])], "loss_scale": 4.0, "weight_decay": 0.1},
        {"params": [(name, scaled[name]) for name in names[1:]]},
    ]
    one = LazyAdam(groups, lr=0.1, eps=1e-3, foreach=foreach)
    two = LazyAdam(
        [{"params": [(n, p)], "weight_decay": 0.1 * (n == names[0])} for n, p in plain.items()],
        lr=0.1,
        eps=1e-3,
    )
    for step in range(3):
        for params, optimizer in ((scaled, one), (plain, two)):
            set_grads(params, step)
            if params is scaled:
                params[names[0]].grad *= 4.0
            optimizer.step()
    for name, param in plain.items():
        torch.testing.assert_close(scaled[name], param, rtol=1e-12, atol=1e-14)


def test_gradients_sparse_in_two_dimensions_are_refused() -> None:
    table = torch.nn.Parameter(torch.ones(3, 3))
    table.grad = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse over 2 dimensions"):
        LazyAdam([("table", table)]).step()


def test_the_name_rule_is_for_ungrouped_names() -> None:
    def decayed(optimizer: LazyAdam) -> list[str]:
        return [name for name in optimizer.named_params() if optimizer.decays(name)]

    params = {
        name: torch.nn.Parameter(torch.ones(2)) for name in ("fc.weight", "bn.gamma", "alphabeta")
    }
    assert decayed(LazyAdam(params.items(), weight_decay=0.1)) == ["fc.weight"]
    assert decayed(LazyAdam([{"params": list(params.items())}], weight_decay=0.1)) == list(params)
    own = LazyAdam(
        [{"params": list(params.items()), "exclude_from_weight_decay": ["fc"]}], weight_decay=0.1
    )
    assert decayed(own) == ["bn.gamma", "alphabeta"]
    assert decayed(
        LazyAdam([{"params": list(params.items())}], exclude_from_weight_decay=["bn"])
    ) == [
        "fc.weight",
        "alphabeta",
    ]
    LazyAdam(params.values(), weight_decay=0.1)  # no names, nothing for the rule to find
    LazyAdam([("fc.weight", params["fc.weight"])])  # a default that matches nothing is no mistake


def test_centred_gradients_have_no_mean() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 4, 2))
    bias = torch.nn.Parameter(torch.zeros(3))
    optimizer = LazyAdam(
        [{"params": [("weight", weight), ("bias", bias)], "grad_centralization": True}], lr=0.1
    )
    weight.grad, bias.grad = torch.randn(3, 4, 2), torch.ones(3)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].mean(dim=(1, 2)).abs().max() < 1e-7
    assert torch.allclose(optimizer.state[bias]["exp_avg"], torch.full((3,), 0.1))
