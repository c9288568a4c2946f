"""Where a study is kept: a database by its URL."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from optrun.base.errors import ConfigError, OptrunError, StorageError
from optrun.sweeper.storage import translated_errors
from optrun.sweeper.study import open_study
from tests.sweep.stand_in import options

SPACE = {"lr": optuna.distributions.FloatDistribution(0.0, 1.0)}


def opened(given: str) -> optuna.Study:
    """The study of a storage."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with translated_errors("hydra.sweeper.storage"):
        storage = optuna.storages.get_storage(given)
        found: optuna.Study = open_study(storage, "min")
    return found


def ask(given: str, times: int) -> None:
    """What one of several processes does."""
    study = opened(given)
    for _ in range(times):
        study.tell(study.ask(fixed_distributions=SPACE), 1.0)


def test_a_database_by_its_url(tmp_path: Path) -> None:
    for times in (1, 2):
        ask(f"sqlite:///{tmp_path}/mine.db", 1)
        assert len(opened(f"sqlite:///{tmp_path}/mine.db").trials) == times


@pytest.mark.parametrize(
    ("given", "kind", "facts"),
    [
        ("sqlite:////nowhere/x.db", StorageError, ("unable to open",)),
        ("nosuch://me:secret@host/x", ConfigError, ("nosuch",)),
        ("redis://localhost", ConfigError, ("Redis",)),
        ("mysql+nodriver://me:secret@host/x", ConfigError, ("nodriver",)),
        ("sqlite://host:port:port/x", ConfigError, ()),
    ],
)
def test_one_message(
    given: str,
    kind: type[OptrunError],
    facts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as refused:
        opened(given)
    for fact in ("hydra.sweeper.storage", *facts):
        assert fact in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("given", ["study.db", "journal:study.log", "journal:///x/study.log"])
def test_no_url_of_a_database(given: str) -> None:
    with pytest.raises(ConfigError, match=r"expected the URL of a database.*sqlite:///"):
        options(storage=given)
