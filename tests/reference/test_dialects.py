"""Each dialect is its package over 20 steps, with groups, decay and exclusions, as recorded.

Or its formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optrun.certify.formulas import FORMULAS, FormulaReference
from optrun.certify.optimizer import Ours
from optrun.config.dialects import DIALECTS
from tests.reference.dialect_problem import (
    BETAS,
    DECAY,
    EPS,
    KEPT,
    LATE,
    LR,
    PATTERNS,
    STEPS,
    UNDECAYED,
    groups,
    numbers_at,
    problem,
    recorded,
    scaled_groups,
    scaled_numbers_at,
)

CASES = {f"{case['choice']}-{case['dialect']}": case for case in recorded()["cases"]}
EVERY = [(choice, dialect) for choice, presets in DIALECTS.items() for dialect in presets]
NOT_INSTALLABLE = {
    "lamb-apex",
    "lamb-deepspeed",
    "lamb-paddle",
    "lamb-tensorflow",
    "adamax-paddle",
    "adamw-paper",
}
"""Held to their formulas alone.

Paddle's and TensorFlow's are played in `test_conformance.py`, one is a paper's.
"""


def steps_of(side: Any, numbers: Any = numbers_at, **changes: Any) -> dict[int, dict[str, Tensor]]:
    after = {}
    for step, grads in enumerate(problem().grads, start=1):
        side.step(
            grads,
            {name: replace(of, **changes.get(name, {})) for name, of in numbers(step).items()},
        )
        if step in KEPT:
            after[step] = {name: weight.detach().clone() for name, weight in side.weights.items()}
    return after


def formula(choice: str, dialect: str, **changes: Any) -> dict[int, dict[str, Tensor]]:
    weights = {name: weight.clone() for name, weight in problem().weights.items()}
    return steps_of(FormulaReference(FORMULAS[choice][dialect], weights), **changes)


def same(made: dict[int, dict[str, Tensor]], wanted: dict[int, dict[str, Tensor]]) -> None:
    for step, weights in wanted.items():
        for name, weight in weights.items():
            scale = max(float(weight.abs().max()), 1e-6)
            assert float((made[step][name] - weight).abs().max()) <= 1e-10 * scale, (
                f"step {step}, {name}"
            )


def test_what_is_recorded_and_what_is_not() -> None:
    assert {f"{choice}-{dialect}" for choice, dialect in EVERY} == NOT_INSTALLABLE | set(CASES)
    assert {choice: set(formulas) for choice, formulas in FORMULAS.items()} == {
        choice: set(presets) for choice, presets in DIALECTS.items()
    }
    assert len(problem().grads) == STEPS
    assert problem().grads[3][LATE] is None


def weights_after(case: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    wanted = {
        int(step): {
            name: torch.tensor(values, dtype=torch.float64).view_as(problem().weights[name])
            for name, values in weights.items()
        }
        for step, weights in case["after"].items()
    }
    assert set(wanted) == set(KEPT)
    return wanted


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_formula_is_its_package(case: dict[str, Any]) -> None:
    same(formula(case["choice"], case["dialect"]), weights_after(case))


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("key", ["lr_scale", "lr"])
@pytest.mark.parametrize("case", recorded()["corrected"], ids=lambda case: case["choice"])
def test_corrected_decay_is_that_of_timm(case: dict[str, Any], key: str, foreach: bool) -> None:
    """Groups have 0.1, 1 and 3 times the base rate, and the rate falls.

    All groups divide by the base rate.
    """
    given = {
        "weight_decay_mode": "corrected",
        "weight_decay": DECAY,
        "betas": BETAS,
        "eps": EPS,
        "foreach": foreach,
    }
    given |= {"fused": None} if case["choice"] == "adamw" else {"dialect": "timm"}
    ours = Ours(case["choice"], scaled_groups(key), problem(), LR, **given)
    same(steps_of(ours, scaled_numbers_at), weights_after(case))


@pytest.mark.parametrize("by_pattern", [False, True], ids=["groups", "patterns"])
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize(("choice", "dialect"), EVERY)
def test_each_dialect_is_its_formula(
    choice: str, dialect: str, foreach: bool, by_pattern: bool
) -> None:
    if by_pattern and choice != "lamb":
        return
    patterns: dict[str, Any] = {"exclude_from_weight_decay": PATTERNS} if by_pattern else {}
    excluded = {name: {"excluded": True} for name in UNDECAYED if by_pattern}
    given = {"betas": BETAS, "eps": EPS, "foreach": foreach, **patterns}
    if choice == "adamw":
        given["fused"] = None
    ours = Ours(
        choice,
        groups(by_pattern=by_pattern),
        problem(),
        LR,
        dialect=dialect,
        weight_decay=DECAY,
        **given,
    )
    same(steps_of(ours), formula(choice, dialect, **excluded))
