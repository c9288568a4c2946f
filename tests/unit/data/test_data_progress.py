"""A bar shows what is true of a long preparation, of one long text as of many, and nothing of a
short one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from optrun.data import encoded, progress
from optrun.data.encoded import write_ids


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


def test_tokens_alone_start_the_bar_after_the_same_while(clock: list[float], bar: Bar) -> None:
    shown = progress.Progress("tokenising", 1000, bar)
    clock[0] += 0.5
    shown.tokens(200_000)
    shown.done(0)
    assert not bar.live.is_started
    clock[0] += 1.5
    shown.tokens(200_000)
    assert bar.live.is_started
    assert bar.tasks[0].fields["tokens"] == "0.4 million tokens, 200,000/s"


def test_a_part_of_what_is_not_done_yet_is_shown_and_counted_once(
    clock: list[float], bar: Bar
) -> None:
    shown = progress.Progress("tokenising", 1000, bar)
    shown.done(100)
    clock[0] += 2
    for part, share in ((300, 40), (600, 70)):
        shown.ahead(part)
        assert bar.live.is_started
        assert bar.tasks[0].percentage == pytest.approx(share)
    shown.done(900)
    assert bar.tasks[0].completed == 1000


def test_nobody_looks() -> None:
    shown = progress.Progress("tokenising", 10, None)
    shown.tokens(1)
    shown.ahead(1)
    shown.done(1)
    with progress.progress("tokenising", 10) as shown:
        shown.tokens(1)


class Long:
    """A text of 40 characters in pieces of 10, each of which takes two seconds."""

    characters = 40

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def pieces(self) -> Iterator[tuple[np.ndarray, int]]:
        yield np.zeros(1), 0
        for characters in (10, 20, 30, 40):
            self.clock[0] += 2
            yield np.zeros(5), characters


def test_one_long_text_moves_the_bar_piece_by_piece(
    clock: list[float], bar: Bar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    class Watched(progress.Progress):
        def _show(self, **values: Any) -> None:
            super()._show(**values)
            if "completed" in values:
                seen.append(bar.tasks[0].percentage)

    made: list[Watched] = []

    class Opened:
        def __init__(self, what: str, total: int) -> None:
            made.append(Watched(what, total, bar))

        def __enter__(self) -> Watched:
            return made[0]

        def __exit__(self, *_: object) -> None:
            assert bar.live.is_started

    monkeypatch.setattr(encoded, "progress", Opened)
    write_ids(
        iter(["x" * 40]), lambda *_: {"input_ids": [Long(clock)]}, None, tmp_path, "int32", 40
    )
    assert seen == [0, 25, 50, 75, 100, 100]
    assert made[0]._tokens == 21
