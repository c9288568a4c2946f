"""The scheduler carries curves to groups.

Ratios stay, state is JSON, per-group schedules, weight decay, plateau.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.scheduler import SCHEMAS
from optrun.optimizer import Lamb
from optrun.scheduler import Scheduler, build_scheduler
from optrun.scheduler.build import warmup_note


def _sgd(*groups: dict[str, Any], lr: float = 1.0) -> torch.optim.SGD:
    filled = [{"params": [torch.nn.Parameter(torch.ones(2))], **group} for group in groups or ({},)]
    return torch.optim.SGD(filled, lr=lr)


def _lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_step_0_is_set_on_construction_and_ratios_stay() -> None:
    optimizer = _sgd({"lr": 0.5, "lr_scale": 0.5}, {"lr": 1.0, "lr_scale": 1.0})
    scheduler = build_scheduler(
        optimizer, "cosine", num_training_steps=10, num_warmup_steps=2, min_lr=0.1
    )
    assert _lrs(optimizer) == [0.0, 0.0]
    seen = []
    for _ in range(10):
        scheduler.step()
        low, high = _lrs(optimizer)
        assert low == pytest.approx(high / 2, rel=1e-15)
        seen.append(high)
    assert seen[1] == 1.0
    assert seen[-1] == pytest.approx(
        0.1
    )  # min_lr holds for scale 1; the other group ends at half of it
    assert scheduler.get_last_lr() == _lrs(optimizer)


@pytest.mark.parametrize("name", ["linear", "cosine", "plateau"])
def test_min_lr_is_that_of_the_base_and_not_of_the_largest_group(name: str) -> None:
    """Scales may lie on both sides of 1, none may be 1, and a rule's absolute lr has no scale."""
    optimizer = _sgd({"lr": 0.5, "lr_scale": 0.5}, {"lr": 2.0, "lr_scale": 2.0}, {"lr": 5.0})
    options = {"patience": 0, "factor": 0.01} if name == "plateau" else {}
    scheduler = build_scheduler(optimizer, name, num_training_steps=4, min_lr=0.1, **options)
    for _ in range(4):
        scheduler.step(*([1.0] if name == "plateau" else []))
    assert _lrs(optimizer) == pytest.approx([0.05, 0.2, 0.5])
    with pytest.raises(ConfigError, match=r"min_lr=1.5: expected at most the peak, lr=1.0") as info:
        build_scheduler(
            _sgd({"lr": 0.5, "lr_scale": 0.5}, {"lr": 2.0, "lr_scale": 2.0}),
            name,
            num_training_steps=4,
            min_lr=1.5,
        )
    assert info.value.__cause__ is None
    absolute = _sgd({"lr": 0.5}, {"lr": 2.0})
    scheduler = build_scheduler(absolute, name, num_training_steps=4, min_lr=0.2, **options)
    for _ in range(4):
        scheduler.step(*([1.0] if name == "plateau" else []))
    assert _lrs(absolute) == pytest.approx([0.05, 0.2])


def test_config_instance_and_function_of_ones_own() -> None:
    optimizer = _sgd()
    config = choice("scheduler", SCHEMAS, "linear", {})
    build_scheduler(optimizer, config, num_training_steps=4).step()
    assert _lrs(optimizer) == [0.75]
    own = build_scheduler(_sgd(), lambda step: 1 / (1 + step), num_training_steps=4)
    own.step()
    assert own.get_last_lr() == [0.5]
    with pytest.raises(TypeError, match="beside a ready configuration"):
        build_scheduler(_sgd(), config, num_training_steps=4, min_lr=0.1)
    with pytest.raises(TypeError, match="with a function of your own"):
        build_scheduler(_sgd(), lambda step: 1.0, num_training_steps=4, min_lr=0.1)
    with pytest.raises(TypeError, match="expected the name of a choice"):
        build_scheduler(_sgd(), 3, num_training_steps=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_training_steps=0"):
        build_scheduler(_sgd(), "linear", num_training_steps=0)


def test_state_is_json_and_goes_on_where_it_stood() -> None:
    first = build_scheduler(_sgd(), "cosine", num_training_steps=10)
    for _ in range(4):
        first.step()
    state = json.loads(json.dumps(first.state_dict()))
    second = build_scheduler(_sgd(), "cosine", num_training_steps=10)
    second.load_state_dict(state)
    for _ in range(6):
        assert (second._step_count, second.last_epoch) == (
            first._step_count,
            first.last_epoch,
        )  # torch reads both
        first.step()
        second.step()
        assert first.get_last_lr() == second.get_last_lr()
    assert second.global_step == 10


def test_a_tensor_lr_is_written_in_place() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(1.0))
    lr = optimizer.param_groups[0]["lr"]
    build_scheduler(optimizer, "linear", num_training_steps=4).step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == torch.tensor(0.75)


