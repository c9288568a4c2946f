"""Bars are for terminals: what a pipe or a file gets stays as it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from optrun.base.errors import printable
from optrun.training.display import LiveDisplay, PlainDisplay, make_display, with_progress_bar


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)


def test_an_evaluation_has_a_bar_while_it_runs() -> None:
    console = terminal()
    display = make_display(console)
    assert isinstance(display, LiveDisplay)

    def shown() -> str:
        with console.capture() as seen:
            console.print(display.progress.get_renderable())
        return seen.get()

    assert "evaluation" not in shown()
    display.step(3, {"train/loss": 2.5, "perf/peak_memory_bytes": 3 << 30, "other": 7.0})
    assert "memory" in shown()
    assert "GiB" in shown()
    assert "other" not in shown()
    display.evaluating(0, 40)
    display.evaluating(7, 40)
    assert "evaluation" in shown()
    assert "7/40" in shown()
    display.evaluating(0, 0)
    assert "evaluation" not in shown()


def test_elsewhere_nothing_is_said_of_each_batch() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out))
    assert isinstance(display, PlainDisplay)
    display.evaluating(7, 40)
    assert list(with_progress_bar(range(3), 3, console=Console(file=out))) == [0, 1, 2]
    assert out.getvalue() == ""


def test_a_verb_shows_the_bar_on_a_terminal() -> None:
    console = terminal()
    assert list(with_progress_bar(range(3), 3, console=console)) == [0, 1, 2]
    assert "3/3" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text", ["[bold]step[/] 1/2", "a\tb  ", "\x1b[31mred", "ö" * 300, "two\nlines", ""]
)
def test_a_line_in_a_file_is_as_rich_writes_it(text: str) -> None:
    out, other = io.StringIO(), io.StringIO()
    PlainDisplay(Console(file=out)).note(text)
    Console(file=other).print(printable(text), markup=False, highlight=False, soft_wrap=True)
    assert out.getvalue() == other.getvalue()


def test_a_quiet_console_hears_no_line_and_a_recording_one_does() -> None:
    out = io.StringIO()
    PlainDisplay(Console(file=out, quiet=True)).note("a line")
    assert out.getvalue() == ""
    console = Console(file=out, record=True)
    PlainDisplay(console).note("a line")
    assert console.export_text() == out.getvalue() == "a line\n"


def test_a_pipe_whose_reader_left_ends_as_rich_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    def end(_: Console) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(Console, "on_broken_pipe", end)
    with pytest.raises(SystemExit):
        PlainDisplay(Console(file=Left())).note("a line")


def test_a_plain_line_has_at_most_120_characters() -> None:
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=300))
    display.start(0, 1000)
    names = [
        "train/loss",
        "train/grad_norm",
        "train/grad_norm_max",
        "train/lr",
        "perf/tokens_per_second",
    ]
    values = dict.fromkeys(
        [*names, *(f"eval/set_{number}/accuracy" for number in range(9))], 0.123456
    )
    display.record({"step": 10, "epoch": 0.1, **values})
    (line,) = out.getvalue().splitlines()
    assert len(line) <= 120
    assert "train/loss 0.1235  train/lr 0.1235  eval/set_0/accuracy" in line
    assert "perf/" not in line
    assert "  left " in line
    assert "eval/set_8/accuracy" not in line
    display.main_metric = "eval/set_8/accuracy"
    display.record({"step": 10, "epoch": 0.1, **values})
    line = out.getvalue().splitlines()[1]
    assert "train/lr 0.1235  eval/set_8/accuracy 0.1235" in line
    assert len(line) <= 120
