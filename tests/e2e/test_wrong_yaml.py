"""A user's own YAML that is wrong.

One message with file, line, key and value, exit code 2, and nothing begun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from optrun.base.errors import ConfigError
from optrun.config import store, yaml_files
from optrun.config.groups import default_values
from tests.running import optrun

RECIPE = ["-cn", "rec"]
CHOICE = ["optimizer=mine"]
SEARCH = ["-m", "hydra/sweeper=mine", "lr=1e-3,2e-3"]
OWN = "optimizer/mine"
LIES = {"rec": RECIPE, OWN: CHOICE, "hydra/sweeper/mine": SEARCH}
BASE = "defaults: [config, _self_]\n"
LAMB = "defaults: [lamb, _self_]\n"
SWEEP = BASE + "hydra:\n  mode: MULTIRUN\n  sweeper:\n"

WRONG: dict[str, tuple[str, str | bytes, int | None, list[str]]] = {
    # case: file, text, line of the message, its pieces
    "misspelt key of a choice": (
        OWN,
        LAMB + "betsa: [0.9, 0.99]\n",
        2,
        ["optimizer.betsa", "betas?"],
    ),
    "misspelt key of a recipe": (
        "rec",
        BASE + "training:\n  max_step: 3\n",
        3,
        ["training.max_step", "max_steps?"],
    ),
    "a name from elsewhere": (
        "rec",
        BASE + "learning_rate: 1e-3\n",
        2,
        ["learning_rate", "called lr"],
    ),
    "a key of another group": (
        "optimizer/mine",
        LAMB + "max_steps: 3\n",
        2,
        ["optimizer.max_steps", "training.max_st"],
    ),
    "another choice's key": (
        "rec",
        BASE + "optimizer: {l1: 0.1}\n",
        2,
        ["optimizer.l1", "optimizer=lamb"],
    ),
    "code in a choice": (
        OWN,
        LAMB + "_target_: os.system\n",
        2,
        ["_target_=os.system", "names code"],
    ),
    "code in a recipe": (
        "rec",
        BASE + "data: {_target_: os.system}\n",
        2,
        ["data._target_=os.system", "names code"],
    ),
    "a python object": (
        "rec",
        BASE + "lr: !!python/object/apply:os.system [ls]\n",
        2,
        ["no valid YAML", "os.system"],
    ),
    "brackets left open": (
        OWN,
        "defaults: [lamb\nbetas: [0.9\n",
        2,
        ["no valid YAML", "',' or ']'"],
    ),
    "a tab": ("rec", BASE + "training:\n\tmax_steps: 3\n", 3, ["no valid YAML", "a tab"]),
    "a key twice": ("rec", BASE + "lr: 1e-3\nlr: 2e-3\n", 3, ["no valid YAML", "duplicate key lr"]),
    "an alias of nothing": ("rec", BASE + "run_name: *nosuch\n", 2, ["no valid YAML", "nosuch"]),
    "two documents": ("rec", BASE + "---\nlr: 1\n", 2, ["no valid YAML", "another document"]),
    "not UTF-8": ("rec", BASE.encode() + b"run_name: \xe9\n", 2, ["not UTF-8", "0xe9"]),
    "a NUL": ("rec", BASE + "run_name: \0\n", None, ["no valid YAML", "#x0000"]),
    "a list": ("rec", "- config\n- lr\n", None, ["keys and values"]),
    "a word": ("rec", "hello\n", None, ["expected keys and values", "defaults: [config, _self_]"]),
    "an empty recipe": (
        "rec",
        "",
        None,
        ["expected keys and values", "defaults: [config, _self_]"],
    ),
    "an empty choice": (
        "optimizer/mine",
        "# to be written\n",
        None,
        ["expected keys and values", "defaults: [lamb, _self_]"],
    ),
    "values without a recipe": ("rec", "lr: 1e-3\n", None, ["not built on `config`"]),
    "a word for a number": (
        "rec",
        BASE + "training: {max_steps: many}\n",
        2,
        ["max_steps=many", "a whole number"],
    ),
    "a word for a number in a choice": (
        "optimizer/mine",
        LAMB + "eps: small\n",
        2,
        ["optimizer.eps=small", "a number"],
    ),
    "null for a number": ("rec", BASE + "lr: null\n", 2, ["lr=null", "not null"]),
    "out of range": ("rec", BASE + "lr: -1\n", 2, ["lr=-1", "above 0"]),
    "a choice as a value": (
        "rec",
        BASE + "optimizer: lamb\n",
        2,
        ["optimizer=lamb", "override optimizer: lamb"],
    ),
    "no schema": (
        "optimizer/mine",
        "name: lamb\nbetas: [0.9, 0.99]\n",
        2,
        ["names no choice of optimizer", "[lamb, _self_]"],
    ),
    "a schema that does not exist": (
        "optimizer/mine",
        "defaults: [lam_schema]\n",
        None,
        ["optimizer=lam_schema", "no such optimizer"],
    ),
    "a default that does not exist": (
        "rec",
        "defaults:\n- config\n- override optimizer: lam\n",
        None,
        ["=lam:", "lamb?"],
    ),
    "an override of no group": (
        "rec",
        "defaults:\n- config\n- override optimzer: lamb\n",
        None,
        ["optimzer", "No match in the defaults list"],
    ),
    "a group of one's own": (
        "rec",
        "defaults:\n- config\n- extra: x\n",
        None,
        ["extra=x", "no such extra"],
    ),
    "a choice made twice": (
        "rec",
        "defaults:\n- config\n- optimizer: lamb\n",
        None,
        ["Multiple values for optimizer"],
    ),
    "an override before what it overrides": (
        "rec",
        "defaults: [override optimizer: lamb, config]\n",
        None,
        ["before"],
    ),
    "defaults that are no list": (
        "rec",
        "defaults: config\nlr: 1e-3\n",
        None,
        ["defaults", "a list"],
    ),
    "defaults in a circle": (
        OWN,
        "defaults: [mine, _self_]\n",
        None,
        ["optimizer/mine", "themselves"],
    ),
    "an unset variable": (
        "rec",
        BASE + "run_name: ${oc.env:NOSUCH}\n",
        2,
        ["run_name=${oc.env:NOSUCH}", "not set"],
    ),
    "an unset variable in a path": (
        "rec",
        BASE + "hydra: {run: {dir: '${oc.env:NOSUCH}'}}\n",
        2,
        ["NOSUCH"],
    ),
    "an interpolation to nothing": (
        "rec",
        BASE + "lr: ${optimizer.defaultlr}\n",
        2,
        ["defaultlr", "default_lr?"],
    ),
    "an interpolation to itself": (
        "rec",
        BASE + "run_name: ${run_name}\n",
        2,
        ["run_name=${run_name}", "itself"],
    ),
    "an interpolation in a circle": (
        "rec",
        BASE + "run_name: ${resume}\nresume: ${run_name}\n",
        3,
        ["${run_", "itself"],
    ),
    "an interpolation left open": (
        "rec",
        BASE + "run_name: ${nosuch\n",
        None,
        ["${nosuch"],
    ),
    "an unknown resolver": ("rec", BASE + "run_name: ${no.such:3}\n", 2, ["no resolver no.such"]),
    "two choices of a group": (
        "rec",
        "defaults:\n- config\n- override optimizer: [lamb, sgd]\n",
        None,
        ["SGDConfig"],
    ),
    "a number as a default": ("rec", "lr: 1\ndefaults: [3]\n", None, ["defaults", "int"]),
    "_self_ twice": ("rec", "defaults: [config, _self_, _self_]\n", None, ["_self_"]),
    "an item of a list": (
        "rec",
        BASE + "optimizer:\n  betas:\n  - 0.9\n  - b\n",
        5,
        ["optimizer.betas[1]=b"],
    ),
    "brackets by the thousand": (
        "rec",
        f"run_name: {'[' * 1000}{']' * 1000}\n",
        None,
        ["nested more than"],
    ),
    "a value of 100,000 letters": (
        "rec",
        BASE + f"lr: {'x' * 100_000}\n",
        2,
        ["lr=xxx", "...: expected a number"],
    ),
    "a place that is no place": ("rec", BASE + "hydra: {searchpath: ['s3://x']}\n", None, ["s3"]),
    "a key of Hydra's": ("rec", BASE + "hydra: {run: {dirr: x}}\n", 2, ["hydra.run.dirr", "dir?"]),
    "a folder that is not there": (
        "rec",
        BASE + "hydra: {searchpath: [nowhere]}\n",
        2,
        ["nowhere", "no such folder"],
    ),
    # Sweeps.
    "a misspelt key to sweep over": (
        "rec",
        SWEEP + "    params: {training.max_step: '1,2'}\n",
        5,
        ["max_steps?"],
    ),
    "a choice to sweep over": (
        "rec",
        SWEEP + "    params: {optimizer: 'lam,adamw'}\n",
        5,
        ["optimizer=lam:", "lamb?"],
    ),
    "a value to sweep over": (
        "rec",
        SWEEP + "    params:\n      lr: a,b\n",
        6,
        ["lr=a", "a number"],
    ),
    "a list to sweep over": (
        "rec",
        SWEEP + "    params: {lr: [1, 2]}\n",
        5,
        ["params.lr=[1, 2]", "'1e-3,2e-3'"],
    ),
    "params as a list": (
        "rec",
        SWEEP + "    params: [lr]\n",
        5,
        ["hydra.sweeper.params", "a mapping"],
    ),
    "grids as a mapping": (
        "rec",
        SWEEP + "    grids: {optimizer: lamb}\n",
        5,
        ["hydra.sweeper.grids", "a list"],
    ),
    "what no grammar has": (
        "rec",
        SWEEP + "    params: {lr: 'foo(1)'}\n",
        5,
        ["lr=foo(1)", "cannot be read"],
    ),
    "a key that is none": (
        "rec",
        SWEEP + "    params: {l r: '1,2'}\n",
        5,
        ["l r=1,2", "cannot be read"],
    ),
    "an unset variable to sweep over": (
        "rec",
        SWEEP + "    params: {lr: '${oc.env:NOSUCH}'}\n",
        5,
        ["NOSUCH is not"],
    ),
    "a sampler as a choice": (
        "rec",
        (
            "defaults:\n- config\n- override hydra/sweeper: optuna\n- override"
            " hydra/sweeper/sampler: tpe\n"
        ),
        None,
        ["hydra/sweeper/sampler", "No match in the defaults list"],
    ),
    "a misspelt key of a grid": (
        "rec",
        SWEEP + "    grids:\n    - {optimzer: lamb}\n",
        6,
        ["optimzer", "optimizer?"],
    ),
    "a habit of another sweeper": (
        "rec",
        SWEEP + "    study_name: x\n",
        5,
        ["study_name", "Not offered"],
    ),
    "another mode": (
        "rec",
        BASE + "hydra: {mode: MULTI}\n",
        2,
        ["hydra.mode=MULTI", "RUN, MULTIRUN"],
    ),
    "another sweeper": (
        "rec",
        "defaults:\n- config\n- override hydra/sweeper: optun\n",
        None,
        ["optun", "optuna?"],
    ),
    "a sweeper of one's own": (
        "hydra/sweeper/mine",
        "defaults: [grid, _self_]\nparms: {}\n",
        2,
        ["parms", "params?"],
    ),
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOSUCH", raising=False)
    return tmp_path / "mine"


def write(mine: Path, name: str, text: str | bytes) -> None:
    path = mine / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one message of a refused command."""
    assert optrun("--config-dir", "mine", *words) == 2
    said = capsys.readouterr()
    (message,) = said.err.splitlines()
    assert said.out == ""
    assert [path.name for path in Path().iterdir()] == ["mine"]
    return message.removeprefix("optrun: error: ")


