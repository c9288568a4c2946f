"""Lines that Hydra's grammar does not have, or reads as something else: one message, whose advice works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optrun.cli.verbs import VERBS
from optrun.config import overrides, store
from tests.running import optrun

GRAMMAR = (
    "expecting {",
    "BRACKET",
    "EOF",
    "Lexer",
    "no viable",
    "mismatched",
    "while evaluating",
    "Traceback",
    "hydra.cc",
)
"""Words of the parser's grammar, which a person did not type."""

ADVISED = {
    "optimizer.betas=(0.9,0.99)": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=[0.9,0.99": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=[0.9;0.99]": "optimizer.betas=[0.9,0.99]",
    "optimizer.betas=0.9,0.99": "optimizer.betas=[0.9,0.99]",
    "model.config={n_layer:1,}": "model.config={n_layer:1}",
    "lr=1e-3,": "lr=1e-3",
    "lr =1e-3": "lr=1e-3",
    ' "lr"=1e-3': "lr=1e-3",
    "run_name=a=b": 'run_name="a=b"',
    "run_name=a(b)": 'run_name="a(b)"',
    "run_name=it's": 'run_name="it\'s"',
    "run_name=a,b": 'run_name="a,b"',
    "lr@x=1e-3": "lr=1e-3",
    "optimizer@x=lamb": "optimizer=lamb",
}

REFUSED = [
    "lr=foo(1)", "lr=range(a,b)", "lr=range()", "lr=range(1,2)", "lr=interval(1,)", "lr=interval(0,1)", "lr=choice()",
    "lr=choice(1,2)", "lr=tag(a,1)", "lr=sort(3,1)", "lr=shuffle(1,2)", "lr=int(a)", "lr=str(1", "lr=extend_list(1)",
    "lr=glob(*)", "optimizer=glob(zz*)", "optimizer=glob(ad*)", "optimizer=glob()", "optimizer=(adamw)",
    "optimizer={a:1}", "optimizer=[a,b]", "optimizer=", "optimizer=interval(0,1)", "~lr", "~optimizer", "~nosuch", "~",
    "++lr=abc", "+nosuch=1", "+++lr=1", "lr=", "==", 'lr="1', "lr='1", "run_name=${",  "lr=,1",
    "optimizer@x:y=lamb", "a b=1", "lr:1", "hydra=1", "model.config={n_layer 1}", "lr=1,2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert optrun(*words) == 2
    said = capsys.readouterr().err
    assert not [word for word in GRAMMAR if word in said], said
    assert said.count("optrun: error: ") == 1
    return said


@pytest.mark.parametrize("line", ADVISED)
def test_the_advised_line_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, line, "--cfg", "job")
    token = ADVISED[line]
    assert shlex.quote(token) in said
    assert optrun(token, "--cfg", "job") == 0


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_read_or_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, line, "--cfg", "job")
    advised = re.search(r"Did you mean ('.*?'|\S+)\?", said)
    if advised is not None and "=" in advised[1]:
        assert optrun(*shlex.split(advised[1]), "--cfg", "job") == 0


@pytest.mark.parametrize("line", ["lr=glob(*)", "optimizer=glob(zz*)", "lr=interval(1,2)", "hydra/launcher=glob(*)"])
def test_what_a_sweep_refuses(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refusal(capsys, "-m", line)


def test_a_sweep_over_a_glob_of_names() -> None:
    given = ["optimizer=glob([ad*,la*],exclude=ada*)", "lr=1e-3"]
    hydra = store.open_hydra()
    assert overrides.checked(hydra, "config", given, sweep=True) == ["optimizer=ademamix,lamb,lazy_adam", "lr=1e-3"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("before", [("--config-dir", "."), ("--json",)])
def test_options_before_a_verb_are_as_those_after_it(
    verb: str, before: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, said = [], []
    for words in ((*before, verb, "nowhere"), (verb, *before, "nowhere")):
        codes.append(optrun(*words))
        said.append(capsys.readouterr().err)
    assert codes == [2, 2]
    assert said[0] == said[1]
    assert "expected key=value. Did you mean the command" not in said[0]


def test_a_recipe_may_be_called_like_a_verb(tmp_path: Path) -> None:
    (tmp_path / "report.yaml").write_text("defaults: [config, _self_]\n")
    assert optrun("--config-dir", ".", "-cn", "report", "--cfg", "job") == 0
