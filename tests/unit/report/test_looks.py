"""A growing set of seeds.

Each number of seeds that was asked is a look, and the m-th is judged at alpha / m.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.report import build
from optrun.report.build import report
from optrun.report.sweep_folder import LOOKS as RECORD

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])


def seeds(folder: Path, make_run: MakeRun, numbers: range) -> None:
    for name in ("adamw", "lamb"):
        for seed in numbers:
            make_run(
                folder / f"{name}{seed}",
                optimizer=name,
                seed=seed,
                lr=1e-3,
                max_steps=20,
                accuracy=True,
            )


def test_seeds_that_are_added_until_a_verdict_shows_are_counted(
    tmp_path: Path, make_run: MakeRun
) -> None:
    alphas = []
    for first, last in ((0, 2), (2, 3), (3, 4), (4, 5), (5, 6)):
        seeds(tmp_path, make_run, range(first, last))
        for _ in range(2):  # asked again of the same seeds, it is the same look
            made = report([tmp_path])
        assert made.comparison.ttest is not None
        alphas.append(made.comparison.ttest.alpha)
    assert alphas == pytest.approx([0.05, 0.05, 0.025, 0.05 / 3, 0.05 / 4]), (
        "two seeds are not tested"
    )
    assert "Look 4 at a growing set of seeds" in made.verdict.text
    assert json.loads((tmp_path / RECORD).read_text()) == {"eval/loss": [3, 4, 5, 6]}


def test_each_metric_has_its_own_looks_and_a_torn_record_is_none(
    tmp_path: Path, make_run: MakeRun
) -> None:
    seeds(tmp_path, make_run, range(3))
    report([tmp_path])
    assert report([tmp_path], metric="eval/accuracy").comparison.ttest.alpha == 0.05  # type: ignore[union-attr]
    for torn in ("{", "[]", '{"eval/loss": 5}', '{"eval/loss": ["x", true, 1]}'):
        (tmp_path / RECORD).write_text(torn)
        assert report([tmp_path]).comparison.ttest is not None


def test_where_nothing_can_be_written_the_report_is_made(tmp_path: Path, make_run: MakeRun) -> None:
    seeds(tmp_path / "runs", make_run, range(3))
    (tmp_path / "runs" / RECORD).mkdir()
    assert report([tmp_path / "runs"], out=tmp_path / "out").verdict.kind == "compared"
