"""What a terminal shows when a run is stopped by its keys.

No torn bar, no lost line, and a cursor.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from optrun.artifacts.run_dir import RunDir
from optrun.cli import evaluate
from optrun.runner import console
from optrun.runner.evaluate import Evaluated

PROGRAM = """
import time
from rich.console import Console
from optrun.training.display import LiveDisplay
from optrun.training.signals import SignalHandler

with SignalHandler() as signals:
    display = LiveDisplay(Console())
    display.start(0, 9)
    display.note("begun")
    while not signals.stop_requested:
        time.sleep(0.01)
    display.note("asked to stop")
    while STAYS:
        time.sleep(0.01)
    display.stop()
print("the end")
"""


class Screen:
    """The lines of a terminal of 80 columns, as far as what is written to it needs.

    A column past the last is in the next line, as soon as something is written there.
    """

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}
        self.x = self.y = 0
        self.cursor = True

    def feed(self, text: str) -> None:
        for found in re.finditer(r"\x1b\[([?\d;]*)([A-Za-z])|([\s\S])", text):
            arg, code, letter = found.groups()
            if letter == "\n":
                self.y += 1
            elif letter == "\r":
                self.x = 0
            elif letter is not None and letter >= " ":
                self.x, self.y = (0, self.y + 1) if self.x == 80 else (self.x, self.y)
                line = self.lines.get(self.y, "").ljust(self.x)
                self.lines[self.y] = line[: self.x] + letter + line[self.x + 1 :]
                self.x += 1
            elif code == "A":
                self.y -= int(arg or 1)
            elif code == "K":
                self.lines[self.y] = ""
            elif (arg, code) in (("?25", "h"), ("?25", "l")):
                self.cursor = code == "h"

    def text(self) -> str:
        return "\n".join(line.rstrip() for _, line in sorted(self.lines.items()) if line.strip())


def played(*, presses: int) -> tuple[Screen, int]:
    """Run the program on a terminal of 80 columns, and press Ctrl-C while its bar is there."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch's idle threads; they are not used in the child
        process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        code = 1
        try:
            exec(PROGRAM, {"STAYS": presses > 1})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    raw, waits = b"", [b"0/9", b"asked to stop"][:presses]  # the bar
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if waits and waits[0] in raw:
            waits.pop(0)
            os.write(terminal, b"\x03")
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                raw += os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
    screen = Screen()
    screen.feed(raw.decode())
    return screen, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_bar_is_taken_away_whole_after_a_key() -> None:
    """The terminal writes ^C where the cursor is: behind a full line that is the next one."""
    screen, code = played(presses=1)
    assert code == 0
    assert screen.text().splitlines() == ["begun", "asked to stop", "the end"]
    assert screen.cursor


def test_a_second_key_leaves_a_cursor() -> None:
    screen, code = played(presses=2)
    assert code == 130
    assert "stopped at once: nothing new was saved" in screen.text()
    assert screen.cursor


@pytest.mark.parametrize(("kind", "width"), [("a terminal", 60), ("a file", 120)])
def test_sentences_at_the_end_break_between_words(
    kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = "best: step 12 by eval/accuracy 0.55 (max), " + "a tie of several evaluations " * 6
    monkeypatch.setattr(console, "sentence_of", lambda _: "")
    monkeypatch.setattr(console, "describe_best", lambda _: best)
    monkeypatch.setattr(console, "_print_metrics", lambda *_: None)
    shown = Console(
        file=io.StringIO(), force_terminal=kind == "a terminal", width=60, color_system=None
    )
    values = {"plugins": (), "max_steps": 12, "main_metric": {"name": "eval/accuracy"}}
    outcome = SimpleNamespace(
        summary=values, sample=("say:", "\n" * 40 + "yes" + "\n" * 40), run=RunDir(Path("run"))
    )
    console.show(shown, outcome, SimpleNamespace(EVALUATION_ROWS=""))  # type: ignore[arg-type]
    lines = [line.rstrip() for line in shown.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    told = lines[next(at for at, line in enumerate(lines) if line.startswith("best:")) : -1]
    assert len(told) > 1
    assert all(len(line) <= width for line in told)
    assert " ".join(told) == best.strip()
    assert len(lines) - len(told) < 8  # of eighty empty lines one is left


def test_the_title_of_an_evaluation_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Path("outputs/a_run_with_a_name/checkpoints/step-00000016")
    evaluate._show(checkpoint, Evaluated(16, 300, {"eval/loss": 0.5}, {}, None))
    assert capsys.readouterr().out.splitlines()[0] == f"{checkpoint} · step 16 · 300 examples"
