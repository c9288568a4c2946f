"""The schedule is a torch LRScheduler.

What accelerate, Lightning, pickle and torch's own schedulers ask of one.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

from optrun.config.schema.scheduler import SCHEMAS
from optrun.optimizer import Lamb
from optrun.optimizer.composite import Composite
from optrun.scheduler import Scheduler, build_scheduler
from tests.optimizer_cases import CASES, IDS, Case, set_grads, toy

NEEDED: dict[str, dict[str, Any]] = {
    "piecewise": {"values": [1.0, 0.5], "boundaries": [3]},
    "step": {"step_size": 2},
    "cosine": {"num_cycles": 2, "cycle_decay": 0.5, "min_lr": 0.1},
    "wsd": {"num_warmup_steps": 2, "min_lr": 0.1},
    "inverse_sqrt": {"num_warmup_steps": 2, "min_lr": 0.1},
    "noam": {"num_warmup_steps": 2, "d_model": 16},
    "exponential": {"decay_rate": 0.5, "min_lr": 0.1},
}


def _param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def _sgd(*groups: dict[str, Any], lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [_param()], **group} for group in groups or ({},)], lr=lr)


def _lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def _step(scheduler: Scheduler, times: int = 1) -> None:
    for _ in range(times):
        for group in scheduler.optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.filterwarnings("ignore:scheduler=plateau")
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schedule_is_one_of_torchs_and_can_be_copied(name: str) -> None:
    """A pickled or deep-copied schedule goes on by itself, over an optimizer of its own."""
    first = build_scheduler(
        Lamb([_param()], lr=1.0), name, num_training_steps=10, **NEEDED.get(name, {})
    )
    assert isinstance(first, LRScheduler)
    _step(first, 3)
    assert (first.last_epoch, first.global_step, first.base_lrs) == (3, 3, [1.0])
    assert first.get_lr() == first.get_last_lr()
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    for one in copies:
        assert one.optimizer is not first.optimizer
        assert one.get_last_lr() == first.get_last_lr()
        one.optimizer.add_param_group({"params": [_param()]})
    _step(first, 4)
    for one in copies:
        assert (one.last_epoch, first.last_epoch) == (3, 7)
        _step(one, 4)
        assert one.get_last_lr() == first.get_last_lr() * 2, "the added group joined the copy"


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_pickled_schedule_brings_its_optimizer(case: Case) -> None:
    """With its state, so that both go on exactly."""
    params = toy()
    scheduler = build_scheduler(case.build(params.items(), lr=0.1), "cosine", num_training_steps=4)
    set_grads(params, 0)
    scheduler.optimizer.step()
    scheduler.step()
    twin = pickle.loads(pickle.dumps(scheduler))
    copied = twin.optimizer.named_params()
    for run, one in ((params, scheduler), (copied, twin)):
        set_grads({name: run[name] for name in params}, 1)
        one.optimizer.step()
        one.step()
    assert all(torch.equal(copied[name], param) for name, param in params.items())
    assert twin.get_last_lr() == scheduler.get_last_lr()


def test_own_functions_can_be_copied_where_they_can() -> None:
    assert (
        pickle.loads(pickle.dumps(build_scheduler(_sgd(), abs, num_training_steps=4))).name == "abs"
    )
    own = build_scheduler(_sgd(), lambda step: 0.5**step, num_training_steps=4)
    assert copy.deepcopy(own).get_last_lr() == [1.0]


def test_a_state_as_checkpoints_hold_it() -> None:
    """Every key that a checkpoint was ever written with, and no other."""
    scheduler = build_scheduler(_sgd({}, {}), "plateau", num_training_steps=9, patience=0)
    for loss in (2.0, 3.0):
        scheduler.step(loss)
    saved = {
        "name": "plateau",
        "metric": "eval/loss",
        "global_step": 2,
        "last_lr": [0.5, 0.5],
        "plateau": {"multiplier": 0.5, "best": 2.0, "num_bad": 0, "cooling": 0, "mode": "min"},
    }
    assert json.loads(json.dumps(scheduler.state_dict())) == saved
    fresh = build_scheduler(_sgd({}, {}), "plateau", num_training_steps=9, patience=0)
    fresh.load_state_dict(saved)
    assert (fresh.state_dict(), fresh.last_epoch) == (saved, 2)


def test_a_group_added_later_joins_at_the_step_the_schedule_has_come_to() -> None:
    """Also for the very next step of the optimizer.

    Which comes before the next one of the schedule.
    """
    optimizer = Lamb([("first", _param())], lr=1.0)
    scheduler = build_scheduler(optimizer, "linear", num_training_steps=10)
    _step(scheduler, 4)
    used = []
    optimizer.register_step_post_hook(lambda one, *_: used.append(_lrs(one)))
    optimizer.add_param_group({"params": [("second", _param())], "lr_scale": 0.5})
    _step(scheduler)
    assert used == [pytest.approx([0.6, 0.3])]
    assert _lrs(optimizer) == pytest.approx([0.5, 0.25])
    saved = scheduler.state_dict()
    fresh = Lamb([{"params": [("first", _param())]}], lr=1.0)
    again = build_scheduler(fresh, "linear", num_training_steps=10)
    fresh.add_param_group({"params": [("second", _param())], "lr_scale": 0.5})
    again.load_state_dict(saved)
    assert _lrs(fresh) == pytest.approx([0.5, 0.25])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_optimizer_takes_a_group_later(case: Case) -> None:
    params = toy()
    names = list(params)
    optimizer = case.build([(names[0], params[names[0]])], lr=0.4)
    scheduler = build_scheduler(optimizer, "linear", num_training_steps=4)
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()
    member = {"optimizer": "adamw"} if case.name == "muon" else {}
    optimizer.add_param_group({"params": [(name, params[name]) for name in names[1:]], **member})
    assert scheduler.get_last_lr() == [pytest.approx(0.3)] * 2
    assert [group["step"] for group in optimizer.param_groups] == [1, 1], (
        "what counts steps has not begun anew"
    )
    set_grads(params, 1)
    optimizer.step()
    scheduler.step()
    assert _lrs(optimizer) == [pytest.approx(0.2)] * 2
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]


@pytest.mark.parametrize("member", ["lamb", "sgd", "adamw"])
def test_a_group_added_later_counts_on(member: str) -> None:
    """Functions of the step and bias corrections that count the optimizer's steps.

    Also in a member that is new.
    """
    first, second = _param(), _param()
    optimizer = Composite(
        [{"params": [("first", first)]}, {"params": [("other", _param())], "optimizer": "adamw"}],
        lr=lambda step: 1.0 / (1 + step),
        members={"lamb": {"step_count": "optimizer"}},
    )
    for _ in range(3):
        for param in optimizer.named_params().values():
            param.grad = torch.ones(2)
        optimizer.step()
    optimizer.add_param_group({"params": [("second", second)], "optimizer": member})
    for param in optimizer.named_params().values():
        param.grad = torch.ones(2)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.25]
    assert {group["step"] for group in optimizer.param_groups} == {4}
    if member == "lamb":
        assert optimizer.state[second]["step"] == optimizer.state[first]["step"] == 4


def test_a_group_added_to_a_plateau_has_what_was_seen() -> None:
    """With torch's ReduceLROnPlateau it would keep its full lr beside the others' reduced one."""
    optimizer = _sgd()
    scheduler = build_scheduler(optimizer, "plateau", num_training_steps=9, patience=1, factor=0.5)
    for loss in (1.0, 1.0, 1.0, 1.0):
        scheduler.observe(loss)
    assert _lrs(optimizer) == [0.5]
    optimizer.add_param_group({"params": [_param()], "lr": 0.2})
    scheduler.observe(1.0)  # the second evaluation in a row without improvement
    assert _lrs(optimizer) == [0.25, 0.05]


def test_a_group_that_is_gone_is_named() -> None:
    optimizer = _sgd({}, {})
    scheduler = build_scheduler(optimizer, "linear", num_training_steps=4)
    optimizer.param_groups.pop()
    with pytest.raises(ValueError, match="had 2 parameter groups, and now has 1"):
        scheduler.step()


def test_a_discarded_schedule_leaves_the_optimizer_alone() -> None:
    optimizer = _sgd()
    build_scheduler(optimizer, "linear", num_training_steps=4, num_warmup_steps=2)
    build_scheduler(optimizer, "constant", num_training_steps=4)
    optimizer.add_param_group({"params": [_param()]})
    optimizer.step()
    assert _lrs(optimizer) == [1.0, 1.0]


def test_torchs_schedulers_may_hold_ours() -> None:
    """SequentialLR starts each schedule at its own step 0."""
    optimizer = _sgd()
    parts = [
        build_scheduler(optimizer, "linear", num_training_steps=4, num_warmup_steps=3),
        build_scheduler(optimizer, "cosine", num_training_steps=4),
        StepLR(optimizer, step_size=1, gamma=0.5),
    ]
    both = SequentialLR(optimizer, parts, milestones=[3, 5])
    seen = []
    for _ in range(7):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    assert seen == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0, 0.853553, 1.0, 0.5], rel=1e-5)


def _accelerated(accelerate: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = Lamb(model.named_parameters(), lr=0.1)
    scheduler = build_scheduler(optimizer, "linear", num_training_steps=10, **options)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_accelerate_steps_it_with_the_optimizer_and_keeps_its_state(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model, optimizer, scheduler = _accelerated(accelerate)
    assert type(scheduler).__name__ == "AcceleratedScheduler"
    lrs = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        lrs.append(optimizer.param_groups[0]["lr"])
    assert lrs == pytest.approx([0.1, 0.09, 0.09, 0.08, 0.08, 0.07])
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer, scheduler = _accelerated(accelerate)
    accelerator.load_state(str(tmp_path))
    assert scheduler.scheduler.global_step == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.07)


def test_a_schedule_over_a_wrapped_optimizer_drives_the_one_inside() -> None:
    """As accelerate's `prepare` returns it.

    A torch optimizer without hooks, and with the real one in it.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    inner = Lamb([_param()], lr=1.0)
    scheduler = build_scheduler(Wrapper(inner), "linear", num_training_steps=4)
    inner.add_param_group({"params": [_param()]})
    _step(scheduler)
    assert _lrs(inner) == [0.75, 0.75]
    with pytest.raises(RuntimeError, match="linear drives"):
        inner.set_lr(1.0)
