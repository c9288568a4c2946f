"""What a step has found once holds only until something changes.

Each test changes one thing between two steps, and goes on beside a fresh optimizer with the same
weights and state: their bits agree.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from optrun.optimizer import Lamb, Lion
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.plan import Memory, Plan
from tests.optimizer_cases import CASES, Case

PLANNED = [
    case
    for case in CASES
    if isinstance(case.build([("w", nn.Parameter(torch.ones(2, 2)))]), BatchOptimizer)
]
SHAPES = {"first.weight": (4, 4), "first.bias": (4,), "second.weight": (4, 4), "gain": ()}


@pytest.fixture(params=PLANNED, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """All plans that were made."""
    made: list[Plan] = []
    init = Plan.__init__

    def counted(plan: Plan, *arguments: Any) -> None:
        init(plan, *arguments)
        made.append(plan)

    monkeypatch.setattr(Plan, "__init__", counted)
    return made


def groups(seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    named = [
        (name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    ]
    return [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.1}]


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(
    optimizer: Optimizer, number: int, grad_of: Callable[[torch.Tensor], Any] = torch.clone
) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in params_of(optimizer):
        grad = torch.randn(param.shape, generator=generator)
        if param.requires_grad:
            param.grad = grad_of(grad.to(param.dtype))
    optimizer.step()
    optimizer.zero_grad()


def replace_parameters(optimizer: Optimizer) -> None:
    """As FSDP and XLA: other tensors under the same names; their state goes along."""
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            other = nn.Parameter(param.detach().clone())
            optimizer.state[other] = optimizer.state.pop(param)
            group["params"][index] = other


def move_data(optimizer: Optimizer) -> None:
    for param in params_of(optimizer):
        param.data = param.data.clone()


def transpose_data(optimizer: Optimizer) -> None:
    """The same memory in another order."""
    for param in params_of(optimizer):
        if param.dim() == 2:
            param.data = param.data.t()


def load_state(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def reset_state(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def replace_state(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = 2 * value


def move_state(optimizer: Optimizer) -> None:
    """As `share_memory_`: the same tensors over other memory."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.clone()


def freeze(optimizer: Optimizer) -> None:
    params_of(optimizer)[0].requires_grad_(requires_grad=False)


def change_numbers(optimizer: Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] *= 0.5 + index
        group["weight_decay"] = 0.2


def change_options(optimizer: Optimizer) -> None:
    """Groups that were stepped together part."""
    group = optimizer.param_groups[1]
    group["betas"] = tuple(beta / 2 for beta in group["betas"])


def cycle_options(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["betas"] = tuple(beta / 2 for beta in group["betas"])


def exchange_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()


def move_a_parameter(optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())
    second["param_names"].append(first["param_names"].pop())


def add_a_group(optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(3)))]})


CHANGES = [
    replace_parameters,
    move_data,
    transpose_data,
    load_state,
    reset_state,
    replace_state,
    move_state,
    freeze,
    change_numbers,
    change_options,
    cycle_options,
    exchange_groups,
    move_a_parameter,
    add_a_group,
]


