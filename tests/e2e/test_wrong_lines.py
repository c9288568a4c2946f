"""Lines that mean nothing here, typed at the program: one message and exit code 2.

Tables of what is said of which line are in `tests/unit/config/test_advice.py`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.running import optrun

ADVISED = {
    "optimizer.betas=0.9,0.99": "optimizer.betas=[0.9,0.99]",
    "run_name=a(b)": 'run_name="a(b)"',
    "run_name=a=b": 'run_name="a=b"',
    "model=gpt2": "model=pretrained model.path=gpt2",
    "clip=1.0": "clip=global_norm clip.max_norm=1.0",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert optrun(*words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("optrun: error: ") == 1
    return said


@pytest.mark.parametrize("line", ADVISED)
def test_the_advised_line_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, line, "--cfg", "job")
    words = ADVISED[line].split() if " " in ADVISED[line] else [ADVISED[line]]
    assert ADVISED[line] in said or shlex.quote(ADVISED[line]) in said
    assert optrun(*words, "--cfg", "job") == 0


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("resume=true", ["resume=true", "resume=latest"]),
        ("--learning_rate=1", ["Here it is written lr=1."]),
        ("training.device=gpu", ["cuda:N or mps"]),
        ("hydra.run.dir=/dev/null", ["this is a file"]),
        ("resume=no/such/run", ["no such directory"]),
        ("branch_from=no/such/run", ["no such directory"]),
        ("data=files data.train=~nobody-of-this-name/x.csv", ["~nobody-of-this-name", "no such"]),
        ("explain mine.yaml", ["Did you mean optrun explain -cn mine.yaml?"]),
        ("-cn=mine", ["no such recipe", "Did you mean -cn mine.yaml?"]),
    ],
)
def test_what_is_said_of_it(
    line: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("defaults: [config, _self_]\n")
    said = refusal(capsys, *line.split())
    assert [fact for fact in facts if fact not in said] == [], said


def test_an_interval_in_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert "lr=interval(1,2)" in refusal(capsys, "-m", "lr=interval(1,2)")


def test_a_file_alone_is_what_start_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my rows.csv").write_text("text,label\na,b\n")
    assert "optrun start 'my rows.csv'" in refusal(capsys, "my rows.csv")
    for verb in ("train", "fit"):
        said = refusal(capsys, verb, "my rows.csv")
        assert "trains without a verb" in said
        assert "transfer" not in said


def test_a_command_stands_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a command comes first" in refusal(capsys, "--config-dir", ".", "explain")


def test_a_recipe_may_be_called_like_a_verb(tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text("defaults: [config, _self_]\n")
    assert optrun("--config-dir", ".", "-cn", "report", "--cfg", "job") == 0


def test_an_empty_value_before_another_key_is_no_blank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`run_name= lr=1e-3` was taken for one assignment with blanks around its sign."""
    assert optrun("run_name=", "lr=4e-3", "--cfg", "job") == 0
    printed = capsys.readouterr().out
    assert "lr: 0.004" in printed
    assert "run_name: ''" in printed
