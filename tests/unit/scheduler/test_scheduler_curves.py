"""Expected multipliers, written out step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.scheduler import SCHEMAS
from optrun.scheduler import build_curve, curves

SQRT = math.sqrt


def _curve(name: str, *, steps: int, lr: float = 1.0, **options: Any) -> list[float]:
    config = choice("scheduler", SCHEMAS, name, options)
    curve = build_curve(config, num_training_steps=steps, lr=lr)
    return [curve(step) for step in range(steps + 1)]


EXPECTED: list[tuple[str, dict[str, Any], list[float]]] = [
    ("constant", {}, [1, 1, 1, 1, 1]),
    ("constant", {"num_warmup_steps": 2}, [0, 0.5, 1, 1, 1]),
    ("constant", {"warmup_ratio": 0.5}, [0, 0.5, 1, 1, 1]),
    ("constant", {"warmup_ratio": 0.3}, [0, 0.5, 1, 1, 1]),  # 1.2 steps are 2
    (
        "constant",
        {"num_warmup_steps": 8},
        [0, 0.125, 0.25, 0.375, 0.5],
    ),  # the run ends within the climb
    ("linear", {}, [1, 0.75, 0.5, 0.25, 0]),
    ("linear", {"num_warmup_steps": 2}, [0, 0.5, 1, 0.5, 0]),
    ("linear", {"min_lr": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
    ("linear", {"num_warmup_steps": 4}, [0, 0.25, 0.5, 0.75, 1]),
    ("cosine", {}, [1, 0.5 + SQRT(2) / 4, 0.5, 0.5 - SQRT(2) / 4, 0]),
    ("cosine", {"min_lr": 0.5}, [1, 0.75 + SQRT(2) / 8, 0.75, 0.75 - SQRT(2) / 8, 0.5]),
    ("cosine", {"decay_steps": 2}, [1, 0.5, 0, 0, 0]),
    ("cosine", {"num_cycles": 2}, [1, 0.5, 1, 0.5, 0]),
    ("cosine", {"num_cycles": 2, "cycle_decay": 0.5}, [1, 0.5, 0.5, 0.25, 0]),
    # The peak of a cycle falls no lower than the floor.
    ("cosine", {"num_cycles": 2, "cycle_decay": 0.1, "min_lr": 0.5}, [1, 0.75, 0.5, 0.5, 0.5]),
    ("cosine", {"num_cycles": 2, "cycle_decay": 0.6, "min_lr": 0.2}, [1, 0.6, 0.6, 0.4, 0.2]),
    ("cosine", {"num_cycles": 2, "cycle_mult": 3.0}, [1, 1, 0.75, 0.25, 0]),
    ("cosine", {"num_cycles": 2, "restarts": False, "decay_steps": 3}, [1, 0, 1, 0, 0]),
    ("polynomial", {}, [1, 0.75, 0.5, 0.25, 0]),
    ("polynomial", {"power": 2.0}, [1, 0.5625, 0.25, 0.0625, 0]),
    ("polynomial", {"power": 1.0, "decay_steps": 2, "cycle": True}, [1, 0.5, 0, 0.25, 0]),
    ("inverse_sqrt", {"num_warmup_steps": 1}, [0, 1, SQRT(1 / 2), SQRT(1 / 3), 0.5]),
    ("inverse_sqrt", {"num_warmup_steps": 1, "min_lr": 0.6}, [0, 1, SQRT(1 / 2), 0.6, 0.6]),
    ("inverse_sqrt", {"warmup_ratio": 0.5}, [0, 0.5, 1, SQRT(2 / 3), SQRT(1 / 2)]),
    ("inverse_sqrt", {}, [0, 1, SQRT(1 / 2), SQRT(1 / 3), 0.5]),  # a tenth of the run, rounded up
    (
        "noam",
        {"num_warmup_steps": 2, "d_model": 4},
        [0, SQRT(2) / 8, SQRT(2) / 4, SQRT(3) / 6, 0.25],
    ),
    ("noam", {"num_warmup_steps": 2}, [0, 0.5, 1, SQRT(2 / 3), SQRT(1 / 2)]),
    ("wsd", {"num_decay_steps": 2, "decay_shape": "linear"}, [1, 1, 1, 0.5, 0]),
    ("wsd", {"decay_ratio": 0.5, "decay_shape": "cosine"}, [1, 1, 1, 0.5, 0]),
    ("wsd", {"decay_ratio": 1.0}, [1, 0.5, 1 - SQRT(1 / 2), 1 - SQRT(3 / 4), 0]),
    (
        "wsd",
        {"num_decay_steps": 2, "decay_shape": "square", "num_warmup_steps": 1},
        [0, 1, 1, 0.75, 0],
    ),
    (
        "wsd",
        {"num_decay_steps": 2, "decay_shape": "exponential", "min_lr": 0.25},
        [1, 1, 1, 0.5, 0.25],
    ),
    ("wsd", {}, [1, 1, 1, 1, 0]),
    # A decay that is longer than the run, or than what the warm-up leaves of it, takes all there
    # is.
    ("wsd", {"num_decay_steps": 9, "decay_shape": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
    (
        "wsd",
        {"num_decay_steps": 4, "decay_shape": "linear", "num_warmup_steps": 2},
        [0, 0.5, 1, 0.5, 0],
    ),
    ("step", {"step_size": 2, "gamma": 0.5}, [1, 1, 0.5, 0.5, 0.25]),
    ("step", {"step_size": 1, "gamma": 0.5, "min_lr": 0.3}, [1, 0.5, 0.3, 0.3, 0.3]),
    ("multistep", {"milestones": [1, 3], "gamma": 0.5}, [1, 0.5, 0.5, 0.25, 0.25]),
    (
        "multistep",
        {"milestones": [1, 3], "gamma": 0.5, "boundary": "keras"},
        [1, 1, 0.5, 0.5, 0.25],
    ),
    ("multistep", {"gamma": 0.5}, [1, 1, 0.5, 0.25, 0.25]),
    ("multistep", {"gamma": 0.5, "num_warmup_steps": 2}, [0, 0.5, 1, 0.5, 0.25]),
    ("piecewise", {}, [1, 1, 1, 1, 1]),
    ("piecewise", {"values": [1.0, 3.0, 2.0], "boundaries": [1, 3]}, [1, 3, 3, 2, 2]),
    (
        "piecewise",
        {"values": [1.0, 3.0, 2.0], "boundaries": [1, 3], "boundary": "keras"},
        [1, 1, 3, 3, 2],
    ),
    ("piecewise", {"values": [4.0, 3.0, 2.0, 1.0], "boundaries": None}, [4, 3, 2, 1, 1]),
    (
        "piecewise",
        {"values": [0.5, 1.0], "boundaries": [3], "num_warmup_steps": 2},
        [0, 0.25, 0.5, 1, 1],
    ),
    ("exponential", {"decay_rate": 0.25, "decay_steps": 2}, [1, 0.5, 0.25, 0.125, 0.0625]),
    (
        "exponential",
        {"decay_rate": 0.25, "decay_steps": 2, "staircase": True},
        [1, 1, 0.25, 0.25, 0.0625],
    ),
    ("exponential", {"decay_rate": 0.0625}, [1, 0.5, 0.25, 0.125, 0.0625]),
    ("inverse_time", {"decay_rate": 1.0, "decay_steps": 1}, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
    (
        "inverse_time",
        {"decay_rate": 1.0, "decay_steps": 2, "staircase": True},
        [1, 1, 1 / 2, 1 / 2, 1 / 3],
    ),
    ("plateau", {"num_warmup_steps": 2}, [0, 0.5, 1, 1, 1]),
]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    EXPECTED,
    ids=[f"{name}-{n}" for n, (name, _, _) in enumerate(EXPECTED)],
)
def test_multipliers(name: str, options: dict[str, Any], expected: list[float]) -> None:
    assert _curve(name, steps=4, **options) == pytest.approx(expected, rel=1e-12, abs=1e-15)


THE_FIELDS: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer], Any]]] = {
    "transformers constant": (
        {"num_warmup_steps": 4},
        lambda optimizer: transformers.get_scheduler("constant_with_warmup", optimizer, 4, 20),
    ),
    **{
        f"transformers {name}": (
            {"num_warmup_steps": 4},
            lambda optimizer, name=name: transformers.get_scheduler(name, optimizer, 4, 20),
        )
        for name in ("linear", "cosine", "polynomial", "inverse_sqrt")
    },
    "transformers wsd": (
        {"num_warmup_steps": 4, "num_decay_steps": 6, "decay_shape": "cosine"},
        lambda optimizer: transformers.get_wsd_schedule(optimizer, 4, 6, num_training_steps=20),
    ),
    "torch polynomial": ({}, lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 20)),
    "torch cosine": ({}, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20)),
    "torch step": ({"step_size": 7}, lambda optimizer: lr_scheduler.StepLR(optimizer, 7)),
    "torch multistep": (
        {"milestones": [6, 9]},
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [6, 9]),
    ),
    "torch exponential": (
        {"decay_rate": 0.8, "decay_steps": 1},
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    ),
}
"""Library and name -> what has no default there, or another one (wsd's shape), and that
library's own schedule.
"""


@pytest.mark.parametrize("schedule", THE_FIELDS)
def test_a_name_of_the_field_is_the_curve_of_the_field(schedule: str) -> None:
    options, theirs = THE_FIELDS[schedule]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler, lrs = theirs(optimizer), []
    for _ in range(20):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # transformers' polynomial ends at lr_end=1e-7
    assert _curve(schedule.split()[1], steps=20, **options)[:20] == pytest.approx(lrs, abs=2e-7)


def test_every_schedule_is_written_out() -> None:
    assert {name for name, _, _ in EXPECTED} == set(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_choice_runs_as_it_stands(name: str) -> None:
    for steps in (1, 2, 37):
        values = _curve(name, steps=steps, lr=3e-4)
        assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)
        assert max(_curve(name, steps=100)) == pytest.approx(1.0)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(set(SCHEMAS) - {"constant", "piecewise", "plateau"})),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 40),
    min_lr=st.floats(1e-6, 1e-3),
)
def test_never_below_the_floor_after_the_climb_and_never_above_the_peak(
    name: str, steps: int, warmup: int, min_lr: float
) -> None:
    options: dict[str, Any] = {"num_warmup_steps": warmup, "min_lr": min_lr}
    if name in ("inverse_sqrt", "noam"):
        options["num_warmup_steps"] = warmup + 1
    values = _curve(name, steps=steps, lr=1e-3, **options)
    climb = values[: options["num_warmup_steps"]]
    assert climb == sorted(climb)
    assert all(
        min_lr / 1e-3 - 1e-12 <= value <= 1 + 1e-12
        for value in values[options["num_warmup_steps"] :]
    )


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
def test_behind_the_last_step_a_curve_is_at_its_end(name: str) -> None:
    """Also where the climb takes all of the run but one step, or where no step is left to come
    down in.
    """
    config = choice("scheduler", SCHEMAS, name, {"num_warmup_steps": 3, "min_lr": 0.025})
    curve = build_curve(config, num_training_steps=4, lr=0.1)
    assert [curve(step) for step in (3, 4)] == pytest.approx([1.0, 0.25])
    assert curves.linear(0, decay_steps=0, final=0.25) == 0.25
    assert curves.wsd(3, num_stable_steps=2, num_decay_steps=0, final=0.25) == 0.25


def test_product_and_inverse_time_are_keras_decay() -> None:
    both = curves.product(
        lambda step: 0.5, lambda step: curves.inverse_time(step, decay_rate=0.5, decay_steps=1)
    )
    assert [both(step) for step in range(3)] == [0.5, 0.5 / 1.5, 0.25]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("cosin", {}, "scheduler=cosin: no such choice. Did you mean cosine"),
    (
        "cosine",
        {"num_warmup_step": 3},
        "scheduler.num_warmup_step: scheduler=cosine has no such key. Did you mean",
    ),
    ("constant", {"min_lr": 0.1}, "scheduler.min_lr: scheduler=constant has no such key"),
    (
        "linear",
        {"num_warmup_steps": 3, "warmup_ratio": 0.1},
        "warmup_ratio=0.1: expected null, because .*=3 is set",
    ),
    (
        "linear",
        {"num_warmup_steps": -1},
        "scheduler.num_warmup_steps=-1: expected a whole number, 0 or more",
    ),
    ("linear", {"warmup_ratio": 1.0}, r"scheduler.warmup_ratio=1.0: expected a number in \[0, 1\)"),
    ("linear", {"min_lr": -1.0}, "scheduler.min_lr=-1.0: expected a number of 0 or more"),
    ("linear", {"min_lr": 2.0}, "scheduler.min_lr=2.0: expected at most the peak, lr=1.0"),
    ("cosine", {"num_cycles": 0}, "scheduler.num_cycles=0"),
    ("cosine", {"cycle_mult": 2.0}, "scheduler.cycle_mult=2.0: expected 1 without restarts"),
    (
        "polynomial",
        {"cycle": True},
        "scheduler.cycle=true: expected false while scheduler.decay_steps is null",
    ),
    (
        "inverse_sqrt",
        {"num_warmup_steps": 0},
        "scheduler.num_warmup_steps=0: expected a whole number, 1 or more",
    ),
    ("wsd", {"num_decay_steps": 3, "decay_ratio": 0.1}, "scheduler.decay_ratio=0.1: expected null"),
    ("wsd", {"decay_shape": "exponential"}, "scheduler.min_lr=0.0: expected a number above 0"),
    (
        "wsd",
        {"decay_shape": "sqrt"},
        "scheduler.decay_shape=sqrt: expected one of linear.*Did you mean",
    ),
    ("step", {"step_size": 0}, "scheduler.step_size=0"),
    ("multistep", {"milestones": [3, 1]}, r"scheduler.milestones=\[3, 1\]: expected rising steps"),
    (
        "multistep",
        {"milestones": [1], "num_warmup_steps": 2},
        "1 lies in the warm-up, which lasts until step 2",
    ),
    (
        "piecewise",
        {"values": [1.0, 2.0]},
        r"scheduler.boundaries=\[\]: expected 1 steps for 2 values, or null",
    ),
    ("piecewise", {"values": [1.0], "boundaries": None}, "1 values for a run of 4 steps"),
    ("plateau", {"factor": 1.0}, r"scheduler.factor=1.0: expected a number in \(0, 1\)"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"), REFUSED, ids=[f"{r[0]}-{n}" for n, r in enumerate(REFUSED)]
)
def test_refusals(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _curve(name, steps=4, **options)


def test_a_warm_up_climbs_to_where_the_curve_begins() -> None:
    curve = curves.after_warmup(lambda step: 0.25 / (1 + step), 2)
    assert [curve(step) for step in range(4)] == [0.0, 0.125, 0.25, 0.125]


def test_words_are_checked_in_the_pure_functions_too() -> None:
    with pytest.raises(ValueError, match="num_warmup_steps=0: expected a number above 0"):
        curves.inverse_sqrt(3, 0)
    with pytest.raises(ValueError, match="shape=cubic: expected one of cosine"):
        curves.wsd(3, num_stable_steps=0, num_decay_steps=4, shape="cubic")
    with pytest.raises(ValueError, match="boundary=tf"):
        curves.piecewise(0, values=[1.0], boundaries=[], boundary="tf")
    with pytest.raises(ValueError, match="final=0"):
        curves.wsd(3, num_stable_steps=0, num_decay_steps=4, shape="exponential")
