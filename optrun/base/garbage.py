"""The garbage collector of a process of optrun's own: it waits while a command starts.

What importing torch and transformers makes stays until the process ends, hundreds of thousands of
objects that Python
looks through again and again while more are made: a sixth of the time that the imports take. What
is left of it when training begins is set aside for good (`gc.freeze`), so that no step waits for a
pass over it.
"""

from __future__ import annotations

import gc

_SELDOM = (200_000, 10, 10)
"""Thresholds of `gc.set_threshold` for a start: what a start leaves behind in cycles is small."""

_usual: tuple[int, int, int] | None = None


def postpone() -> None:
    """Collect seldom from here on; for a process that is optrun's own."""
    global _usual
    if _usual is None and gc.isenabled():
        _usual = gc.get_threshold()
        gc.set_threshold(*_SELDOM)


def resume() -> None:
    """Collect as usual again, without what there is by now.

    Nothing where `postpone` was not called.
    """
    global _usual
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
        _usual = None


def abandon() -> None:
    """Leave what there is to the end of the process.

    Python would look through it all and take it apart, for a second.

    What a run made after `resume` is collected first, as Python would: the `__del__` of somebody's
    callback is called. What else has to be done at an end is done by `atexit`, `with` and
    `finally`, as before.
    """
    if gc.get_freeze_count():
        gc.collect()
    gc.freeze()
