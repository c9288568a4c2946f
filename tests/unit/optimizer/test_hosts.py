"""What other people's programs do to an optimizer, over all of ours."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from optrun.optimizer import AdamW, AdamWDL, Lamb, LazyAdam, Mars, Soap, build_optimizer
from optrun.optimizer.composite import Composite
from optrun.param_groups.roles import roles_of
from optrun.scheduler import build_scheduler
from tests.optimizer_cases import CASES, IDS, Case

over_cases = pytest.mark.parametrize("case", CASES, ids=IDS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def set_grads(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 3, first: int = 0) -> torch.Tensor:
    for step in range(first, first + steps):
        set_grads(model, step)
        optimizer.step()
    return flat(model)


def host_dcp(case: Case) -> None:
    """Torch's distributed checkpoint makes state by a step, and carries it to a fresh optimizer."""
    for flatten in (False, True):
        model, other = net(), net()
        optimizer, fresh = (case.build(one.named_parameters()) for one in (model, other))
        untouched = net()
        get_optimizer_state_dict(untouched, case.build(untouched.named_parameters()))
        assert torch.equal(flat(untouched), flat(net()))
        trained(model, optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        optimizer.zero_grad()
        of_model, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        set_model_state_dict(other, of_model)
        set_optimizer_state_dict(other, fresh, state, options=options)
        assert torch.equal(flat(model), flat(other))
        if not flatten:
            assert torch.equal(trained(model, optimizer, first=3), trained(other, fresh, first=3))


def host_exchanges_tensors(case: Case) -> None:
    """accelerate's FSDP2 and XLA put other tensors into the groups; the names stay."""
    model, other = net(), net()
    optimizer, exchanged = (case.build(one.named_parameters()) for one in (model, other))
    copied = copy.deepcopy(other)
    new = dict(zip(other.parameters(), copied.parameters(), strict=True))
    for group in exchanged.param_groups:
        group["params"] = [new[param] for param in group["params"]]
    assert torch.equal(trained(model, optimizer), trained(copied, exchanged))


def host_timm(case: Case) -> None:
    """timm's schedulers write base times the group's `lr_scale` where it has one."""
    model = net()
    pairs = list(model.named_parameters())
    groups = [{"params": pairs[:1]}, {"params": pairs[1:], "lr_scale": 0.5}]
    optimizer = build_optimizer(case.name, groups, lr=0.1)
    before = [group["lr"] for group in optimizer.param_groups]
    assert [group["lr"] * group.get("lr_scale", 1.0) for group in optimizer.param_groups] == before


def host_empty_groups(case: Case) -> None:
    """peft's LoRA+ and transformers.Trainer make groups without parameters."""
    model, other = net(), net()
    pairs = list(other.named_parameters())
    for empty_first in (False, True):
        groups: list[dict[str, Any]] = [{"params": pairs}, {"params": [], "weight_decay": 0.0}]
        if empty_first:
            groups.reverse()
        optimizer = build_optimizer(case.name, groups, lr=case.lr)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    alone = build_optimizer(case.name, [{"params": list(model.named_parameters())}], lr=case.lr)
    assert torch.equal(trained(model, alone), trained(other, optimizer))


def host_resets_state(case: Case) -> None:
    """ReLoRA and others put a new dictionary in the place of the state."""
    model = net()
    optimizer = case.build(model.named_parameters())
    trained(model, optimizer, 1)
    optimizer.state = defaultdict(dict)
    trained(model, optimizer, 1)
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state)
    assert case.name == "sgd" or optimizer.state


def host_reorders_groups(case: Case) -> None:
    """Groups sorted in place keep the functions that were given with them."""
    model = net()
    pairs = list(model.named_parameters())
    groups = [{"params": pairs[:2], "lr": lambda _: 0.0}, {"params": pairs[2:], "lr": 0.1}]
    optimizer = build_optimizer(case.name, groups, lr=0.1)
    optimizer.param_groups.reverse()
    first = pairs[0][1].detach().clone()
    trained(model, optimizer, 2)
    assert torch.equal(pairs[0][1], first)


def host_averages(case: Case) -> None:
    """AveragedModel beside it."""
    model = net()
    averaged = AveragedModel(model)
    trained(model, case.build(model.named_parameters()), 2)
    averaged.update_parameters(model)
    assert torch.equal(flat(averaged.module), flat(model))


HOSTS: list[Callable[[Case], None]] = [
    host_dcp,
    host_exchanges_tensors,
    host_timm,
    host_empty_groups,
    host_resets_state,
    host_reorders_groups,
    host_averages,
]


@over_cases
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_a_host(host: Callable[[Case], None], case: Case) -> None:
    host(case)


