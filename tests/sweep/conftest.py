"""Each test sweeps in a folder of its own, over a text of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from optrun.config import store
from optrun.report import build
from optrun.runner import prepare as preparation
from optrun.runner import train as experiment
from optrun.sweeper.devices import VISIBLE
from tests.running import write_text
from tests.sweep import forked


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: Path) -> Path:
    """An empty current folder, and launches that are forked."""
    prepare(monkeypatch, tmp_path, text)
    return tmp_path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is learnt; with every module that a job imports, so that no forked process does it again."""
    path = write_text(tmp_path_factory.mktemp("sweep-text"), 120)
    cfg = store.compose(store.open_hydra(), "config", [*forked.JOB, f"data.train={path}"])
    prepared = preparation.prepare(store.typed(store.without_hydra(cfg)))
    prepared.model.save_pretrained(tmp_path_factory.mktemp("warm"))
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
    # Pictures take longer than these jobs; tests of their own look at them.
    monkeypatch.setattr(experiment, "draw_curves", lambda run: None)
    monkeypatch.setattr(build, "report", lambda folders, **options: SimpleNamespace(verdict=None))


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's locks in a folder of the test; no variable of the tester's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(VISIBLE, raising=False)
    return tmp_path / "state" / "optrun" / "devices"
