"""Paths with blanks, `=`, brackets, quotes, any letters or a dash are taken as they stand by
every verb.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optrun.config.literal import parse_token, quote_path
from tests.running import TINY_BERT, optrun, summary, write_labelled

NAMES = [
    "my run",
    "a=b",
    "x[1]",
    'it\'s "q"',
    "ünï,c",
    "(p){q}",
    "-dash",
    "a;b#c&d",
    "1e5",
    "back\\slash",
    "'quoted'",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_means_the_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(parse_token(f"resume={quote_path(name)}").value()) == name
    Path(name).mkdir()
    for key in ("resume", "branch_from", "hydra.run.dir", "data.train", "data.eval.dev", "out"):
        assert parse_token(f"{key}={name}").value() == name
    assert parse_token(f"hydra.run.dir=new/{name}/x=y").value() == f"new/{name}/x=y"


def test_lists_and_several_values_stay_what_they_are() -> None:
    assert parse_token("data.train=[a.csv,b.csv]").value() == ["a.csv", "b.csv"]
    assert parse_token("data.train=a.csv,b.csv").is_sweep_override()
    assert parse_token("resume=null").value() is None
    assert parse_token("run_name=a,b").is_sweep_override()


def test_every_verb_and_every_command_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = '-it\'s [a]=(b), "ü"'
    Path("d,a t=a").mkdir()
    data = write_labelled(Path("d,a t=a"))
    words = [
        *TINY_BERT,
        "task=sequence_classification",
        "data=files",
        f"data.train={data}",
        "training.max_steps=1",
    ]
    assert optrun(*words, f"hydra.run.dir={name}") == 0
    shown = re.findall(
        r"^ +(?:resume|evaluate|export) +(optrun .+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert len(shown) == 3
    for line in shown:
        program, *rest = shlex.split(line.replace(" DEST", " exported"))
        assert (program, optrun(*rest)) == ("optrun", 0)
    assert summary(Path(name))["global_step"] > 1
    assert optrun(*shlex.split(summary(Path(name))["command"])[1:]) == 2
    said = capsys.readouterr().err
    advised = re.search(r"Continue it with (.*?), or choose", said)
    assert advised is not None
    assert optrun(*shlex.split(advised[1])) == 0
    assert optrun("evaluate", name) == 0
    assert optrun("predict", name, f"data.eval={data}", f"out={name}.csv") == 0
    assert optrun("verify", name) == optrun("report", name, f"out=page {name}") == 0
    assert optrun(f"branch_from={name}", f"hydra.run.dir={name} 2", "training.max_steps=9") == 0
    assert {f"{name}.csv", f"page {name}", f"{name} 2", "exported"} <= {
        p.name for p in tmp_path.iterdir()
    }
