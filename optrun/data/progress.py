"""A progress bar of a long preparation of data, on terminals only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from optrun.data.heartbeat import beat

_PATIENCE = 1.0
"""Seconds that pass in silence."""


class Progress:
    """Counts finished work.

    Args:
        what: In a word.
        total: Of what `done` counts.
        bar: Shows it; None: nobody looks.
    """

    def __init__(self, what: str, total: int, bar: Bar | None) -> None:
        self._bar = bar
        self._begun = time.monotonic()
        self._task = None if bar is None else bar.add_task(what, total=total, tokens="")
        self._tokens = 0

    def done(self, amount: int, tokens: int = 0) -> None:
        """Add finished work, in units of `total`, and its tokens; give a sign of life."""
        beat()
        self._tokens += tokens
        if self._bar is None or self._task is None:
            return
        seconds = time.monotonic() - self._begun
        if not self._bar.live.is_started and seconds > _PATIENCE:
            self._bar.start()
        told = ""
        if self._tokens:
            rate = self._tokens / max(seconds, 1e-9)
            told = f"{self._tokens / 1e6:,.1f} million tokens, {rate:,.0f}/s"
        self._bar.update(self._task, advance=amount, tokens=told)


@contextmanager
def progress(what: str, total: int) -> Iterator[Progress]:
    """Show a bar while this lasts, if it lasts longer than a moment, on a terminal.

    Args:
        what: In a word.
        total: Of what `done` counts.
    """
    if not sys.stderr.isatty():
        yield Progress(what, total, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]}"),
    )
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    try:
        yield Progress(what, total, bar)
    finally:
        bar.stop()
