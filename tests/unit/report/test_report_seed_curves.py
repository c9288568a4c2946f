"""Curves over seeds: nobody is left out of the picture against time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.report.collect import load_runs
from optrun.report.findings import find
from optrun.report.seed_curves import draw_seed_curves, seed_curves
from optrun.report.theme import LIGHT


def test_a_seed_that_was_slowed_down_leaves_its_contender_in_the_picture(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    """One seed took twenty times as long: it was at its first evaluation when the other two had ended."""
    for seed, slow in ((0, 1.0), (1, 1.0), (2, 20.0)):
        run = make_run(tmp_path / str(seed), seed=seed, max_steps=40, eval_every=10)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        start = lines[0]["time"]
        for line in lines:
            line["time"] = start + slow * (line["time"] - start)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = find(load_runs([tmp_path])).rows
    (by_step,), (by_time,) = (seed_curves(rows, "eval/loss", axis) for axis in ("step", "time"))
    assert by_time.mean.tolist() == by_step.mean.tolist()
    assert by_time.x == pytest.approx(rows[0].arm.runs[0].elapsed(by_step.x)), "the median: two seeds were as quick"


def test_the_untrained_value_does_not_squeeze_how_few_evaluations_end(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for number, optimizer in enumerate(("adamw", "lamb", "adamax")):
        run = make_run(tmp_path / optimizer, optimizer=optimizer, final=2.5 + number / 100, max_steps=40, eval_every=10)
        lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line]
        before = json.dumps({"step": 0, "epoch": 0.0, "time": 0.0, "eval/loss": 9.0})
        (run / "metrics.jsonl").write_text("\n".join([before, *lines]) + "\n")
    rows = find(load_runs([tmp_path])).rows
    (ax,) = draw_seed_curves(seed_curves(rows, "eval/loss", "step"), "eval/loss", "min", "step", LIGHT).axes
    low, high = ax.get_ylim()
    assert low < 2.5
    assert 2.52 < high < 4.0
