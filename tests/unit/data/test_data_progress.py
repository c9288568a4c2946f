"""A bar shows what is true of a long preparation, on terminals only."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from optrun.data import progress


def test_a_bar_shows_share_and_tokens() -> None:
    with Bar(console=Console(file=io.StringIO(), force_terminal=True, width=120)) as bar:
        shown = progress.Progress("tokenising", 1000, bar)
        shown.done(100, tokens=200_000)
        shown.done(300, tokens=200_000)
        assert bar.tasks[0].percentage == pytest.approx(40)
        assert bar.tasks[0].fields["tokens"] == "0.4 million tokens"


def test_nothing_is_written_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("tokenising", 10) as shown:
        shown.done(1, tokens=1)
    assert capsys.readouterr().err == ""
