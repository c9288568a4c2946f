"""What other people's programs do to an optimizer, over all of ours."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from optrun.optimizer import AdamW, AdamWDL, Lamb, LazyAdam, Mars, Soap, build_optimizer
from optrun.optimizer.classes import class_of
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


def host_peft(case: Case) -> None:
    """peft's own LoRA+ makes the groups; the frozen weights stay, and the adapter is reloaded."""
    lora = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(net(), lora)
    base_weights = [p for name, p in model.named_parameters() if "lora_" not in name]
    before = [param.detach().clone() for param in base_weights]
    options = {"lr": case.lr, "loraplus_lr_ratio": 4.0}
    optimizer = create_loraplus_optimizer(model, class_of(case.name), **options)
    rates = {group["lr"] for group in optimizer.param_groups if group["params"]}
    assert rates == {case.lr, 4 * case.lr}

    def train(model: nn.Module, optimizer: Optimizer, first: int) -> dict[str, Tensor]:
        for step in range(first, first + 3):
            set_grads(model, step)
            optimizer.step()
        return peft.get_peft_model_state_dict(model)  # type: ignore[no-any-return]

    adapter = {name: factor.clone() for name, factor in train(model, optimizer, 0).items()}
    state = copy.deepcopy(optimizer.state_dict())
    assert all(map(torch.equal, base_weights, before))
    other = peft.get_peft_model(net(), lora)
    peft.set_peft_model_state_dict(other, adapter)
    fresh = create_loraplus_optimizer(other, class_of(case.name), **options)
    fresh.load_state_dict(state)
    resumed = train(other, fresh, 3)
    for name, factor in train(model, optimizer, 3).items():
        assert torch.equal(resumed[name], factor)
        assert not torch.equal(adapter[name], factor)


def host_accelerate(case: Case) -> None:
    """accelerate wraps it, saves its state and hands it to another process."""
    model, other = net(), net()
    alone = case.build(other.named_parameters())
    wrapped = Accelerator(cpu=True).prepare(case.build(model.named_parameters()))
    assert torch.equal(trained(model, wrapped), trained(other, alone))
    fresh = case.build(other.named_parameters())
    fresh.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert torch.equal(trained(model, wrapped, first=3), trained(other, fresh, first=3))


def host_lightning(case: Case) -> None:
    """BackboneFinetuning adds a group in training, and writes the groups anew on a resume."""
    model = net()
    head = ["2.weight", "2.bias"]
    backbone = ["0.weight"]

    def pairs_of(model: nn.Module, wanted: list[str]) -> list[tuple[str, nn.Parameter]]:
        return [(name, model.get_parameter(name)) for name in wanted]

    optimizer = case.build(pairs_of(model, head), lr=0.1)
    trained(model, optimizer, 1)
    optimizer.add_param_group({"params": pairs_of(model, backbone), "lr": 0.02})
    trained(model, optimizer, 1, first=1)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    fresh = case.build(pairs_of(other, head), lr=0.1)
    fresh.add_param_group({"params": pairs_of(other, backbone)})
    params = [param for group in fresh.param_groups for param in group["params"]]
    fresh.param_groups = [
        {**group, "params": [params[place] for place in group["params"]]}
        for group in saved["param_groups"]
    ]
    fresh.load_state_dict(saved)
    assert [group["lr"] for group in fresh.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    assert torch.equal(trained(model, optimizer, first=2), trained(other, fresh, first=2))


def host_fsdp1(case: Case) -> None:
    """FSDP1 makes flat pieces: what goes entry by entry steps them, all others refuse."""
    model = net()
    pieces = [
        (f"_fsdp_wrapped_module.{name}", nn.Parameter(param.detach().flatten()))
        for name, param in model.named_parameters()
    ]
    if case.name in NEEDS_WHOLE_TENSORS:
        with pytest.raises(ValueError, match="flat piece of FSDP1"):
            case.build(pieces)
        return
    optimizer, alone = case.build(pieces), case.build(model.named_parameters())
    for step in range(3):
        set_grads(model, step)
        for (_, piece), param in zip(pieces, model.parameters(), strict=True):
            assert param.grad is not None
            piece.grad = param.grad.flatten()
        optimizer.step()
        alone.step()
    assert torch.equal(torch.cat([piece.detach() for _, piece in pieces]), flat(model))


NEEDS_WHOLE_TENSORS = {"lamb", "mars", "soap", "adafactor", "muon"}
HOSTS: list[Callable[[Case], None]] = [
    host_accelerate,
    host_lightning,
    host_fsdp1,
    host_dcp,
    host_exchanges_tensors,
    host_timm,
    host_empty_groups,
    host_resets_state,
    host_reorders_groups,
    host_averages,
    host_peft,
]


@over_cases
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_a_host(host: Callable[[Case], None], case: Case) -> None:
    host(case)


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight random rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(16, (6,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}


def trainer(case: Case, folder: Path) -> Trainer:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    if case.name == "muon":  # its class takes matrices alone, as torch's does
        optimizer = case.build(model.named_parameters())
        return Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, None))
    by_class = (class_of(case.name), {"lr": case.lr})
    return Trainer(model, arguments, train_dataset=Tokens(), optimizer_cls_and_kwargs=by_class)


@over_cases
def test_trainer_of_transformers_goes_on_from_its_checkpoint(case: Case, tmp_path: Path) -> None:
    straight = trainer(case, tmp_path)
    before = flat(straight.model)
    straight.train()
    resumed = trainer(case, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat(straight.model), flat(resumed.model))
    assert not torch.equal(flat(straight.model), before)


def schedule_and_train(
    schedule: Callable[[Optimizer], Any], model: nn.Module, optimizer: Optimizer
) -> None:
    scheduler = schedule(optimizer)
    for step in range(3):
        trained(model, optimizer, 1, first=step)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(step))


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
    schedulers: list[Callable[[Optimizer], Any]] = [
        lambda driven: lr_scheduler.LambdaLR(driven, lambda _: 0.0),
        lambda driven: lr_scheduler.OneCycleLR(driven, 0.1, 9, cycle_momentum=False),
        lambda driven: lr_scheduler.ReduceLROnPlateau(driven, patience=0),
    ]
    for schedule in schedulers:
        other = net()
        driven = case.build(other.named_parameters(), lr=lambda _: 0.1)
        with pytest.raises(RuntimeError, match="function of the step"):
            schedule_and_train(schedule, other, driven)


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
