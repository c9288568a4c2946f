"""What the report claims of its error rate follows from how the contenders were chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optrun.report.collect import load_runs
from optrun.report.findings import Findings, find
from optrun.report.narrative import notes
from optrun.report.selection import RATES
from optrun.report.spent import budget_line
from optrun.report.statistics import BETTER, WORSE, compare
from optrun.report.warnings import find_warnings

MakeRun = Callable[..., Path]
Grid = dict[str, dict[float, tuple[int, ...]]]
"""Optimizer -> lr -> seeds."""

ONE: Grid = {"adamw": {1e-3: (0, 1, 2)}, "lamb": {4e-3: (0, 1, 2)}}
EQUAL: Grid = {"adamw": {1e-3: (0, 1, 2), 2e-3: (0, 1, 2)}, "lamb": {4e-3: (0, 1, 2), 8e-3: (0, 1, 2)}}
MANY: Grid = {name: {1e-3 * 2**k: (0, 1, 2) for k in range(4)} for name in ("adamw", "lamb")}
UNEQUAL: Grid = {"adamw": {1e-3: (0, 1, 2)}, "lamb": {4e-3 * 2**k: (0, 1, 2) for k in range(8)}}
FRESH: Grid = {"adamw": {1e-3: (5, 6, 7), 2e-3: (0, 1), 4e-3: (0, 1)}, "lamb": {4e-3: (5, 6, 7), 8e-3: (0,)}}
MORE: Grid = {"adamw": {1e-3: (0, 1, 2, 3, 4), 2e-3: (0, 1)}, "lamb": {4e-3: (0, 1, 2)}}


def compared(grid: Grid, folder: Path, make_run: MakeRun) -> Findings:
    """The findings over a grid of short runs."""
    for optimizer, lrs in grid.items():
        for lr, seeds in lrs.items():
            for seed in seeds:
                make_run(folder / f"{optimizer}-{lr}-{seed}", optimizer=optimizer, lr=lr, seed=seed, max_steps=10)
    return find(load_runs([folder]))


@pytest.mark.parametrize(
    ("grid", "claimed", "said"),
    [
        (ONE, True, ()),
        (FRESH, True, ()),
        (EQUAL, False, ("best of 2 configurations", "stays at 5%", "optrun confirm DIR")),
        (MANY, False, ("best of 4 configurations", "hopeless, it may be up to 6%", "fresh seeds")),
        (UNEQUAL, False, ("best of 1 to 8 configurations", "It may be up to 8%", "simulated", "fresh seeds")),
        (MORE, False, ("best of 1 to 2 configurations", "optrun confirm DIR")),
    ],
    ids=["fixed", "fresh seeds", "equal", "equally many", "unequal", "seeds of the choice among them"],
)
def test_the_bound_is_claimed_only_where_it_holds(
    grid: Grid, claimed: bool, said: tuple[str, ...], tmp_path: Path, make_run: MakeRun
) -> None:
    findings = compared(grid, tmp_path, make_run)
    (tests,) = [note for note in notes(findings) if note.startswith("Tests:")]
    assert ("is at most 5%" in tests) is claimed
    for fact in said:
        assert fact in tests
    warned = [each.text for each in find_warnings(findings) if each.kind == "tuning"]
    assert bool(warned) is (grid in (UNEQUAL, FRESH, MORE))
    assert any("up to 8%" in text for text in warned) is (grid is UNEQUAL)


@pytest.mark.parametrize(("seeds", "configurations"), [(3, 16), (10, 8)])
def test_the_rates_are_those_of_a_simulation(seeds: int, configurations: int) -> None:
    random, reports, false = np.random.default_rng(seeds), 400, 0
    for _ in range(reports):
        many = random.standard_normal((configurations, seeds))
        pair = {"many": many[many.mean(axis=1).argmin()], "one": random.standard_normal(seeds)}
        found = compare({name: dict(enumerate(values.tolist())) for name, values in pair.items()}, mode="min")
        false += any(each.verdict in (BETTER, WORSE) for each in found.values())
    rate = RATES[seeds][configurations]
    assert false / reports == pytest.approx(rate, abs=3.5 * math.sqrt(rate * (1 - rate) / reports))


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (ONE, ""),
        (MANY, "Budget: equal, 4 configurations in 12 runs, 120 steps for each of lamb, adamw."),
        (UNEQUAL, "Budget: not equal. lamb: 8 configurations in 24 runs, 240 steps; adamw: 1 configuration in 3 runs"),
        (MORE, "Budget: not equal."),
    ],
)
def test_what_the_choice_cost_is_counted_from_metrics(grid: Grid, said: str, tmp_path: Path, make_run: MakeRun) -> None:
    findings = compared(grid, tmp_path, make_run)
    told = [note for note in notes(findings) if note.startswith("Budget:")]
    assert told == ([budget_line(findings)] if said else [])
    assert budget_line(findings).startswith(said)


def test_a_configuration_that_was_stopped_early_took_part_in_the_choice(tmp_path: Path, make_run: MakeRun) -> None:
    for name, stopped in (("adamw", 2e-3), ("lamb", 1e-3)):
        for lr in (1e-3, 2e-3):
            cut = {"status": "interrupted"} if lr == stopped else {}
            make_run(tmp_path / f"{name}{lr}", optimizer=name, lr=lr, max_steps=10, **cut)
    assert budget_line(find(load_runs([tmp_path]))).startswith("Budget: equal, 2 configurations, ")


def test_the_documentation_has_these_rates() -> None:
    text = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text()
    for seeds, rates in RATES.items():
        name = "many" if seeds == math.inf else f"{seeds}"
        assert f"| {name} | {' | '.join(f'{rate:.0%}' for rate in rates.values())} |" in text
