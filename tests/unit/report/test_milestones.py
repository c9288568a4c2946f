"""Steps and seconds to a target, with runs that never reach it.

The best of fewer configurations.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optrun.base.errors import ConfigError
from optrun.cli.dispatch import dispatch
from optrun.report.arms import Contender, time_to_target
from optrun.report.collect import load_runs
from optrun.report.findings import Findings, find
from optrun.report.statistics import censored_median, expected_best
from optrun.report.tables import ranking_table

MakeRun = Callable[..., Path]
NEVER = math.inf


@pytest.mark.parametrize(
    ("times", "happened", "median"),
    [
        ([3, 1, 2], [1, 1, 1], 2),
        ([1, 2, 3, 4], [1, 1, 1, 1], 2.5),
        ([1, 2, 3, NEVER, NEVER], [1, 1, 1, 0, 0], 3),
        ([1, 2, NEVER, NEVER], [1, 1, 0, 0], NEVER),
        ([1, NEVER, NEVER], [1, 0, 0], NEVER),
        ([NEVER], [0], NEVER),
        # cut at 5, which says nothing of what follows: S is 3/4 after 2, 3/4 * 1/2 after 6
        ([2, 5, 6, 9], [1, 0, 1, 1], 6),
        ([0, 4], [0, 1], 4),
        # Freireich et al. 1963, 6-MP in remission of leukaemia, the example of every textbook: 23
        # weeks
        (
            [6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35],
            [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0],
            23,
        ),
    ],
)
def test_the_median_of_what_is_partly_unknown(
    times: list[float], happened: list[int], median: float
) -> None:
    assert censored_median(np.array(times, dtype=float), np.array(happened, dtype=bool)) == median


def test_a_time_that_was_not_logged_is_not_made_up() -> None:
    assert math.isnan(censored_median(np.array([1.0, math.nan]), np.array([True, True])))


def _seeds(folder: Path, make_run: MakeRun, finals: list[float]) -> None:
    for seed, final in enumerate(finals):
        name = folder.name
        make_run(
            folder / f"{name}{seed}",
            optimizer=name,
            seed=seed,
            max_steps=40,
            eval_every=10,
            final=final,
        )


def _reached(found: Findings, row: Contender) -> tuple[int, int, float, float]:
    """Runs that reached the target, all that were begun, and the medians of steps and seconds
    to it.
    """
    told = time_to_target(row.arm, found.metric, found.mode, found.target)
    return told.reached, told.runs, told.steps, told.seconds


def test_runs_that_never_reach_the_target_are_not_dropped(
    tmp_path: Path, make_run: MakeRun
) -> None:
    _seeds(tmp_path / "adamw", make_run, [2.0, 2.0, 2.0, 2.6, 2.6])
    _seeds(tmp_path / "lamb", make_run, [2.0, 2.0, 2.6, 2.6, 2.6])
    found = find(load_runs([tmp_path]), target=2.01)
    assert [_reached(found, row) for row in found.rows] == [(3, 5, 40, 0.4), (2, 5, NEVER, NEVER)]
    cells = [
        row[ranking_table(found).columns.index("steps to ≤ 2.0100")]
        for row in ranking_table(found).rows
    ]
    assert cells == ["40 in 0.40 s (3 of 5)", "never (2 of 5)"]


def test_one_that_diverged_never_gets_there_and_one_that_runs_may(
    tmp_path: Path, make_run: MakeRun
) -> None:
    _seeds(tmp_path / "adamw", make_run, [2.0])
    make_run(tmp_path / "d1", seed=1, max_steps=40, eval_every=10, diverge_at=15)
    make_run(tmp_path / "r2", seed=2, max_steps=40, eval_every=10, global_step=20, status="running")
    found = find(load_runs([tmp_path]), target=2.01)
    assert _reached(found, found.rows[0])[:3] == (1, 3, NEVER)
    make_run(tmp_path / "f3", seed=3, max_steps=40, eval_every=10, final=2.0)
    found = find(load_runs([tmp_path]), target=2.01)
    told = "cut at 20, the running one says nothing of later: of the other three two are there"
    assert _reached(found, found.rows[0])[2] == 40, told


def test_what_was_reached_counts_whatever_came_after(tmp_path: Path, make_run: MakeRun) -> None:
    path = make_run(tmp_path / "run", max_steps=40, status="interrupted")
    lines = [(10, 5.0, 3.0), (20, 9.0, 2.0), (30, 14.0, "NaN")]
    text = "".join(
        json.dumps({"step": s, "time": t, "eval/loss": value}) + "\n" for s, t, value in lines
    )
    (path / "metrics.jsonl").write_text(text)
    found = find(load_runs([tmp_path]), target=2.0)
    assert _reached(found, found.rows[0]) == (1, 1, 20, 9)


def test_a_target_that_nobody_set_is_not_counted_to(tmp_path: Path, make_run: MakeRun) -> None:
    _seeds(tmp_path / "adamw", make_run, [2.0, 2.1, 2.2, 2.3])
    findings = find(load_runs([tmp_path]))
    assert math.isnan(findings.target)
    assert not any("steps to" in name for name in ranking_table(findings).columns)


def test_a_level_that_the_untrained_model_had_reached_takes_no_step(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for seed in range(3):
        make_run(tmp_path / f"a{seed}", seed=seed, max_steps=40, final=9.6 + seed / 10, before=9.5)
    found = find(load_runs([tmp_path]), target=9.55)
    assert _reached(found, found.rows[0])[:3] == (3, 3, 0), "before the first step"


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_best_of_fewer_configurations_is_that_of_all_draws(mode: str, number: int) -> None:
    draws = itertools.product([1.0, 2.0, 3.0], repeat=number)
    best = [min(draw) if mode == "min" else max(draw) for draw in draws]
    assert expected_best([3.0, 1.0, 2.0], number, mode) == pytest.approx(sum(best) / len(best))
    assert math.isnan(expected_best([1.0], 2, mode))


@pytest.mark.parametrize("level", ["low", "nan", "inf", "1e999"])
def test_a_target_is_a_number(level: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target=.*expected a number.*target=4\.5"):
        dispatch(["report", str(tmp_path), f"target={level}"])
    with pytest.raises(ConfigError, match="target=: a value is missing"):
        dispatch(["report", str(tmp_path), "target="])
