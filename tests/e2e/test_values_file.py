"""`-cn FILE.yaml`: a person's own values over the default, from any folder, no defaults list."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from optrun.base.errors import ConfigError
from optrun.config.request import CommandLine
from tests.running import optrun, summary

MINE = """\
optimizer: lamb
lr: 1e-2
training:
  max_steps: 3
scheduler: {name: linear, min_lr: 1e-4}
model.config: {n_layer: 1}
run_name: an evening, 'quoted'
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file in a folder that is not the current one."""
    (tmp_path / "own").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "own/mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path / "here")
    return "../own/mine.yaml"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert optrun("--cfg", "job", *words) == 0
    values: dict = yaml.safe_load(capsys.readouterr().out)
    return values


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert optrun(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("option", ["-cn", "--config-name"])
def test_its_values_stand_over_the_default(
    option: str, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = shown(capsys, option, mine)
    assert values["optimizer"]["name"] == "lamb"
    assert values["lr"] == 1e-2
    assert values["training"]["max_steps"] == 3
    assert (values["scheduler"]["name"], values["scheduler"]["min_lr"]) == ("linear", 1e-4)
    assert (values["model"]["config"]["n_layer"], values["model"]["config"]["n_head"]) == (1, 4)
    assert values["run_name"] == "an evening, 'quoted'"


def test_the_command_line_wins(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = shown(capsys, "-cn", mine, "optimizer=adamw", "lr=5e-3", "training.num_train_epochs=2")
    assert (values["optimizer"]["name"], values["lr"]) == ("adamw", 5e-3)
    assert (values["training"]["max_steps"], values["training"]["num_train_epochs"]) == (None, 2)


def test_a_run_with_it_goes_on_with_the_same_line(mine: str) -> None:
    line = [
        "-cn",
        mine,
        "hydra.run.dir=run",
        "resume=auto",
        "training.per_device_train_batch_size=2",
    ]
    assert optrun(*line, "training.max_seconds=1e-9") == 75
    assert optrun(*line, "training.max_seconds=null") == 0
    assert "optimizer=lamb" in summary(Path("run"))["overrides"]
    assert summary(Path("run"))["global_step"] == 3
    card = Path("run/model/README.md").read_text()
    assert f"optrun -cn {mine} " in card
    folded = card[card.index("<details>") : card.index("</details>")]
    assert f"\n\n```yaml\n{MINE}```\n\n" in folded, "the command can be repeated"


def test_a_file_with_a_defaults_list_is_a_recipe(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(mine).write_text("defaults: [config, override optimizer: sgd, _self_]\nlr: 3e-3\n")
    values = shown(capsys, "-cn", mine)
    assert (values["optimizer"]["name"], values["lr"]) == ("sgd", 3e-3)


@pytest.mark.parametrize(
    "words", [["mine.yaml"], ["--config", "mine.yaml"], ["--config=mine.yaml"]]
)
def test_other_spellings_are_answered_with_the_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "-cn " in refused(capsys, *words)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("lr: 1e-3\nlrr: 1\n", ["mine.yaml, line 2: lrr: no such key", "Did you mean lr?"]),
        ("training:\n  max_step: 1\n", ["mine.yaml, line 2", "training.max_steps"]),
        ("seed: 1\nlr: -1\n", ["mine.yaml, line 2: lr=-1", "above 0"]),
        ("optimizer: lam\n", ["optimizer=lam", "Did you mean lamb?"]),
        ("lr: [\n", ["mine.yaml, line 2", "no valid YAML"]),
        ("- lr\n", ["mine.yaml", "keys and values"]),
        ("", ["mine.yaml", "keys and values"]),
        ("run_name: 1_0\n", ["mine.yaml, line 1: run_name: 1_0", "Quote it"]),
        ("model: {trust_remote_code: true}\n", ["trust_remote_code", "on the command line"]),
    ],
)
def test_what_is_wrong_in_it_is_told_with_its_line(
    text: str, facts: list[str], mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(mine).write_text(text)
    message = refused(capsys, "-cn", mine)
    for fact in facts:
        assert fact in message


def test_a_file_that_is_not_there(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "-cn", mine.replace("mine", "min"))
    assert "no such file" in message
    assert f"Did you mean {mine}?" in message
    with pytest.raises(ConfigError, match="no such file"):
        CommandLine.of([], [], "nowhere/mine.yaml")


def test_what_went_is_refused_with_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-cn FILE.yaml" in refused(capsys, "experiment=evening")
    assert "a run has one tracking" in refused(capsys, "tracking=[tensorboard,wandb]")
