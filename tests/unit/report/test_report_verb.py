"""What `optrun report` does not do is refused by name, with what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import optrun


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("--watch", "optuna-dashboard"),
        ("watch=true", "optuna-dashboard"),
        ("port=8000", "optuna-dashboard"),
        ("objectives=eval/loss,perf/tokens_per_second", "report.csv"),
    ],
)
def test_what_went_is_refused_by_name(
    word: str, instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun("report", str(tmp_path), word) == 2
    said = capsys.readouterr().err
    assert word.lstrip("-").partition("=")[0] in said
    assert instead in said
