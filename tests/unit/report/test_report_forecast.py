"""What a sweep says beforehand that it will be able to see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optrun.report.collect import load_runs
from optrun.report.forecast import forecast, spread_of
from optrun.report.power import POWER, foreseen_over
from optrun.report.statistics import ALPHA
from optrun.report.workloads_statistics import compare_over_workloads, is_found
from tests.unit.report.conftest import write_run


def _grid(optimizers: int, seeds: int, lrs: int = 1) -> list[Mapping[str, Any]]:
    return [
        {"optimizer": {"name": f"o{i}", "beta": i}, "lr": lr, "seed": seed, "data": {"seed": seed}, "run_name": f"{i}"}
        for i, seed, lr in product(range(optimizers), range(seeds), range(lrs))
    ]


def test_contenders_and_seeds_are_counted_as_the_report_will() -> None:
    said = forecast(_grid(7, 5, lrs=3), ["optimizer=..."])
    assert said.startswith("7 contenders, 5 seeds: differences of 3.")
    assert "10 seeds: " in said
    assert "baseline" in said


def test_more_seeds_and_a_baseline_see_more() -> None:
    few, more, baseline = (float(part.split(" sd")[0].split()[-1]) for part in forecast(_grid(7, 3), []).split(";"))
    assert few > baseline > more > 1


def test_contenders_are_counted_within_each_workload() -> None:
    tasks = [{**config, "task": {"name": name}} for name in ("causal_lm", "masked_lm") for config in _grid(3, 5)]
    alone, both = forecast(tasks[: len(tasks) // 2], []), forecast(tasks, [])
    within, over = both.split("; over all of them: ")
    assert within == f"within each of 2 workloads: {alone}"
    assert over == f"{foreseen_over(2, 3, 5, ALPHA):.1f} sd, where they differ by as much in each"
    assert alone.startswith("3 contenders, 5 seeds")


@pytest.mark.parametrize(("workloads", "contenders", "seeds"), [(2, 3, 3), (5, 7, 3), (5, 2, 5), (3, 4, 5)])
def test_what_is_foreseen_over_workloads_is_found_in_four_of_five(workloads: int, contenders: int, seeds: int) -> None:
    gap = foreseen_over(workloads, contenders, seeds, ALPHA)
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        scores = {f"c{i}": random.normal(size=(workloads, seeds)) + gap * (i == 0) for i in range(contenders)}
        hits += is_found(compare_over_workloads(scores, "c0", named_beforehand=False)["c1"][1])
    assert POWER - 0.15 < hits / 200 < POWER + 0.15  # degrees of freedom are those of the mean, not of each table


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (_grid(1, 3), ""),
        (_grid(4, 1), ""),
        (_grid(4, 2), "4 contenders, 2 seeds: too few for a verdict, which takes 3"),
        (_grid(3, 3)[:-1], "3 contenders, 2 seeds: too few for a verdict, which takes 3"),
        ([{"lr": lr, "seed": seed} for lr in (1, 2) for seed in range(3)], "2 contenders, 3 seeds: "),
    ],
)
def test_small_and_uneven_sweeps(configs: list[Mapping[str, Any]], expected: str) -> None:
    said = forecast(configs, [])
    assert said == expected if not expected.endswith(": ") else said.startswith(expected)


def test_runs_that_are_there_put_it_in_the_unit_of_the_metric(tmp_path: Path) -> None:
    for number, (name, seed) in enumerate(product(("adamw", "lamb"), range(3))):
        write_run(tmp_path / f"{number}", optimizer=name, seed=seed, max_steps=20, final=3.0 + 0.1 * seed)
    spread = spread_of(load_runs([tmp_path]))
    assert spread is not None
    assert (spread.metric, spread.runs, spread.sd) == ("eval/loss", 6, pytest.approx(0.1))
    first = forecast(_grid(2, 3), [], spread).split(";")[0]
    told, unit = re.findall(r"of ([\d.]+) sd \(([\d.]+)\)", first)[0]
    assert float(unit) == pytest.approx(0.1 * float(told), rel=0.02)
    assert spread_of([]) is None
