"""The front of a comparison with several objectives."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optrun.artifacts.objective import Objective
from optrun.base.errors import ConfigError
from optrun.report.build import report
from optrun.report.pareto import on_front, points

WEIGHED = [Objective("eval/loss", "min"), Objective("perf/tokens_per_second", "max")]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12))
def test_the_front_is_what_nothing_dominates(rows: list[tuple[int, ...]]) -> None:
    costs = np.array(rows, dtype=float)
    expected = [
        not any(
            all(a <= b for a, b in zip(other, row, strict=True)) and other != row for other in rows
        )
        for row in rows
    ]
    assert on_front(costs).tolist() == expected


def sweep(folder: Path, make_run: Callable[..., Path]) -> Path:
    """AdamW is faster and worse than LAMB, here; SGD is neither faster nor better."""
    for optimizer, final in (("adamw", 3.0), ("lamb", 2.0), ("sgd", 3.5)):
        for seed in (0, 1):
            make_run(
                folder / f"{optimizer}-{seed}",
                optimizer=optimizer,
                seed=seed,
                final=final + 0.1 * seed,
            )
    return folder


def test_a_report_names_and_draws_the_front(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    made = report([sweep(tmp_path, make_run)], objectives=WEIGHED)
    found = points(made.findings)
    assert [(each.contender, each.front, each.seeds) for each in found] == [
        ("lamb", True, 2),
        ("adamw", True, 2),
        ("sgd", False, 2),
    ]
    assert [each.values[0] for each in found] == pytest.approx([2.05, 3.05, 3.55], abs=0.06)
    page, data = (tmp_path / "report.md").read_text(), (tmp_path / "report-pareto.csv").read_text()
    assert "Pareto front" in page
    assert "2 of 3 configurations" in page
    assert sorted(
        row["what"].endswith("(on the front)") for row in csv.DictReader(data.splitlines())
    ) == [
        False,
        True,
        True,
    ]
    assert "objectives=eval/loss:min,perf/tokens_per_second:max" in page, (
        "the command that makes it again"
    )


def test_a_sweep_says_what_it_weighed(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    sweep(tmp_path, make_run)
    assert not report([tmp_path]).findings.objectives
    weighed = [{"name": each.name, "mode": each.mode} for each in WEIGHED]
    (tmp_path / "sweep.json").write_text(json.dumps({"tuned": [], "objectives": weighed}))
    assert report([tmp_path]).findings.objectives == WEIGHED


def test_a_number_that_no_run_has_is_refused_by_name(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    with pytest.raises(
        ConfigError, match=r"objectives=perf/tokens_per_secnd.*perf/tokens_per_second"
    ):
        report(
            [sweep(tmp_path, make_run)],
            objectives=[WEIGHED[0], Objective("perf/tokens_per_secnd", "max")],
        )


def test_a_sweep_whose_runs_have_no_such_number_is_told(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    sweep(tmp_path, make_run)
    weighed = [{"name": "eval/loss", "mode": "min"}, {"name": "eval/none", "mode": "max"}]
    (tmp_path / "sweep.json").write_text(json.dumps({"tuned": [], "objectives": weighed}))
    report([tmp_path])
    assert "No finished run has all of eval/loss, eval/none" in (tmp_path / "report.md").read_text()
