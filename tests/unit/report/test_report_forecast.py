"""What a sweep says beforehand that it will be able to see."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from optrun.report.forecast import by_workload, forecast
from optrun.report.statistics import foreseen


def _grid(optimizers: int, seeds: int, lrs: int = 1) -> list[Mapping[str, Any]]:
    return [
        {
            "optimizer": {"name": f"o{i}", "beta": i},
            "lr": lr,
            "seed": seed,
            "data": {"seed": seed},
            "run_name": f"{i}",
        }
        for i, seed, lr in product(range(optimizers), range(seeds), range(lrs))
    ]


def test_contenders_and_seeds_are_counted_as_the_report_will() -> None:
    said = forecast(_grid(7, 5, lrs=3))
    assert said.startswith(
        f"7 contenders, 5 seeds: a difference of {foreseen(7, 5):.1f} sd is found in 4 of 5 cases; "
    )
    assert f"10 seeds: {foreseen(7, 10):.1f} sd" in said


def test_contenders_are_counted_within_each_workload() -> None:
    tasks = [
        {**config, "task": {"name": name}}
        for name in ("causal_lm", "masked_lm")
        for config in _grid(3, 5)
    ]
    alone, both = forecast(tasks[: len(tasks) // 2]), forecast(tasks)
    assert both == f"within each of 2 workloads: {alone}"
    assert alone.startswith("3 contenders, 5 seeds")
    assert (len(by_workload(tasks)), len(by_workload(_grid(3, 5)))) == (2, 1)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (_grid(1, 3), ""),
        (_grid(4, 1), ""),
        (_grid(4, 2), "4 contenders, 2 seeds: nothing is tested; 3 seeds: "),
        (_grid(3, 3)[:-1], "3 contenders, 2 seeds: nothing is tested; 3 seeds: "),
        (
            [{"lr": lr, "seed": seed} for lr in (1, 2) for seed in range(3)],
            "2 contenders, 3 seeds: ",
        ),
    ],
)
def test_small_and_uneven_sweeps(configs: list[Mapping[str, Any]], expected: str) -> None:
    said = forecast(configs)
    assert said.startswith(expected)
    assert bool(said) == bool(expected)


def test_what_is_tuned_makes_no_contenders() -> None:
    configs = [
        {
            "optimizer": {"name": name},
            "scheduler": {"name": "cosine", "warmup_ratio": ratio},
            "seed": seed,
        }
        for name, ratios in {"adamw": (0.0, 0.1), "lamb": (0.0, 0.2)}.items()
        for ratio in ratios
        for seed in range(3)
    ]
    assert forecast(configs).startswith("4 contenders, 3 seeds")
    assert forecast(configs, ["scheduler.warmup_ratio"]).startswith("2 contenders, 3 seeds")
