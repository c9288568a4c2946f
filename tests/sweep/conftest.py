"""Each test sweeps in a folder of its own, over a text of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from optrun.data import stdlib
from optrun.report import build
from optrun.runner import train as experiment
from optrun.sweeper.devices import VISIBLE
from tests.running import optrun, write_text
from tests.sweep import forked


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Path) -> Path:
    """An empty current folder, and launches that are forked."""
    prepare(monkeypatch, tmp_path, text)
    return tmp_path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is learnt.

    Once, so that no forked process imports, compiles or looks up again what a job needs.
    """
    path = write_text(tmp_path_factory.mktemp("sweep-text"), 120)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(experiment, "draw_curves", lambda run: None)
        run = tmp_path_factory.mktemp("warm")
        assert optrun(*forked.JOB, f"data.train={path}", f"hydra.run.dir={run}") == 0
    return path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A sweep over lr=1e-3,2e-3 and seed=0,1 that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(monkeypatch, folder, text)
        assert forked.sweep("lr=1e-3,2e-3", "seed=0,1", folder=folder) == 0
    return folder


def prepare(monkeypatch: pytest.MonkeyPatch, folder: Path, text: Path) -> None:
    """Sweep here."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(forked, "JOB", [*forked.JOB, f"data.train={text}"])
    forked.fork_jobs(monkeypatch)
    monkeypatch.setattr(forked.ForkServer, "launches", [])
    few = stdlib.stdlib_files()[::20]  # for `data=stdlib` and its like, whose tokens take seconds
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: few)
    # Pictures take longer than these jobs; tests of their own look at them.
    monkeypatch.setattr(experiment, "draw_curves", lambda run: None)
    monkeypatch.setattr(build, "report", lambda folders, **options: SimpleNamespace(verdict=None))


@pytest.fixture
def no_devices_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the tester's."""
    monkeypatch.delenv(VISIBLE, raising=False)
