"""Fixtures: the undisturbed run, and a way to run optrun."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.runner import train as experiment
from tests.faults.runs import Go, Straight
from tests.running import optrun


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Read only: tests work on copies."""
    run = Straight(tmp_path_factory.mktemp("straight"))
    assert optrun(*run.words, f"hydra.run.dir={run.path}") == 0
    return run


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """SIGHUP is heard, also where the tests themselves were started under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Go:
    """In a folder of its own, without the picture at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)

    def run(*given: str) -> tuple[int, str]:
        capsys.readouterr()
        code = optrun(*given)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run