@over_cases
def test_a_function_as_lr_beside_a_host(case: Case) -> None:
    """A step at 0 moves nothing; a rate of somebody else, or a scheduler, is refused."""
    model = net()
    optimizer = case.build(model.named_parameters(), lr=lambda _: 0.1)
    before = flat(model)
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(flat(model), before)
    trained(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(RuntimeError, match=r"lr of a parameter group was set to 0\.05"):
        trained(model, optimizer, 1)
    other = net()
    driven = case.build(other.named_parameters(), lr=lambda _: 0.1)
    lr_scheduler.LambdaLR(driven, lambda _: 0.0)
    with pytest.raises(RuntimeError, match="function of the step"):
        trained(other, driven, 1)


@pytest.mark.parametrize("mode", ["adapted", "decoupled", "fixed", "scheduled", "corrected"])
def test_a_step_at_zero_decays_nothing(mode: Any) -> None:
    model = net()
    optimizer = Lamb(model.named_parameters(), lr=0.1, weight_decay=0.1, weight_decay_mode=mode)
    before = flat(model)
    get_optimizer_state_dict(model, optimizer)
    assert torch.equal(flat(model), before)


def test_rules_go_by_name_where_tensors_are_exchanged() -> None:
    makers: list[Callable[[nn.Module], Optimizer]] = [
        lambda m: Lamb(m.named_parameters(), lr=0.1, exclude_from_weight_decay=["bias"]),
        lambda m: Lamb(m.named_parameters(), lr=0.1, exclude_from_layer_adaptation=["weight"]),
        lambda m: LazyAdam(
            m.named_parameters(), lr=0.1, weight_decay=0.5, exclude_from_weight_decay=["bias"]
        ),
        lambda m: AdamWDL(m.named_parameters(), apply_decay_param_fun=lambda n: "bias" not in n),
        lambda m: AdamWDL(
            m.named_parameters(),
            set_param_lr_fun=lambda _d, _n, _l, p: 0.5 if p.name.startswith("0") else 1.0,
        ),
    ]
    for make in makers:
        model, other = net(), net()
        optimizer, exchanged = make(model), make(other)
        copied = copy.deepcopy(other)
        new = dict(zip(other.parameters(), copied.parameters(), strict=True))
        for group in exchanged.param_groups:
            group["params"] = [new[param] for param in group["params"]]
        assert torch.equal(trained(model, optimizer), trained(copied, exchanged))


@pytest.mark.parametrize("cls", [AdamW, Lamb, LazyAdam, Soap])
def test_groups_written_anew_before_the_state_is_loaded(cls: Any) -> None:
    """Lightning's BackboneFinetuning, on a resume."""
    model = net()
    params = list(model.parameters())
    optimizer = cls(params[:4], lr=lambda _: 0.01)
    optimizer.add_param_group({"params": params[4:], "lr": 0.1})
    trained(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    theirs = list(other.parameters())
    fresh = cls(theirs[:4], lr=lambda _: 0.01)
    fresh.param_groups = [
        {**group, "params": [theirs[i] for i in group["params"]]} for group in saved["param_groups"]
    ]
    fresh.load_state_dict(saved)
    assert torch.equal(trained(model, optimizer, first=2), trained(other, fresh, first=2))


@pytest.mark.parametrize("cls", [Lamb, Mars, Soap])
def test_flat_pieces_of_fsdp1_are_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="flat piece of FSDP1"):
        cls([("_fsdp_wrapped_module.0.weight", nn.Parameter(torch.ones(3)))])


def test_a_tensor_without_entries_has_no_bases() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = Soap([("empty", empty)])
    empty.grad = torch.zeros(0, 3)
    optimizer.step()
    assert "bases" not in optimizer.state[empty]


def test_members_of_a_composite_follow_exchanged_groups() -> None:
    model = net()
    optimizer = build_optimizer("muon", [{"params": list(model.named_parameters())}], lr=0.1)
    assert isinstance(optimizer, Composite)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = flat(model)
    assert torch.equal(trained(model, optimizer, 2), before)


def test_a_plateau_that_sees_no_metric_says_so() -> None:
    optimizer = Lamb([nn.Parameter(torch.ones(2))])
    scheduler = build_scheduler(optimizer, "plateau", num_training_steps=8)
    for _ in range(3):
        scheduler.step()
    with pytest.warns(RuntimeWarning, match="has seen no metric in 4 steps"):
        scheduler.step()


def test_register_tokens_decay_no_more_than_the_class_token() -> None:
    model = nn.Module()
    model.cls_token = nn.Parameter(torch.ones(1, 1, 4))
    model.register_tokens = nn.Parameter(torch.ones(1, 3, 4))
    assert set(roles_of(model).values()) == {"vector"}
