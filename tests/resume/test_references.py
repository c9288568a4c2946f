"""`${oc.env:...}` on the command line.

The run uses the value, its files hold the reference, a resume asks again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir
from optrun.base.bounded_yaml import yaml_mapping
from tests.running import TINY_GPT, optrun, summary, write_text

SECRET = "hunter2-not-for-files"


def leaks(folder: Path) -> list[str]:
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", SECRET)
    monkeypatch.setenv("SEED", "7")
    data = tmp_path.parent / f"{tmp_path.name}-data" / SECRET
    data.mkdir(parents=True)
    write_text(data, 60)
    monkeypatch.setenv("DATA", str(data))
    return tmp_path


WORDS = [
    *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
    "data=files",
    "data.train=${oc.env:DATA}/corpus.txt",
    "run_name=exp-${oc.env:SECRET}",
    "hydra.run.dir=run",
    "tracking=tensorboard",
    "training.max_steps=2",
    "checkpoint.save_steps=1",
    "seed=${oc.env:SEED}",
    "task.prompt=${run_name}",
]


def test_files_hold_the_reference_and_a_resume_asks_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert optrun(*WORDS) == 0
    assert leaks(place) == []
    config = yaml_mapping(place / "run" / "config.yaml")
    assert config["run_name"] == config["task"]["prompt"] == "exp-${oc.env:SECRET}"
    assert config["data"]["train"] == "${oc.env:DATA}/corpus.txt"
    assert sorted(config["environment"]) == ["data.train", "run_name", "task.prompt"]
    assert summary(place / "run")["run_name"] == "exp-${oc.env:SECRET}"
    # Numbers are written: they say what was trained, and what reports compare.
    state = json.loads((place / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert config["seed"] == state["config"]["seed"] == 7

    assert optrun("resume=run", "training.max_steps=3") == 0
    assert "run_name takes the environment variable SECRET\n" in capsys.readouterr().err
    assert optrun("evaluate", "run") == optrun("report", "run") == optrun("verify", "run") == 0
    assert optrun("branch_from=run", "hydra.run.dir=branch", "training.max_steps=4", "lr=1e-4") == 0
    assert leaks(place) == []
    branch = yaml_mapping(place / "branch" / "config.yaml")
    assert branch["data"]["train"] == "${oc.env:DATA}/corpus.txt"

    monkeypatch.setenv("DATA", str(place / "nowhere"))
    capsys.readouterr()
    assert optrun("resume=run", "training.max_steps=4") == 2
    assert "nowhere" in capsys.readouterr().err
    monkeypatch.delenv("SECRET")
    assert optrun("resume=run", "training.max_steps=4") == 2
    assert "environment variable SECRET is not set" in capsys.readouterr().err


def test_a_file_has_no_variable_sent(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever wrote a run may ask for a secret of whoever goes on with it."""
    assert optrun(*WORDS) == 0
    run = RunDir(place / "run")
    server = "http://127.0.0.1:9/${oc.env:SECRET}"
    forged = run.config.read_text()
    forged = forged.replace(
        "  name: tensorboard\n", f"  name: mlflow\n  tracking_uri: {server}\n  experiment: x\n"
    )
    forged = forged.replace("environment:\n", "environment:\n- tracking.tracking_uri\n")
    run.config.write_text(forged)
    run.summary.write_text(
        json.dumps(
            {**summary(run.path), "config_sha256": hashlib.sha256(forged.encode()).hexdigest()}
        )
    )
    capsys.readouterr()
    assert optrun("resume=run", "training.max_steps=3", "run_name=mine") == 2
    said = capsys.readouterr().err
    assert "tracking.tracking_uri=" in said
    assert SECRET not in said
    assert optrun("resume=run", "training.max_steps=3", "tracking=none") == 0
    typed = "run_name='exp-${oc.env:SECRET}'"
    assert optrun("resume=run", "training.max_steps=4", "tracking=none", typed) == 0
    assert yaml_mapping(run.config)["run_name"] == "exp-${oc.env:SECRET}"
    capsys.readouterr()
    assert optrun("branch_from=run", "hydra.run.dir=branch", "training.max_steps=5") == 0
    said = capsys.readouterr().err
    assert "data.train takes the environment variable DATA\n" in said
    assert "run_name takes" not in said  # a branch has its own
    assert leaks(place) == []


def test_a_note_of_how_a_run_began_has_no_variable_sent(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that is said to have been killed before it wrote its configuration."""
    words = [
        *WORDS[:-1],
        "tracking=mlflow",
        "tracking.tracking_uri=http://127.0.0.1:9/${oc.env:SECRET}",
    ]
    task = [word for word in words if not word.startswith(("hydra.", "tracking=tensorboard"))]
    (place / "run" / ".hydra").mkdir(parents=True)
    (place / "run" / ".hydra" / "overrides.yaml").write_text("[]\n")
    (place / "run" / ".hydra" / "hydra.yaml").write_text(
        json.dumps(
            {
                "hydra": {
                    "job": {"name": "optrun", "config_name": "config"},
                    "overrides": {"task": task},
                }
            }
        )
    )
    assert optrun("resume=run", "run_name=mine") == 2
    said = capsys.readouterr().err
    assert "tracking.tracking_uri=" in said
    assert "tracking=mlflow" in said
    assert "another machine" in said
    assert SECRET not in said


def test_from_another_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path of which a variable is a part stays a reference where it is seen from
    elsewhere.
    """
    monkeypatch.setenv("DATA", f"../{place.name}-data/{SECRET}")
    assert optrun(*WORDS) == 0
    (place / "below").mkdir()
    monkeypatch.chdir(place / "below")
    assert optrun("evaluate", "../run") == 0
    assert optrun("resume=../run", "training.max_steps=3") == 0
    assert leaks(place) == []


def test_a_message_of_a_failed_run_repeats_no_value(place: Path, forked_jobs: None) -> None:
    (place.parent / f"{place.name}-data" / SECRET / "corpus.txt").write_bytes(b"\x00\xff" * 50)
    assert optrun(*WORDS) == 2
    words = [word for word in WORDS if not word.startswith(("hydra.run.dir=", "seed="))]
    assert optrun("-m", *words, "seed=0,1", "hydra.sweep.dir=sweep") == 1
    assert leaks(place) == []


def test_what_could_not_be_read_again_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*WORDS[:-1], "task.prompt='${oc.decode:${oc.env:SECRET}}'") == 2
    assert "task.prompt holds" in capsys.readouterr().err
