"""Heartbeats and messages of long work on data, for the code that watches this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optrun.base.errors import printable

_EVERY_SECONDS = 0.5


def _to_terminal(text: str) -> None:
    sys.stderr.write(f"optrun: {printable(text)}\n")


_beat: Callable[[], object] | None = None
_note: Callable[[str], object] = _to_terminal
_next = 0.0


@contextmanager
def receive_heartbeats(beat: Callable[[], object], note: Callable[[str], object]) -> Iterator[None]:
    """Receive the heartbeats and messages of this process inside this context.

    A heartbeat shows a watching process that work on data goes on. Do not fork worker processes
    inside of the context: they would call the same functions.

    Args:
        beat: Called at most twice a second, by any thread.
        note: Called with a line for the user.
    """
    global _beat, _note, _next
    beat_before = _beat
    note_before = _note
    _beat = beat
    _note = note
    _next = 0.0
    try:
        yield
    finally:
        _beat = beat_before
        _note = note_before


def send_heartbeat() -> None:
    """Call the `beat` of `receive_heartbeats`, at most twice a second.

    Without a receiver nothing happens. It is cheap enough for every row.
    """
    global _next
    if _beat is None:
        return
    now = time.monotonic()
    if now >= _next:
        _next = now + _EVERY_SECONDS
        _beat()


def tell_user(text: str) -> None:
    """Pass a line to the `note` of `receive_heartbeats`, by default to stderr."""
    _note(text)
