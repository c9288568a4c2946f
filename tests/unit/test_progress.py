"""Bars are for terminals: what a pipe or a file gets stays as it is."""

from __future__ import annotations

import io

from rich.console import Console

from optrun.training.display import LiveDisplay, PlainDisplay, make_display, watched


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)


def test_an_evaluation_has_a_bar_while_it_runs() -> None:
    console = terminal()
    display = make_display(console, "title")
    assert isinstance(display, LiveDisplay)

    def shown() -> str:
        with console.capture() as seen:
            console.print(display._draw())
        return seen.get()

    assert "evaluation" not in shown()
    display.evaluating(0, 40)
    display.evaluating(7, 40)
    assert "evaluation" in shown()
    assert "7/40" in shown()
    display.evaluating(0, 0)
    assert "evaluation" not in shown()


def test_elsewhere_nothing_is_said_of_each_batch() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out), "title")
    assert isinstance(display, PlainDisplay)
    display.evaluating(7, 40)
    assert list(watched(range(3), 3, console=Console(file=out))) == [0, 1, 2]
    assert out.getvalue() == ""


def test_a_verb_shows_the_bar_on_a_terminal() -> None:
    console = terminal()
    assert list(watched(range(3), 3, console=console)) == [0, 1, 2]
    assert "3/3" in console.file.getvalue()  # type: ignore[attr-defined]