def test_the_optimizer_knows_who_drives_it() -> None:
    optimizer = Lamb([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.set_lr(0.5)
    build_scheduler(optimizer, "cosine", num_training_steps=4)
    with pytest.raises((RuntimeError, ValueError), match="cosine"):
        optimizer.set_lr(0.1)


def test_an_lr_that_is_a_function_already_is_left_to_it() -> None:
    optimizer = Lamb([torch.nn.Parameter(torch.ones(2))], lr=lambda step: 1.0)
    message = "the lr of a parameter group is already a function of the step"
    with pytest.raises(ConfigError, match=message):
        build_scheduler(optimizer, "cosine", num_training_steps=4)
    with pytest.raises(ValueError, match=message):
        build_scheduler(optimizer, lambda step: 1.0, num_training_steps=4)


def test_plateau_follows_torch() -> None:
    losses = [1.0, 0.9, 0.95, 0.95, 0.95, 0.9, 0.8, 0.8, 0.8, 0.8, float("nan"), 0.7]
    options: dict[str, Any] = {
        "factor": 0.5,
        "patience": 1,
        "threshold": 0.01,
        "cooldown": 1,
        "min_lr": 0.2,
    }
    ours_optimizer, theirs_optimizer = _sgd(), _sgd()
    ours = build_scheduler(ours_optimizer, "plateau", num_training_steps=100, **options)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs_optimizer, **options)
    for loss in losses:
        ours.step(loss)
        theirs.step(loss)
        assert _lrs(ours_optimizer) == pytest.approx(_lrs(theirs_optimizer))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_plateau_modes_follow_torch(mode: str, threshold_mode: str) -> None:
    values = [0.5, 0.51, 0.52, 0.6, 0.59, 0.58, 0.3, 0.31, 0.2, 0.19, 0.9, 0.91]
    options: dict[str, Any] = {"factor": 0.5, "patience": 0, "threshold": 0.05, "mode": mode}
    ours_optimizer, theirs_optimizer = _sgd(), _sgd()
    ours = build_scheduler(
        ours_optimizer, "plateau", num_training_steps=9, threshold_mode=threshold_mode, **options
    )
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs_optimizer, threshold_mode=threshold_mode, **options
    )
    for value in values:
        ours.observe(value)
        theirs.step(value)
        assert _lrs(ours_optimizer) == pytest.approx(_lrs(theirs_optimizer))


@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
def test_what_counts_as_better_is_a_share_or_a_difference(threshold_mode: str) -> None:
    """From 10, a threshold of 0.1 asks for less than 9, or for less than 9.9."""
    ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))
    options: dict[str, Any] = {
        "factor": 0.5,
        "patience": 0,
        "threshold": 0.1,
        "threshold_mode": threshold_mode,
    }
    schedule = build_scheduler(
        ours, "plateau", num_training_steps=9, mode="min", metric="loss", **options
    )
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, mode="min", **options)
    for metric in (10.0, 9.5, 8.9, 8.85):
        schedule.observe(metric)
        torchs.step(metric)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_plateau_state_and_metric() -> None:
    first = build_scheduler(
        _sgd(), "plateau", num_training_steps=9, patience=0, metric="eval/accuracy", mode="max"
    )
    assert first.metric == "eval/accuracy"
    for value in (0.5, 0.4, 0.6, 0.1):
        first.step(value)
    second = build_scheduler(
        _sgd(), "plateau", num_training_steps=9, patience=0, metric="eval/accuracy", mode="max"
    )
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.get_last_lr() == second.get_last_lr() == [0.25]
    with pytest.raises(ValueError, match="scheduler=linear watches no metric"):
        build_scheduler(_sgd(), "linear", num_training_steps=4).step(1.0)


def test_multiplier_looks_ahead_without_moving() -> None:
    scheduler: Scheduler = build_scheduler(_sgd(), "linear", num_training_steps=4)
    assert [scheduler.multiplier(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert scheduler.global_step == 0


def test_arguments_of_another_kind_are_named() -> None:
    with pytest.raises(
        TypeError, match=r"optimizer='cosine': expected a torch optimizer, got str. It comes first"
    ):
        build_scheduler("cosine", _sgd(), num_training_steps=3)  # type: ignore[arg-type]
    for wrong in ("10", 10.0, True, None):
        with pytest.raises(
            TypeError, match=r"num_training_steps=.*: expected a whole number, 1 or more"
        ):
            build_scheduler(_sgd(), "cosine", num_training_steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the key 'global_step' is missing"):
        build_scheduler(_sgd(), "cosine", num_training_steps=3).load_state_dict({"step": 1})


def test_a_run_that_ends_on_the_climb_is_told() -> None:
    config = choice("scheduler", SCHEMAS, "cosine", {"num_warmup_steps": 10})
    assert warmup_note(config, 11) is None
    assert "num_warmup_steps=10 and the run has 10 steps" in str(warmup_note(config, 10))
    assert warmup_note(choice("scheduler", SCHEMAS, "inverse_sqrt", {}), 1) is None
