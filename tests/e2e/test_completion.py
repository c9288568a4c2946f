"""The TAB key: verbs, recipes, choices, keys, values, paths.

Whatever stands in the line, no error in the prompt.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from optrun.cli import completion, hydra_options
from optrun.cli import main as cli
from optrun.cli.verbs import VERBS
from optrun.config import store

LINES = {
    # line up to the cursor: what is offered, or some of it
    "optrun ex": {"explain", "export"},
    "optrun expl": {"explain"},
    "python -m optrun expl": {"explain"},
    "optrun explain optimizer=la": {"optimizer=lamb", "optimizer=lazy_adam"},
    "optrun certify resume optimizer=la": {"optimizer=lamb", "optimizer=lazy_adam"},
    "optrun certify resu": {"resume", "resume="},
    "optrun -m optimizer=lamb,laz": {"optimizer=lamb,lazy_adam"},
    "optrun -cn std": {"stdlib_gpt"},
    "optrun explain --config-name std": {"stdlib_gpt"},
    "optrun --config-name=std": {"--config-name=stdlib_gpt"},
    "optrun --config-dir mine -cn eve": {"evening"},
    "optrun -cd mine optimizer=my": {"optimizer=mylamb"},
    "optrun --config-dir m": {"mine/"},
    "optrun evaluate out": {"outputs/", "out="},
    "optrun pred": {"predict"},
    "optrun predict out": {"outputs/", "out="},
    "optrun predict outputs data.eval=d": {"data.eval=dev.tsv"},
    "optrun predict outputs top": {"top_k="},
    "optrun evaluate outputs/": {"outputs/2026-01-01/"},
    "optrun verify outputs/2026-01-01/1": {"outputs/2026-01-01/10-00-00/"},
    "optrun report out": {"outputs/", "out="},
    "optrun report outputs met": {"metric="},
    "optrun evaluate outputs data.eval=d": {"data.eval=dev.tsv"},
    "optrun data=files data.train=tr": {"data.train=train.tsv"},
    "optrun -m data.train=train.tsv,d": {"data.train=train.tsv,dev.tsv"},
    "optrun model.path=mi": {"model.path=mine/"},
    "optrun resume=la": {"resume=latest"},
    "optrun resume=out": {"resume=outputs/"},
    "optrun hydra.run.dir=": {"hydra.run.dir=mine/", "hydra.run.dir=outputs/"},
    "optrun optimi": {"optimizer=", "optimizer."},
    "optrun see": {"seed="},
    "optrun training.max_st": {"training.max_steps="},
    "optrun explain training.max_st": {"training.max_steps="},
    "optrun optimizer=lamb optimizer.always": {"optimizer.always_adapt="},
    "optrun optimizer.always": set(),
    "optrun training.precision=": {
        "training.precision=fp32",
        "training.precision=bf16",
        "training.precision=fp16",
    },
    "optrun optimizer.fused=": {"optimizer.fused=true", "optimizer.fused=false"},
    "optrun model.config.n_la": {"model.config.n_layer="},
    "optrun hydra/swee": {"hydra/sweeper="},
    "optrun hydra/sweeper=op": {"hydra/sweeper=optuna"},
    "optrun explain --a": {"--all"},
    "optrun certify resume --steps ": set(),
    "optrun --cfg j": {"job"},
    "optrun export outputs optim": set(),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
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
    assert set(completion.candidates(line)) == LINES[line]


def test_the_options_are_those_of_hydras_parser() -> None:
    """Completion names them itself, since importing Hydra takes longer than answering."""
    known = {
        name: action for action in hydra_options.parser()._actions for name in action.option_strings
    }
    assert {*completion._TRAIN_OPTIONS, *completion._VALUES} - {completion.PLUGIN} <= set(known)
    for short, long in completion._LONG_OPTIONS.items():
        assert known[short] is known[long]
    for option, values in completion._VALUES.items():
        assert known[option].choices in (None, values)


def test_every_verb_and_group(here: Path) -> None:
    offered = set(completion.candidates("optrun "))
    assert set(VERBS) <= offered
    assert {f"{group}=" for group in store.GROUPS} <= offered
    for verb in VERBS:
        assert "--help" in completion.candidates(f"optrun {verb} -")


def test_no_file_is_a_command(here: Path) -> None:
    """Bash expands what it is offered."""
    offered = completion.candidates("optrun data.train=")
    assert set(offered) == {
        f"data.train={name}" for name in ("train.tsv", "dev.tsv", "mine/", "outputs/")
    }


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


def test_lines_cut_and_mixed_at_random(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    pieces = [word for line in LINES for word in line.split()[1:]] + [
        "'",
        "$(",
        "=",
        ".",
        "-",
        "--",
        "~x",
        "[",
        "{",
    ]
    for _ in range(25):
        line = "optrun " + " ".join(draw.sample(pieces, draw.randrange(1, 4)))
        answer(line[: draw.randrange(7, len(line) + 1)], monkeypatch)
        assert capsys.readouterr().err == ""


def test_a_broken_file_is_told_when_it_is_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine" / "evening.yaml").write_text("a: [1\n\tb: 2\n")
    answer("optrun --config-dir mine -cn evening training.", monkeypatch)
    assert capsys.readouterr() == ("\n", "")


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
for COMP_LINE in "optrun explain optimizer=la" "optrun evaluate out" "optrun -cn std" "optrun data.train=tr" \
    "optrun verify 'x" "optrun data.train=\\$("; do
  COMP_POINT=${#COMP_LINE} COMP_WORDS=($COMP_LINE) COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )) COMPREPLY=()
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
        "out= outputs/",
        "stdlib_gpt",
        "data.train=train.tsv",
        "",
        "",
    ]
    assert not (here / "taken").exists()
