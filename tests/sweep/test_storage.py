"""Where a study is kept: databases by URL, journals for disks that machines share."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path

import optuna
import pytest

from optrun.base.errors import ConfigError, OptrunError, StorageError
from optrun.sweeper.storage import open_storage, told_by_name
from optrun.sweeper.study import open_study
from tests.sweep.stand_in import options

SPACE = {"lr": optuna.distributions.FloatDistribution(0.0, 1.0)}


def opened(given: str) -> optuna.Study:
    """The study of a storage."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with told_by_name("hydra.sweeper.storage"):
        storage = optuna.storages.get_storage(open_storage(given, Path("study.db")))
        found: optuna.Study = open_study(storage, "min")
    return found


def ask(given: str, times: int) -> None:
    """What one of several processes does."""
    study = opened(given)
    for _ in range(times):
        study.tell(study.ask(fixed_distributions=SPACE), 1.0)


@pytest.mark.parametrize(
    "given", ["study.log", "study.journal", "journal:any name", "journal://{}/x", "~/study.log"]
)
def test_a_journal_by_name(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    ask(given.format(tmp_path), 2)
    assert [trial.state.name for trial in opened(given.format(tmp_path)).trials] == ["COMPLETE"] * 2
    (written,) = tmp_path.iterdir()
    assert written.read_bytes().startswith(b'{"op_code":')


def test_a_database_by_its_url(tmp_path: Path) -> None:
    for times in (1, 2):
        ask(f"sqlite:///{tmp_path}/mine.db", 1)
        assert len(opened(f"sqlite:///{tmp_path}/mine.db").trials) == times


def test_several_processes_share_a_journal(tmp_path: Path) -> None:
    """Each of the numbers once, and no lock is left."""
    path = f"journal:{tmp_path / 'j'}"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch's idle threads; they are not used in the child
        processes = [
            multiprocessing.get_context("fork").Process(target=ask, args=(path, 5))
            for _ in range(2)
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert [trial.number for trial in opened(path).trials] == list(range(10))
    assert [entry.name for entry in tmp_path.iterdir()] == ["j"]


@pytest.mark.parametrize("cut", [1, 20, 9999])
def test_half_a_record_is_dropped(cut: int, tmp_path: Path) -> None:
    """A writer was killed; the next one neither loses its own record nor the study.

    At 9999 the first is cut.
    """
    path = tmp_path / "study.log"
    ask(str(path), 2)
    whole_file = path.read_bytes()
    before = len(opened(str(path)).trials)
    path.write_bytes(whole_file[: -min(cut, len(whole_file) - 5)])
    study = opened(str(path))
    study.ask(fixed_distributions=SPACE)
    assert len(opened(str(path)).trials) == (1 if cut == 9999 else before + 1)
    path.write_bytes(path.read_bytes()[:-3])  # while another process has it open
    study.ask(fixed_distributions=SPACE)
    assert all(line.startswith(b'{"op_code":') for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("content", ["mine", "mine\n", '{"op_code":1}\nmine', "mine\n{", "[1]\n"])
def test_a_file_of_a_person_is_no_journal(content: str, tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"study\.log: this file is no journal"):
        opened(str(path))
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("given", "kind", "facts"),
    [
        ("nowhere/study.log", StorageError, ("nowhere/study.log", "No such file")),
        ("journal:.", ConfigError, ("a folder", "regular file")),
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


def test_neither_a_url_nor_a_journal() -> None:
    with pytest.raises(
        ConfigError, match=r"storage=study\.db: expected a URL.*sqlite:///.*journal:"
    ):
        options(storage="study.db")
