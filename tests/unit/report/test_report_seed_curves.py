"""Curves over seeds: nobody is left out of the picture against time, and nobody is hidden below another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optrun.report.collect import load_runs
from optrun.report.findings import find
from optrun.report.overlap import lines_above, wider
from optrun.report.seed_curves import seed_curves


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


def test_a_line_below_others_is_wider() -> None:
    x = np.linspace(0.0, 1.0, 20)
    falling, noise = 3 - x, 1e-3 * np.sin(40 * x)
    lines = [(x, falling), (x, falling + noise), (x, falling + 0.2), (x[::2], falling[::2] - noise[::2])]
    assert lines_above(lines) == [2, 1, 0, 0]
    assert lines_above([(x, falling)] * 9)[0] == 3, "and no bar"
    assert lines_above([(x[:2], x[:2]), (x[5:], x[5:]), (x[:0], x[:0])]) == [0, 0, 0]
    assert wider({"linewidth": 1.0, "markersize": 4.0, "marker": "o"}, 0)["linewidth"] == 1.0
    assert wider({"linewidth": 1.0, "markersize": 4.0}, 2)["markersize"] == 8.0
