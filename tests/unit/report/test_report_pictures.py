"""The pictures of a comparison.

They show what was computed, and one bad contender does not squeeze the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optrun.report.differences import LINES, differences, draw_differences
from optrun.report.figures import pictures
from optrun.report.findings import analyse_runs
from optrun.report.picture import Picture, find_reach
from optrun.report.runs import load_runs
from optrun.report.theme import SERIES, to_png
from tests.unit.report.conftest import BEST_LR

MakeRun = Callable[..., Path]


def _found(**contenders: Sequence[float]) -> list[Any]:
    """Differences to the first contender, with intervals of +-0.01."""
    names, best = list(contenders), next(iter(contenders.values()))
    comparisons = {}
    for name, scores in contenders.items():
        mean = sum(a - b for a, b in zip(scores, best, strict=True)) / len(best)
        low, high = (math.nan, math.nan) if scores is best else (mean - 0.01, mean + 0.01)
        verdict = "ruled out" if mean > 0.01 else "could be the best"
        comparisons[name] = SimpleNamespace(
            name=name,
            reference=names[0],
            difference=mean,
            low=low,
            high=high,
            verdict=verdict,
            seeds=len(best),
        )
    scores_of = {name: dict(enumerate(scores)) for name, scores in contenders.items()}
    return differences(comparisons, scores_of, {names[-1]: {0}})


def _drawn(found: list[Picture]) -> dict[str, Picture]:
    return {one.name: one for one in found}


def test_differences_are_drawn_as_they_were_computed() -> None:
    found = _found(lamb=[2.5, 2.6], adamw=[2.52, 2.61], sgd=[2.56, 2.66])
    (ax,) = draw_differences(found, "eval/loss", "min", 0.02).axes
    dots = [line for line in ax.get_lines() if line.get_markersize() == 7.5]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [
        0.0,
        pytest.approx(0.015),
        pytest.approx(0.06),
    ]
    assert [float(dot.get_ydata()[0]) for dot in dots] == [0, -1, -2]
    seeds = [line for line in ax.get_lines() if line.get_alpha() == 0.8]
    assert [(float(seed.get_xdata()[0]), seed.get_marker()) for seed in seeds] == [
        (pytest.approx(0.02), "o"),
        (pytest.approx(0.01), "o"),
        (pytest.approx(0.06), "x"),
        (pytest.approx(0.06), "o"),
    ]
    bars = [tuple(line.get_xdata()) for line in ax.get_lines() if line.get_linewidth() == 5]
    assert bars == [pytest.approx((0.005, 0.025)), pytest.approx((0.05, 0.07))]
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert (band.x0, band.x1) == (pytest.approx(-0.02), pytest.approx(0.02))


def test_one_bad_contender_stands_at_the_border_with_its_value() -> None:
    close = _found(lamb=[2.5, 2.6], adamw=[2.52, 2.61], lion=[2.51, 2.63])
    with_bad = _found(lamb=[2.5, 2.6], adamw=[2.52, 2.61], lion=[2.51, 2.63], sgd=[3.1, 3.2])
    limits = [draw_differences(found, "eval/loss", "min", math.nan) for found in (close, with_bad)]
    narrow, same = (figure.axes[0].get_xlim() for figure in limits)
    assert same == pytest.approx(narrow)
    words = [text.get_text() for text in limits[1].axes[0].texts]
    assert "+0.6" in words


def test_of_two_contenders_both_are_inside() -> None:
    figure = draw_differences(_found(lamb=[2.5, 2.6], sgd=[3.1, 3.2]), "eval/loss", "min", 0.001)
    assert figure.axes[0].get_xlim()[1] > 0.6


def test_the_nearer_half_is_always_inside() -> None:
    assert find_reach([0.0, 0.001, 0.5, 0.6]) == 0.001, "two of four"
    assert find_reach([0.0, 0.5, 0.6, 0.7]) == 0.7
    assert find_reach([0.0, 0.3]) == 0.3
    assert find_reach([0.0, 0.01, math.inf, math.nan]) == 0.01
    assert find_reach([]) == 0.0
    assert find_reach([0.0, 0.0, 0.0, 0.5, 0.6, 9.0]) == 0.6, "0 has no multiple"
    assert find_reach([0.0, 0.0, 0.0]) == 0.0


def test_more_contenders_than_lines() -> None:
    found = _found(**{f"c{number}": [2.5 + number / 100] for number in range(LINES + 6)})
    assert len(found) == LINES
    draw_differences(found, "eval/loss", "min", math.nan)


def test_a_bad_contender_is_named_above_curves_and_basins(
    tmp_path: Path, make_run: MakeRun
) -> None:
    number = 0
    for optimizer, floor in {"adamw": 2.5, "lamb": 2.52, "adamax": 2.54, "sgd": 4.5}.items():
        for lr in (1e-3, 2e-3):
            make_run(
                tmp_path / str(number),
                optimizer=optimizer,
                lr=lr,
                floor=floor,
                max_steps=40,
                eval_every=10,
            )
            number += 1
    found = analyse_runs(load_runs([tmp_path]))
    assert found.contenders[-1].name == "sgd"
    for name in ("metric", "lr"):
        (ax,) = _drawn(pictures(found))[name].draw().axes
        assert ax.get_ylim()[1] < 4.0, name
        assert any(text.get_text().startswith("↑ sgd ") for text in ax.texts), name


def test_every_seed_has_a_line_in_the_colour_of_its_contender(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for number in range(8):
        optimizer = ("adamw", "lamb", "adamax", "lion")[number % 4]
        make_run(
            tmp_path / str(number),
            optimizer=optimizer,
            seed=number // 4,
            max_steps=40,
            eval_every=10,
        )
    picture = _drawn(pictures(analyse_runs(load_runs([tmp_path]))))["metric"]
    (ax,) = picture.draw().axes
    colours = [line.get_color() for line in ax.get_lines()]
    assert colours == [SERIES[at // 2] for at in range(8)]
    (box,) = picture.draw().legends
    assert len(box.get_texts()) == 4


def test_equal_scores_are_drawn(tmp_path: Path, make_run: MakeRun) -> None:
    """No axis is without extent; warnings are errors."""
    for number in range(4):
        optimizer, lr = ("adamw", "lamb")[number % 2], 1e-3 * (1 + number // 2)
        make_run(
            tmp_path / str(number),
            optimizer=optimizer,
            lr=lr,
            max_steps=20,
            final=2.0,
            log_every=20,
            eval_every=10,
        )
    drawn = _drawn(pictures(analyse_runs(load_runs([tmp_path]))))
    for name in ("differences", "lr", "metric"):
        assert to_png(drawn[name].draw()).startswith(b"\x89PNG")


def test_what_diverged_stands_on_the_edge_alone(tmp_path: Path, make_run: MakeRun) -> None:
    """Each contender has its entry in the legend, in order, whatever became of its runs."""
    for number, optimizer in enumerate(("adamw", "sgd", "lamb")):
        for place, lr in enumerate((1e-3, 2e-3)):
            lost = {"diverge_at": 5} if optimizer == "sgd" or place else {}
            make_run(
                tmp_path / f"{number}{place}",
                optimizer=optimizer,
                lr=lr,
                max_steps=20,
                log_every=10,
                **lost,
            )
    found = analyse_runs(load_runs([tmp_path]))
    figure = _drawn(pictures(found))["lr"].draw()
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert sorted(float(line.get_xdata()[0]) for line in crosses) == [1e-3, 2e-3, 2e-3, 2e-3]
    (box,) = figure.legends
    names = [text.get_text().split()[0] for text in box.get_texts()]
    assert names == [row.name for row in found.contenders]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_worse_side_is_cut(tmp_path: Path, make_run: MakeRun, mode: str) -> None:
    metric = {"min": "eval/loss", "max": "eval/accuracy"}[mode]
    for number in range(8):
        optimizer = ("adamw", "lamb", "adamax", "sgd")[number % 4]
        floor = {"sgd": 3.4}.get(optimizer, 2.5 + 0.01 * (number % 4))
        make_run(
            tmp_path / str(number),
            optimizer=optimizer,
            floor=floor,
            seed=number // 4,
            max_steps=40,
            accuracy=True,
            lr=BEST_LR[optimizer],
            summary={"main_metric": {"name": metric, "mode": mode}},
        )
    found = analyse_runs(load_runs([tmp_path]))
    assert found.contenders[-1].name == "sgd"
    drawn = _drawn(pictures(found))
    (ax,) = drawn["metric"].draw().axes
    assert any(text.get_text().startswith(("↑ sgd", "↓ sgd")[mode == "max"]) for text in ax.texts)
    (ax,) = drawn["differences"].draw().axes
    left, right = ax.get_xlim()
    assert (right < 0.4) if mode == "min" else (left > -0.1)
    marker = {"min": ">", "max": "<"}[mode]
    assert [line.get_marker() for line in ax.get_lines()].count(marker) == 1
