"""The TAB key: Hydra's keys and choices, and verbs; never an error in the prompt."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optrun.cli import main as cli
from optrun.cli.completion import candidates
from optrun.cli.verbs import VERBS
from optrun.config import store

LINES = {
    # line up to the cursor: what is offered
    "optrun ex": {"explain", "export"},
    "optrun optimizer=la": {"optimizer=lamb", "optimizer=lazy_adam"},
    "optrun explain optimizer=la": {"optimizer=lamb", "optimizer=lazy_adam"},
    "optrun certify resume optimizer=la": {"optimizer=lamb", "optimizer=lazy_adam"},
    "optrun optimi": {"optimizer=", "optimizer."},
    "optrun see": {"seed="},
    "optrun -m training.max_st": {"training.max_steps="},
    "optrun explain training.max_st": {"training.max_steps="},
    "optrun optimizer=lamb optimizer.always": {"optimizer.always_adapt="},
    "optrun optimizer.always": set(),
    "optrun model.config.n_la": {"model.config.n_layer="},
    "optrun hydra/sweeper=op": {"hydra/sweeper=optuna"},
    "optrun data.train=./tr": {"data.train=./train.tsv"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", "")
    (tmp_path / "outputs" / "2026-01-01" / "10-00-00").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer").mkdir(parents=True)
    (tmp_path / "mine" / "optimizer" / "mylamb.yaml").write_text("defaults: [lamb, _self_]\n")
    (tmp_path / "mine" / "evening.yaml").write_text("defaults: [config, _self_]\n")
    for name in (
        "train.tsv",
        "dev.tsv",
        ".hidden",
        "$(touch taken)",
        "two words",
        "a;touch taken",
        "`touch taken`",
    ):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_offered(line: str, here: Path) -> None:
    assert set(candidates(store.open_hydra(), "config", line)) == LINES[line]


def test_every_verb_and_group(here: Path) -> None:
    offered = set(candidates(store.open_hydra(), "config", "optrun "))
    assert set(VERBS) <= offered
    assert {f"{group}=" for group in store.GROUPS} <= offered


def test_no_file_is_a_command(here: Path) -> None:
    """Bash expands what it is offered."""
    offered = candidates(store.open_hydra(), "config", "optrun data.train=./")
    assert "data.train=./train.tsv" in offered
    assert not [word for word in offered if "touch" in word]


def answer(
    line: str, monkeypatch: pytest.MonkeyPatch, point: int | None = None, shell: str = "bash"
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line) if point is None else point))
    assert cli.run(["-sc", f"query={shell}"]) == 0


def test_up_to_the_cursor(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer("optrun expl optimizer=lamb", monkeypatch, point=len("optrun expl"))
    assert capsys.readouterr() == ("explain\n", "")
    answer("optrun explain optimizer=la", monkeypatch, shell="fish")
    assert capsys.readouterr() == ("optimizer=lamb\noptimizer=lazy_adam\n", "")


ODD = [
    "",
    " ",
    "optrun",
    "optrun '",
    'optrun "x',
    "optrun a=b=c",
    "optrun ===",
    "optrun lr=[",
    "optrun ~",
    "optrun +",
    "optrun -cn nosuch training.",
    "optrun --config-dir nowhere optimizer=",
    "optrun -cn",
    "optrun --cfg",
    "optrun optimizer=nosuch optimizer.",
    "optrun évaluer",
    "optrun training.nosuch.deep=",
    "optrun explain ../../../../../../",
    "optrun hydra/nosuch=",
    "optrun lr.x",
    "optrun lr= =",
    "optrun $HOME/",
]


@pytest.mark.parametrize("line", ODD)
def test_nothing_but_an_answer(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", "x")
    assert cli.run(["-sc", "query=bash"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself(here: Path) -> None:
    """Through the function that `optrun -sc install=bash` installs, as bash calls it at a TAB."""
    program = here / "bin" / "optrun"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom optrun.cli.main import main\nmain()\n")
    program.chmod(0o755)
    script = """
PATH=$PWD/bin:$PATH
eval "$(optrun -sc install=bash)"
complete -p optrun
for COMP_LINE in "optrun explain optimizer=la" "optrun see" "optrun verify 'x" \
    "optrun data.train=./\\$("; do
  COMP_POINT=${#COMP_LINE} COMP_WORDS=($COMP_LINE) COMPREPLY=()
  COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
  hydra_bash_completion
  echo "${COMPREPLY[*]}"
done
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    registered, *answers = done.stdout.splitlines()
    assert "-F hydra_bash_completion optrun" in registered
    assert answers == [
        "optimizer=lamb optimizer=lazy_adam",
        "seed=",
        "",
        "",
    ]
    assert not (here / "taken").exists()
