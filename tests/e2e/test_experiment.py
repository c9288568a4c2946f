"""`experiment=NAME`.

A file of the user's own, written as the lightning-hydra-template writes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from optrun.base.plain import PlainDict
from optrun.config import saved
from tests.running import TINY_GPT, optrun, write_text

EXAMPLE = """# @package _global_

# to execute this experiment run:
# optrun experiment=example

defaults:
  - override /optimizer: lamb
  - override /scheduler: linear

# all parameters below will be merged with parameters from default configurations set above
seed: 12345
lr: 2e-3
training:
  max_steps: 2
optimizer:
  weight_decay: 0.1
"""
FILES = {
    "example": EXAMPLE,
    "second": EXAMPLE.replace("lamb", "sgd"),
    "sub/more": "# @package _global_\nlr: 3e-3\n",
    "bare": "lr: 3e-3\n",
    "trainer": "# @package _global_\ndefaults:\n  - override /trainer: gpu\n",
    "tags": "# @package _global_\nlr: 1e-3\ntags: [a]\n",
    "range": "# @package _global_\nlr: -1\n",
}
OWN = ["--config-dir", "my", *TINY_GPT, "data=files", "data.train=corpus.txt"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 60)
    Path("my/experiment/sub").mkdir(parents=True)
    for name, text in FILES.items():
        Path(f"my/experiment/{name}.yaml").write_text(text)


def chosen(values: PlainDict) -> tuple[object, ...]:
    names = [values[group]["name"] for group in ("optimizer", "scheduler")]
    return (*names, values["optimizer"].get("weight_decay"), values["lr"], values["seed"])


def test_its_choices_and_values_are_those_of_the_run_and_the_command_line_wins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optrun(*OWN, "experiment=example", "hydra.run.dir=a") == 0
    assert chosen(saved.read_config(Path("a/config.yaml"))) == ("lamb", "linear", 0.1, 2e-3, 12345)
    for words, expected in (
        (
            ["experiment=example", "optimizer=adamw", "lr=1e-4"],
            ("adamw", "linear", 0.1, 1e-4, 12345),
        ),
        (["experiment=[example,sub/more]"], ("lamb", "linear", 0.1, 3e-3, 12345)),
    ):
        capsys.readouterr()
        assert optrun(*OWN, *words, "--cfg", "job", "--resolve") == 0
        assert chosen(yaml.safe_load(capsys.readouterr().out)) == expected


def test_the_same_line_goes_on_and_another_experiment_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [*OWN, "experiment=example", "hydra.run.dir=a", "resume=auto"]
    assert optrun(*line) == 0
    assert optrun(*line, "training.max_steps=3") == 0
    assert json.loads(Path("a/summary.json").read_text())["global_step"] == 3
    assert chosen(saved.read_config(Path("a/config.yaml"))) == ("lamb", "linear", 0.1, 2e-3, 12345)
    assert optrun(*OWN, "experiment=second", "resume=a") == 2
    assert "goes on with the configuration it has" in capsys.readouterr().err
    Path("a/summary.json").unlink()
    assert optrun(*OWN, "experiment=second", "resume=a") == 2
    assert "does not say that it began with this" in capsys.readouterr().err


def test_a_sweep_over_experiments(forked_jobs: None) -> None:
    assert optrun("-m", *OWN, "experiment=example,second", "lr=1e-3,2e-3", "hydra.sweep.dir=s") == 0
    assert sorted(path.name.rpartition("-")[0] for path in Path("s").glob("*-seed*")) == [
        "lamb-lr0.001-seed12345",
        "lamb-lr0.002-seed12345",
        "sgd-lr0.001-seed12345",
        "sgd-lr0.002-seed12345",
    ]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("experiment=exmple", ["Did you mean example?", "second"]),
        ("experiment=sub/mre", ["Did you mean sub/more?"]),
        ("experiment=bare", ["my/experiment/bare.yaml, line 1", "# @package _global_"]),
        (
            "experiment=trainer",
            ["my/experiment/trainer.yaml, line 3", "override trainer", "tracking or training"],
        ),
        ("experiment=tags", ["my/experiment/tags.yaml, line 3", "tags: no such key"]),
        ("experiment=range", ["my/experiment/range.yaml, line 2", "lr=-1"]),
        ("experiment=[example,example]", ["example is given twice"]),
        ("experiment=null", ["experiment=null", "example"]),
        ("+experiment=example", ["Write experiment=NAME"]),
        ("~experiment", ["Write experiment=NAME"]),
        ("experiment=example,second", ["Add -m"]),
        ("experiment=example optimizer.momentum=1", ["optimizer=sgd", "optimizer=lamb has"]),
        ("experiment.lr=1", ["experiment.lr: no such key"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    words: str, facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*OWN, *words.split()) == 2
    said = capsys.readouterr().err
    assert [fact for fact in facts if fact not in said] == [], said


def test_without_a_folder_the_answer_says_where_it_would_lie(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optrun("experiment=mine") == 2
    said = capsys.readouterr().err
    assert "DIR/experiment/mine.yaml" in said
    assert "--config-dir DIR" in said