@pytest.mark.parametrize("case", WRONG)
def test_one_message(case: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, line, pieces = WRONG[case]
    write(mine, name, text)
    message = told(capsys, *LIES[name])
    place = f"mine/{name}.yaml"
    assert message.startswith(f"{place}: " if line is None else f"{place}, line {line}: ")
    for piece in pieces:
        assert piece in message


@pytest.mark.parametrize(
    "words", [["--cfg", "job"], ["--info"], ["--help"], ["explain"]], ids=" ".join
)
def test_whatever_is_asked(
    words: list[str], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(mine, "rec", BASE + "training:\n\tmax_steps: 3\n")
    verb = [word for word in words if word == "explain"]
    options = [word for word in words if word != "explain"]
    assert optrun(*verb, "--config-dir", "mine", "-cn", "rec", *options) == 2
    assert "optrun: error: mine/rec.yaml, line 3: no valid YAML" in capsys.readouterr().err


def test_circles_over_several_files(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(mine, "rec", "defaults: [config, other, _self_]\n")
    write(mine, "other", "defaults: [rec, _self_]\n")
    assert "mine/other.yaml: the defaults lists lead back to themselves" in told(
        capsys, "-cn", "rec"
    )


def test_own_recipes_are_among_the_nearest_names(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(mine, "evening", BASE)
    assert "Did you mean evening?" in told(capsys, "-cn", "evenin")


def test_a_file_that_may_not_be_read(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(mine, "rec", BASE)
    hydra = store.open_hydra(str(mine))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(mine / "rec.yaml"))

    monkeypatch.setattr(yaml_files.ConfigRepository, "load_config", refuse)
    with pytest.raises(ConfigError, match=r"mine/rec\.yaml: cannot be read: Permission denied\."):
        store.compose(hydra, "rec", [])


def test_the_command_line_is_not_looked_for_in_a_file(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where both say something, the value that counts is the one that was typed."""
    write(mine, "rec", BASE + "lr: 1e-3\n")
    assert told(capsys, "-cn", "rec", "lr=-1").startswith("lr=-1")


def test_a_file_that_leaves_out_self_counts(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(mine, "rec", "defaults: [config]\nseed: 7\n")
    assert optrun("--config-dir", "mine", "-cn", "rec", "--cfg", "job") == 0
    said = capsys.readouterr()
    assert "seed: 7" in said.out
    assert said.err == ""


def test_a_line_is_found_through_aliases_that_repeat_themselves(mine: Path) -> None:
    """Each alias is looked at once.

    Nine levels of nine would be hundreds of millions of entries.
    """
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    write(mine, "rec", f"a0: &a0 [x]\n{levels}lr: 1\n")
    assert yaml_files.line_of(mine / "rec.yaml", "lr") == 11


def test_an_option_that_is_left_out_has_the_default_of_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine", "optimizer").mkdir(parents=True)
    Path("mine/optimizer/mine.yaml").write_text(
        "defaults: [sgd_schema, _self_]\nname: sgd\nmomentum: 0\n"
    )
    assert optrun("--config-dir", "mine", "optimizer=mine", "--cfg", "job", "--resolve") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["optimizer"]["default_lr"] == default_values("optimizer", "sgd")["default_lr"]
