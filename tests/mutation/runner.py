"""A pytest plugin that runs tests once for each planted bug, in a fork of the process that collected them.

A bug is put in by giving the function the code of its wrong twin, so that nothing is imported
twice: a test that finds it costs a fork and itself. Tests run in the order of the time they take,
and only those that reached the changed line.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutants import Mutant

KILLED, SURVIVED, NOT_REACHED, TIMED_OUT = "killed", "survived", "not reached", "timed out"


class MutationPlugin:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, root: Path, mutants: list[Mutant], timeout: float, report: Path) -> None:
        """Keep what is to be planted."""
        self.root, self.mutants, self.timeout, self.report = root, mutants, timeout, report

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Find out which test reaches which line, then plant one bug after another."""
        items = {item.nodeid: item for item in session.items}
        files = sorted({mutant.file for mutant in self.mutants})
        lines, seconds, failing = _forked(
            lambda: _coverage(self.root, files, list(items.values())), None
        )
        if failing:
            raise pytest.UsageError(f"tests fail without any bug: {failing}")
        print(f"\n{len(items)} tests, {len(self.mutants)} mutants", flush=True)
        with self.report.open("a", encoding="utf-8") as out:
            for mutant in self.mutants:
                reached = set(lines.get(f"{mutant.file}:{mutant.line}", ()))
                tests = [items[name] for name in sorted(reached, key=lambda name: seconds[name])]
                began = time.monotonic()
                outcome, by = (NOT_REACHED, None) if not tests else self._outcome(mutant, tests)
                took = time.monotonic() - began
                print(
                    f"{outcome:12} {took:5.1f}s of {len(tests):3} tests  {mutant.title}", flush=True
                )
                out.write(json.dumps({"mutant": mutant.title, "outcome": outcome, "by": by}) + "\n")
                out.flush()
        return True

    def _outcome(self, mutant: Mutant, tests: list[pytest.Item]) -> tuple[str, str | None]:
        def run() -> tuple[str, str | None]:
            plant(self.root, mutant)
            for item, after in zip(tests, [*tests[1:], None], strict=True):
                if any(
                    report.failed for report in runtestprotocol(item, log=False, nextitem=after)
                ):
                    return KILLED, item.nodeid
            return SURVIVED, None

        found = _forked(run, self.timeout)
        return (TIMED_OUT, None) if found is None else (found[0], found[1])


def plant(root: Path, mutant: Mutant) -> None:
    """Give every function of the changed module the code of its twin."""
    path = str(root / mutant.file)
    twins = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _codes(compile(mutant.tree(root), path, "exec"))
    }
    planted = 0
    gc.unfreeze()  # the tests set modules aside
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename == path:
            twin = twins.get((thing.__code__.co_qualname, thing.__code__.co_firstlineno))
            if twin is not None and len(twin.co_freevars) == len(thing.__code__.co_freevars):
                thing.__code__ = twin
                planted += 1
    if not planted:
        raise RuntimeError(f"{mutant.title}: no function of {path} is loaded")


def _codes(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(deeper for const in inner for deeper in _codes(const))]


def _coverage(root: Path, files: list[str], items: list[pytest.Item]) -> Any:
    """Lines with the tests that reach them, how long each test takes, and which fail."""
    wanted = {str(root / file): file for file in files}
    lines: dict[str, set[str]] = {}
    seconds: dict[str, float] = {}
    failing: list[str] = []
    current = ""

    def line_of(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            lines.setdefault(f"{wanted[frame.f_code.co_filename]}:{frame.f_lineno}", set()).add(
                current
            )
        return line_of

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line_of if frame.f_code.co_filename in wanted else None

    for item, after in zip(items, [*items[1:], None], strict=True):
        current, began = item.nodeid, time.monotonic()
        sys.settrace(call)
        reports = runtestprotocol(item, log=False, nextitem=after)
        sys.settrace(None)
        seconds[item.nodeid] = time.monotonic() - began
        if any(report.failed for report in reports):
            failing.append(item.nodeid)
    return {key: sorted(tests) for key, tests in lines.items()}, seconds, failing


def _forked(function: Callable[[], Any], timeout: float | None) -> Any:
    """What a function returns in a fork of this process.

    None where it took too long or the fork died of it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        with os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)

            try:
                answer = json.dumps(["ok", function()])

            except BaseException:  # whatever it is, the parent tells it
                answer = json.dumps(["broken", traceback.format_exc()])
            try:
                with os.fdopen(writing, "w") as out:
                    out.write(answer)
            finally:
                os._exit(0)
    os.close(writing)
    if timeout is not None:
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, timeout)
    with os.fdopen(reading) as answer_of_child:
        answer = answer_of_child.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.waitpid(child, 0)
    if not answer:
        return None
    state, value = json.loads(answer)
    if state == "broken":
        raise RuntimeError(value)
    return value