def fresh(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same groups, weights and state that has never stepped."""
    return copy.deepcopy(optimizer)


def assert_equal(optimizer: Optimizer, other: Optimizer) -> None:
    for param, truth in zip(params_of(optimizer), params_of(other), strict=True):
        assert torch.equal(param, truth)
        torch.testing.assert_close(
            dict(optimizer.state[param]), dict(other.state[truth]), rtol=0, atol=0
        )


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps(change: Callable[[Optimizer], None], case: Case) -> None:
    optimizer = case.build(groups())
    for number in range(3):
        step(optimizer, number)
    change(optimizer)
    other = fresh(optimizer)
    assert other._plan is None
    for number in range(3, 6):
        step(optimizer, number)
        step(other, number)
    assert_equal(optimizer, other)


class Kind(torch.Tensor):
    """A subclass."""


def sparse_rows(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_sparse(1) if grad.dim() == 2 else grad


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad,
    "expanded": lambda grad: grad.mean().expand(grad.shape),
    "lazy zeros": lambda grad: torch._efficientzerotensor(grad.shape),
    "a subclass": lambda grad: grad.as_subclass(Kind),
    "negative": lambda grad: torch.complex(torch.zeros_like(grad), -grad).conj().imag,
    "sparse": sparse_rows,
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_another_kind_between_others(kind: str, case: Case) -> None:
    if kind == "sparse" and case.sparse == "refused":
        pytest.skip("refused")
    optimizer = case.build(groups())
    step(optimizer, 0)
    other = fresh(optimizer)
    for number, grad_of in enumerate((torch.clone, GRADIENTS[kind], torch.clone)):
        step(optimizer, number, grad_of)
    for number, grad_of in enumerate((torch.clone, GRADIENTS[kind], torch.clone)):
        other = fresh(other)
        step(other, number, grad_of)
    assert_equal(optimizer, other)


def test_weights_in_other_precisions(case: Case) -> None:
    optimizer = case.build(groups())
    step(optimizer, 0)
    for number, dtype in enumerate((torch.bfloat16, torch.float32, torch.float64)):
        for param in params_of(optimizer):
            param.data = param.data.to(dtype)
        optimizer.state.clear()
        other = fresh(optimizer)
        for one in (optimizer, other):
            step(one, 2 * number)
            step(one, 2 * number + 1)
        assert_equal(optimizer, other)


def test_a_gradient_that_is_its_weight_between_others() -> None:
    """A kernel reads no memory while it writes there: the loop steps, then the kernel again."""
    optimizer = Lamb(groups())
    by_loop = Lamb(groups(), foreach=False)
    step(optimizer, 0)
    for group, truth in zip(
        by_loop.param_groups, copy.deepcopy(optimizer).param_groups, strict=True
    ):
        group["params"] = truth["params"]
    by_loop.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in by_loop.param_groups:
        group["foreach"] = False
    for one in (optimizer, by_loop):
        for param in params_of(one):
            param.grad = param.detach()
        one.step()
    assert_equal(optimizer, by_loop)
    other = fresh(optimizer)
    for one in (optimizer, other):
        step(one, 1)
    assert_equal(optimizer, other)


def test_one_plan_for_many_steps(case: Case, plans: list[Plan]) -> None:
    optimizer = case.build(groups())
    for number in range(4):
        step(optimizer, number)
        change_numbers(optimizer)
        cycle_options(optimizer)
    assert len(plans) == 1
    freeze(optimizer)
    step(optimizer, 4)
    assert len(plans) == 2


def test_rules_that_are_exchanged() -> None:
    optimizer = Lamb(groups(), exclude_from_weight_decay=["bias"])
    step(optimizer, 0)
    for group in optimizer.param_groups:
        group["exclude_from_weight_decay"] = ["weight"]
    other = fresh(optimizer)
    for one in (optimizer, other):
        step(one, 1)
    assert_equal(optimizer, other)


def test_gradients_that_are_weights_stay_refused() -> None:
    weight = torch.ones(4)
    memory = Memory([weight], [])
    assert [memory.accepts_grads([weight]) for _ in range(2)] == [False, False]
    gradient = torch.ones(4)
    assert memory.accepts_grads([gradient])
    assert memory.grad_addresses == [gradient.data_ptr()]


def test_a_tensor_removed_from_the_state_is_named() -> None:
    optimizer = Lion(groups())
    for number in range(2):
        step(optimizer, number)
    del optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        step(optimizer, 2)


def test_a_plan_keeps_no_state_alive() -> None:
    optimizer = Lion(groups())
    step(optimizer, 0)
    state = optimizer.state[params_of(optimizer)[0]]
    moment = weakref.ref(state["exp_avg"])
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    assert moment() is None
