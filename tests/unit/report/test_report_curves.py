from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from optrun.config import registry
from optrun.config.schema.metric import MetricConfig
from optrun.report.curves import curves_figure, draw_curves, run_title, smooth
from optrun.report.findings import choose_metric
from optrun.report.runs import load_run, load_runs


def _look(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.std() > 5, "the picture is blank"
    return pixels


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 300, "summary": {"resumes": [{"from_step": 100}]}},
        {"max_steps": 2, "log_every": 1, "eval_every": 1},
        {"max_steps": 100, "diverge_at": 1, "accuracy": True},
        {"max_steps": 100, "diverge_at": 60},
        {"max_steps": 50, "eval_every": 1000, "global_step": 20},
        {"max_steps": 50, "lr": 1e-9, "accuracy": True},
        {"max_steps": 50, "config": {"model.name": "$x_{$", "optimizer.name": "\\frac 學習"}},
    ],
    ids=[
        "resumed",
        "two-points",
        "never-finite",
        "diverged",
        "no-evaluation",
        "tiny-lr",
        "hostile-names",
    ],
)
def test_a_picture_comes_of_every_kind_of_run(
    tmp_path: Path, make_run: Callable[..., Path], options: dict[str, object]
) -> None:
    path = draw_curves(make_run(tmp_path / "run", **options))
    assert path.name == "curves.png"
    height, width = _look(path).shape
    assert (width, height) == (1600, 1024)
    assert not [entry for entry in path.parent.iterdir() if entry.name.endswith(".tmp")]


def test_metrics_alone_are_enough_and_none_at_all_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "tra')
    _look(draw_curves(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("")
    _look(draw_curves(tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        draw_curves(tmp_path)


@pytest.mark.parametrize(("before", "rings"), [(9.0, 1), (2.0, 0)])
def test_the_best_is_ringed_unless_the_untrained_model_was_better(
    tmp_path: Path, make_run: Callable[..., Path], before: float, rings: int
) -> None:
    figure = curves_figure(load_run(make_run(tmp_path / "run", final=2.5, before=before)))
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert sum(str(label).startswith("best ") for label in labels) == rings


def test_many_learning_rates_over_decades(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(40):
            rates = {
                f"lr/layer_{layer:02d}": 1e-3 * 0.5**layer * (1 - step / 40) for layer in range(14)
            }
            file.write(json.dumps({"step": step, "train/loss": 3 - step / 40, **rates}) + "\n")
    _look(draw_curves(tmp_path))


def test_smoothing_keeps_straight_lines_and_gaps() -> None:
    line = np.linspace(9.0, 1.0, 50)
    assert smooth(line, 3.0) == pytest.approx(line)
    line[10] = math.nan
    line[30] = math.inf
    smoothed = smooth(line, 3.0)
    kept = np.isfinite(line)
    assert smoothed[kept] == pytest.approx(line[kept])
    assert np.isnan(smoothed[~kept]).all()
    assert smooth(np.full(5, math.nan), 2.0).shape == (5,)


def test_smoothing_takes_noise_away_without_lag() -> None:
    noise = np.random.default_rng(0).standard_normal(400)
    curve = np.exp(-np.arange(400) / 80)
    smoothed = smooth(curve + 0.1 * noise, 7.0)
    assert np.sqrt(np.mean((smoothed - curve) ** 2)) < 0.035


def test_a_registered_metric_says_which_direction_is_better(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    log = make_run(tmp_path / "run") / "metrics.jsonl"
    log.write_text(log.read_text().replace("eval/loss", "eval/wer"))

    @dataclass(kw_only=True)
    class Wer(MetricConfig):
        MODE = "min"

    runs = load_runs([tmp_path])
    assert choose_metric(runs, "eval/wer") == ("eval/wer", "max"), "nothing is known of it"
    with registry.origin("a test"):
        registry.register_metric("wer", schema=Wer)(lambda predictions, references: 0.0)
        assert choose_metric(runs, "eval/wer") == ("eval/wer", "min")
        registry.remove("a test")


def test_one_point_is_no_curve_and_a_title_names_model_and_file(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    """With training.eval_steps=null the only evaluation is the last."""
    config = {"model.path": "/models/MiniLM/", "data.train": "data/reviews.csv"}
    folder = make_run(tmp_path / "run", max_steps=20, log_every=5, config=config)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = [
        {key: value for key, value in record.items() if not key.startswith("eval/")}
        for record in records
    ]
    kept[-1]["eval/accuracy"] = 0.9
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))
    run = load_run(folder)
    assert run_title(run).startswith("MiniLM on reviews.csv")
    titles = [ax.get_title(loc="left") for ax in curves_figure(run).axes]
    assert "Loss" in titles
    assert "Evaluation" not in titles
