"""`${oc.env:NAME}` on the command line: resolved once, refused where it would write a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.base.bounded_yaml import yaml_mapping
from tests.running import TINY_GPT, optrun, write_text

SECRET = "hunter2-not-for-files"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_text(tmp_path / "data", 60)
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setenv("SERVER", f"https://me:{SECRET}@example.org")
    return [*TINY_GPT, "data=files", "data.train=${oc.env:DATA}/corpus.txt", "hydra.run.dir=run"]


def test_a_run_holds_the_value_and_goes_on_without_the_variable(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["training.max_steps=2", "training.max_seconds=1e-9", "task.prompt=${run_name}"]
    assert optrun(*words, *line, "run_name=exp") == 75
    config = yaml_mapping(tmp_path / "run" / "config.yaml")
    assert config["data"]["train"] == str(tmp_path / "data" / "corpus.txt")
    assert config["task"]["prompt"] == "exp"
    monkeypatch.delenv("DATA")
    assert optrun("resume=run", "training.max_seconds=null") == 0


@pytest.mark.parametrize(
    "word",
    [
        "run_name=exp-${oc.env:API_TOKEN}",
        "run_name=${oc.env:SERVER}",
        "task.prompt='${oc.env:SERVER}'",
    ],
)
def test_a_secret_is_refused_and_written_nowhere(
    word: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*words, word) == 2
    said = capsys.readouterr().err
    assert "this looks like a secret" in said
    assert SECRET not in said
    assert not (tmp_path / "run").exists()


def test_a_nested_reference_is_not_resolved_twice(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTER", "${oc.env:API_TOKEN}")
    assert optrun(*words, "task.prompt=${oc.env:OUTER}") == 2
    assert SECRET not in capsys.readouterr().err
