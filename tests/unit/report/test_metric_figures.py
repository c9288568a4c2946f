"""Lines of seeds: how they end is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from optrun.report.findings import analyse_runs
from optrun.report.metric_figures import choose_axis, draw_seed_lines, seed_lines
from optrun.report.runs import load_runs


def test_the_untrained_value_does_not_squeeze_how_few_evaluations_end(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for number, optimizer in enumerate(("adamw", "lamb", "adamax")):
        run = make_run(
            tmp_path / optimizer,
            optimizer=optimizer,
            final=2.5 + number / 100,
            max_steps=40,
            eval_every=10,
        )
        lines = [
            line
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if '"step": 0' not in line
        ]
        before = json.dumps({"step": 0, "epoch": 0.0, "time": 0.0, "eval/loss": 9.0})
        (run / "metrics.jsonl").write_text("\n".join([before, *lines]) + "\n")
    rows = analyse_runs(load_runs([tmp_path])).contenders
    lines = seed_lines(rows, "eval/loss", "step")
    (ax,) = draw_seed_lines(lines, "eval/loss", "min", "step").axes
    low, high = ax.get_ylim()
    assert low < 2.5
    assert 2.52 < high < 4.0


def test_the_axis_is_the_data_seen_where_a_global_batch_makes_steps_unequal(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for batch, steps in ((32, 40), (64, 20)):
        whole = {"training.global_batch_size": batch}
        make_run(tmp_path / f"{batch}", max_steps=steps, eval_every=10, config=whole)
    rows = analyse_runs(load_runs([tmp_path]), by=["training.global_batch_size"]).contenders
    assert choose_axis(rows) == "epoch"
    assert {run.samples for row in rows for run in row.configuration.runs} == {1280}
