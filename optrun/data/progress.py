"""A progress bar of a long preparation of data, on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from optrun.data.heartbeat import send_heartbeat


class Progress:
    """Counts finished work.

    Args:
        description: What is done, in a word.
        total: How much there is to do, in units of the caller.
        bar: The bar to show it on.
    """

    def __init__(self, description: str, total: int, bar: Bar) -> None:
        self._bar = bar
        self._task = bar.add_task(description, total=total, tokens="")
        self._tokens = 0

    def done(self, amount: int, tokens: int = 0) -> None:
        """Add finished work, in units of `total`, and its tokens; send a heartbeat."""
        send_heartbeat()
        self._tokens += tokens
        token_count = f"{self._tokens / 1e6:,.1f} million tokens" if self._tokens else ""
        self._bar.update(self._task, advance=amount, tokens=token_count)


@contextmanager
def progress(description: str, total: int) -> Iterator[Progress]:
    """Show a bar inside this context if stderr is a terminal; it is erased at the end.

    Args:
        description: What is done, in a word.
        total: How much there is to do, in units of the caller.
    """
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield Progress(description, total, bar)
