"""A bar shows what is true of a long preparation, and nothing of a short one."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from optrun.data import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def bar() -> Iterator[Bar]:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    made = Bar(console=console, auto_refresh=False, get_time=lambda: progress.time.monotonic())
    yield made
    made.stop()


def test_a_bar_begins_after_a_while(clock: list[float], bar: Bar) -> None:
    shown = progress.Progress("tokenising", 1000, bar)
    clock[0] += 0.5
    shown.done(100, tokens=200_000)
    assert not bar.live.is_started
    clock[0] += 1.5
    shown.done(300, tokens=200_000)
    assert bar.live.is_started
    assert bar.tasks[0].percentage == pytest.approx(40)
    assert bar.tasks[0].fields["tokens"] == "0.4 million tokens, 200,000/s"


def test_nobody_looks() -> None:
    with progress.progress("tokenising", 10) as shown:
        shown.done(1, tokens=1)
