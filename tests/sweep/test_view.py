"""What a person sees: figures that add up, best so far, time left."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from optrun.sweeper.folder import JobState
from optrun.sweeper.jobs import Job
from optrun.sweeper.stop import Stop
from optrun.sweeper.view import Eta, JobRow, JobTable, View


def job(number: int) -> Job:
    return Job(f"job{number}", f"{number:016x}", (f"seed={number}",), {}, f"seed={number}")


def job_table() -> JobTable:
    """Four jobs: one finished, one failed, one half-way, one not begun."""
    states = {
        "job0": JobState("finished", 10, 10, "eval/loss", "min", 2.5, "", 3.0),
        "job1": JobState("failed", 0, None, message="lr=-1: expected a number above 0."),
        "job2": JobState("running", 5, 10, "eval/loss", "min", 2.25),
        "job3": JobState("new"),
    }
    rows = {name: JobRow(job(number), state) for number, (name, state) in enumerate(states.items())}
    rows["job2"].running = True
    return JobTable(rows)


def test_counts_and_best() -> None:
    shown = job_table()
    assert shown.counts() == "1 of 4 finished · 1 running · 1 failed · 1 left"
    assert shown.best_line() == "best eval/loss 2.25: seed=2"
    states = {name: row.state for name, row in shown.rows.items()}
    states["job2"].mode = states["job0"].mode = "max"
    assert shown.best_line() == "best eval/loss 2.5: seed=0"
    states["job0"].best = float("nan")
    assert shown.best_line() == "best eval/loss 2.25: seed=2"
    shown.rows["job3"].is_pruned = True
    assert shown.left == 0


def test_what_is_left_is_told_apart() -> None:
    """After Ctrl-C: the job that was cut, and those that never began."""
    shown = job_table()
    shown.rows["job2"].running = False
    shown.rows["job2"].state.status = "interrupted"
    assert (
        shown.counts()
        == "1 of 4 finished · 0 running · 1 failed · 2 left (1 interrupted, 1 not started)"
    )


def test_each_job_counts_once() -> None:
    """A finished job whose process still draws its curves, and one that ended after it was
    stopped at a rung.
    """
    shown = job_table()
    shown.rows["job0"].running = shown.rows["job1"].running = True
    shown.rows["job0"].is_pruned = shown.rows["job2"].is_pruned = True
    assert shown.left == 1
    assert shown.counts() == "1 of 4 finished · 0 running · 1 failed · 1 stopped at a rung · 1 left"
    shown.expected = 6
    assert shown.left == 3


def test_time_left() -> None:
    """Two jobs and a half in 25 s: what is left of four takes 15 s."""
    now = [0.0]
    eta = Eta(clock=lambda: now[0])
    assert eta(job_table()) is None or now[0] == 0.0
    now[0] = 5.0
    early = job_table()
    early.rows["job2"].state.step = 4
    assert eta(early) is None, "no job has ended or is half done"
    now[0], eta.ended = 25.0, 2
    assert eta(job_table()) == 15.0


@pytest.mark.parametrize(
    ("held", "said"),
    [(["a", "b"], "nothing new was saved of 2 jobs"), ([], "every job was saved before")],
)
def test_a_second_signal_says_what_was_saved(
    held: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked before the workers are killed: what they held is free then."""
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code))
    monkeypatch.setattr(os, "killpg", lambda group, number: held.clear())
    codes: list[int] = []
    with Stop() as stop:
        stop.at_work, stop.groups = lambda: held, lambda: [7]
        signal.raise_signal(signal.SIGINT)
        assert (stop.requested, codes) == (True, [])
        signal.raise_signal(signal.SIGINT)
    assert codes == [130]
    assert said in capsys.readouterr().err


def test_a_limit_of_time_is_a_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code))
    codes: list[int] = []
    now = [100.0]
    with Stop(seconds=10.0, clock=lambda: now[0]) as stop:
        assert (stop.requested, stop.seconds_left) == (False, 10.0)
        now[0] = 111.0
        assert (stop.requested, stop.seconds_left) == (True, 0.0)
        assert "hydra.sweeper.timeout" in stop.why
        signal.raise_signal(signal.SIGINT)
        assert codes == []
        signal.raise_signal(signal.SIGINT)
    assert codes == [130]


def test_plain_lines() -> None:
    out = io.StringIO()
    view = View(Console(file=out, width=200))
    shown = job_table()
    view.ended(shown.rows["job1"], shown, "sweep/job1/optrun.log")
    line = out.getvalue()
    assert line.startswith(
        "[2/4] failed      seed=1  lr=-1: expected a number above 0.  (sweep/job1/optrun.log)  2"
        " to go"
    )
    view.ended(shown.rows["job0"], shown, "")
    assert "finished    seed=0  best eval/loss 2.5  step 10" in out.getvalue()


def test_a_piped_log_says_which_job_begins() -> None:
    """A log without a live status was silent until the first job had ended."""
    out = io.StringIO()
    view = View(Console(file=out, width=200))
    shown = job_table()
    shown.rows["job2"].state = JobState("new")
    view.begun(shown.rows["job2"], shown)
    assert out.getvalue() == "[2/4] running     seed=2  2 to go\n"


def test_a_terminal_shows_where_all_jobs_stand() -> None:
    out = io.StringIO()
    console = Console(
        file=out, width=200, force_terminal=True, force_interactive=True, color_system=None
    )
    view = View(console)
    view.begun(job_table().rows["job2"], job_table())
    assert "running     seed=2" not in out.getvalue(), "the status below counts it"
    view.update(job_table())
    view.stop()
    assert "1 of 4 finished · 1 running" in out.getvalue()
    assert "best eval/loss 2.25: seed=2" in out.getvalue()
