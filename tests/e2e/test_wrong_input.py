"""Each wrong input gives one readable message that names key and value, and exit code 2.

Nothing is left behind.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from optrun import __version__
from optrun.cli.verbs import VERBS
from tests.running import TINY_BERT, TINY_GPT, optrun, write_labelled

CLASSIFY = [*TINY_BERT, "task=sequence_classification", "data=files"]

COMMAND_LINE = [
    # words, pieces of the message
    (["optimizer=lam"], ["optimizer=lam", "lamb", "adamw"]),
    (["lr=-1"], ["lr=-1", "above 0"]),
    (["model.config.n_layer=0"], ["model.config.n_layer=0", "1 or more"]),
    (
        ["model=bert_tiny", "task=masked_lm", "model.config.hidden_size=-8"],
        ["model.config.hidden_size=-8", "1 or more"],
    ),
    (["=3"], ["'=3'", "key=value"]),
    (["run_name=a=b"], ["run_name=a=b", "cannot be read", "'run_name=\"a=b\"'"]),
    (["learning_rate=1e-3"], ["learning_rate", "called lr"]),
    (["training.max_steps=0"], ["training.max_steps=0", "1 or more"]),
    (["training.device=tpu"], ["training.device=tpu", "cuda"]),
    (
        ["model.attn_implementation=spda"],
        ["model.attn_implementation=spda", "no attention of this name", "sdpa"],
    ),
    (
        ["model.attn_implementation=flex_attention", "training.device=cpu"],
        ["flex_attention", "CUDA", "sdpa"],
    ),
    (
        ["model.attn_implementation=flash_attention_2"],
        ["flash_attention_2", "CUDA", "sdpa"],
    ),
    (["training.device=cuda:7"], ["training.device=cuda:7", "no such device"]),
    (["lr=1e-3,2e-3"], ["lr=1e-3,2e-3", "-m"]),
    (["-m", "lr=1e-3,abc"], ["lr=abc", "a number"]),
    (["lr=1e-3", "lr=2e-3"], ["lr", "twice"]),
    (["trian"], ["trian", "key=value"]),
    (["--confg", "job"], ["--confg", "--cfg"]),
    (["explain", "--optim=lamb"], ["explain --optim", "written optimizer=NAME"]),
    (["report", ".", "--out", "x"], ["report --out", "written out=x"]),
    (["-cn", "sst3"], ["sst3", "sst2_minilm"]),
    (["--cfg", "job", "-p", "optimzer"], ["--package optimzer", "Did you mean optimizer?"]),
    (["-sc", "install=tcsh"], ["install=tcsh", "bash, fish, zsh"]),
    (["-sc", "query=bash"], ["query=bash", "COMP_LINE"]),
    (["explain", "resume=x"], ["resume=x", "Leave it out"]),
    (["resume=laest"], ["resume=laest", "Did you mean resume=latest?"]),
    (["--config-dir", "nowhere"], ["nowhere", "no such folder"]),
    (
        ["-m", "seed=0,1", "lr=1e-3", "--cfg", "job"],
        ["--cfg job", "seed=0,1 is several", "one of its values"],
    ),
    (["--cfg", "job", "resume=latest"], ["resume: --cfg", "its config.yaml"]),
    (
        ["explain", "-cn", "stdlib_gpt", "--config-name", "x"],
        ["explain --config-name is given twice"],
    ),
    (["certify", "resume", "--steps", "2", "--steps=3"], ["certify --steps is given twice"]),
    (["report", ".", "baseline="], ["report baseline=: a value is missing"]),
    (["report", ".", "metric=a", "metric=b"], ["report: metric is given twice"]),
    (["explain", "--config-name="], ["explain --config-name: a value is missing"]),
    (["-m", "lr=1,2", "run_name=${nosuch}"], ["run_name=${nosuch}", "there is no key nosuch"]),
    (["model=pretrained", "model.path=no/such"], ["model.path=no/such"]),
    (["model=from_config", "model.model_type=gpt3"], ["gpt3", "gpt2"]),
    (
        ["data=files", "data.train=nope.txt", "model.config.n_layr=3"],
        ["model.config.n_layr", "n_layer"],
    ),
    (
        ["data=files", "data.train=nope.txt", "model=from_config", "model.model_type=gtp2"],
        ["gtp2", "gpt2"],
    ),
    (["data=files", "data.train=nope.txt", "task=masked_lm"], ["AutoModelForMaskedLM", "gpt2"]),
    (
        ["data=files", "data.train=nope.txt", "model=pretrained", "model.path=/no/such"],
        ["/no/such: no such local folder"],
    ),
    (
        ["data=files", "data.train=nope.txt", "model=pretrained", "model.path=no/such/x"],
        ["no/such/x: no such local folder"],
    ),
    (["model.config.n_layr=3"], ["model.config.n_layr", "n_layer"]),
    (["checkpoint.metric=eval/acuracy"], ["eval/acuracy", "eval/accuracy"]),
    (["resume=nowhere"], ["resume=nowhere", "no such directory"]),
    (["resume=."], ["resume=.", "neither a run directory nor a checkpoint"]),
    (["hydra.run.dir=full"], ["hydra.run.dir=full", "not empty"]),
    (["explain", "hydra.run.dir=x"], ["hydra.run.dir=x", "no effect"]),
    (["explain", "hydra/launcher=joblib"], ["hydra/launcher=joblib", "no effect"]),
    (["evaluate", "full", "lr=0.1"], ["lr=0.1", "no effect on an evaluation", "training.device"]),
    (
        ["evaluate", "full", "training.max_steps=3"],
        ["training.max_steps=3", "no effect on an evaluation"],
    ),
    (["evaluate", "full", "resume=latest"], ["resume=latest", "no effect on an evaluation"]),
    (["evaluate", "full", "hydra.run.dir=x"], ["hydra.run.dir=x", "no effect on an evaluation"]),
    (["verify", "full", "lr=0.1"], ["verify lr=0.1", "no key=value"]),
    (["export", "full", "x", "lr=0.1"], ["export lr=0.1", "Valid: merge, private, push_to_hub"]),
    (["certify", "resume", "hydra/launcher=joblib"], ["hydra/launcher=joblib", "leave it out"]),
    (["hydra.sweep.dir=x", "lr=1e-3"], ["hydra.sweep.dir=x", "no effect on a single run", "-m"]),
    (["hydra/sweeper=optuna", "lr=1e-3"], ["hydra/sweeper=optuna", "no effect on a single run"]),
    (["-m", "hydra.run.dir=x", "lr=1e-3,2e-3"], ["hydra.run.dir=x", "hydra.sweep.dir"]),
    (["-m", "resume=latest", "lr=1e-3,2e-3"], ["resume continues one run"]),
    (["explain", "--jsn"], ["explain --jsn", "Did you mean --json?"]),
    (["explain", "--json=1"], ["explain --json", "ignored explicit argument '1'"]),
    (["certify", "resume", "--steps", "-3"], ["--steps -3", "a whole number"]),
    (["evaluate"], ["expected optrun evaluate RUN_DIR|CHECKPOINT"]),
    (["evaluate", "nowhere"], ["nowhere", "no such directory"]),
    (["verify", "."], ["neither a run directory nor a checkpoint"]),
    (["export", "x"], ["expected optrun export RUN_DIR|CHECKPOINT DEST"]),
    (["report", "nowhere"], ["nowhere", "no such directory"]),
    (["report", ".", "metrc=x"], ["metrc", "metric"]),
    (
        ["task=causal_lm", "data=files", "data.train=train.csv", "data.label_column=label"],
        ["data.label_column", "does not use this key"],
    ),
    (["data=hub", "data.path=no/such"], ["data.path=no/such"]),
    (["data.max_length=512", "model.config.n_positions=64"], ["data.max_length=512", "64"]),
    (["a" * 5000], ["expected key=value", "Commands: "]),
]
FILES = [
    (["data.train=nope.csv"], ["data.train=nope.csv", "no such file"]),
    (["data.train=trian.csv"], ["data.train=trian.csv", "Did you mean", "train.csv?"]),
    (["data.train=*.parquet"], ["data.train=*.parquet", "no file matches"]),
    (["data.train=empty.csv"], ["data.train=empty.csv", "empty"]),
    (["data.train=header.csv"], ["data.train=header.csv", "no rows"]),
    (["data.train=train.xyz"], ["data.train=train.xyz", "unknown format", ".csv"]),
    (["data.train=full"], ["data.train=full", "folder"]),
    (
        ["data.train=train.csv", "data.text_column=txet"],
        ["data.text_column=txet", "text, label", "Did you mean text?"],
    ),
    (
        ["data.train=train.csv", "data.label_column=lable"],
        ["data.label_column=lable", "text, label"],
    ),
    (
        ["data.train=train.csv", "data.text_pair_column=other"],
        ["data.text_pair_column=other", "text, label"],
    ),
    (["data.train=train.csv", "data.eval=unseen.csv"], ["'sometimes'", "even, odd"]),
    (["data.train=one.csv"], ["one label only", "even"]),
    (
        ["data.train=train.csv", "task.problem_type=regression"],
        ["'even'", "label", "finite numbers"],
    ),
    (["data.train=[]"], ["data.train", "a path"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_labelled(tmp_path, rows=12)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "train.xyz").write_text("text,label\n")
    (tmp_path / "unseen.csv").write_text("text,label\nthe fox,even\na dog,sometimes\n")
    (tmp_path / "one.csv").write_text("text,label\nthe fox,even\na dog,even\nan owl,even\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    return tmp_path


def refused(
    words: list[str], pieces: list[str], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert optrun(*words) == 2
    said = capsys.readouterr()
    message = [line for line in said.err.splitlines() if line.startswith("optrun: error: ")]
    assert len(message) == 1, said.err
    assert "Traceback" not in said.err
    for piece in pieces:
        assert piece in message[0]
    made = {path.name for path in folder.iterdir()} - set(before)
    assert made <= {"outputs"}
    assert not list(folder.glob("outputs/*/*"))
    assert (folder / "full" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "pieces"),
    COMMAND_LINE,
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_command_line(
    words: list[str], pieces: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(words, pieces, capsys, folder)


@pytest.mark.parametrize(
    ("words", "pieces"), FILES, ids=lambda case: " ".join(case) if isinstance(case, list) else ""
)
def test_files(
    words: list[str], pieces: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([*CLASSIFY, *words], pieces, capsys, folder)


def test_the_mended_command_gets_its_directory(folder: Path) -> None:
    words = [*CLASSIFY, "hydra.run.dir=run", "training.max_steps=1"]
    assert optrun(*words, "data.train=nope.csv") == 2
    assert optrun(*words, "data.train=train.csv") == 0


def test_a_run_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CLASSIFY, "data.train=train.csv", "hydra.run.dir=run", "training.max_steps=1"]
    assert optrun(*words) == 0
    before = (folder / "run" / "summary.json").read_bytes()
    capsys.readouterr()
    assert optrun(*words, "lr=5e-4") == 2
    assert "there is a run in it already" in capsys.readouterr().err
    assert (folder / "run" / "summary.json").read_bytes() == before


def test_a_run_goes_on_with_its_own_recipe(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*CLASSIFY, "data.train=train.csv", "hydra.run.dir=run", "training.max_steps=1"]
    assert optrun(*words) == 0
    assert optrun("-cn", "stdlib_gpt", "resume=run") == 2
    assert "-cn stdlib_gpt: the run in run began with config" in capsys.readouterr().err
    assert optrun("-cn", "config", "resume=run") == 0


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_its_help(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(verb, "nowhere", "--help") == optrun(verb, "-h") == 0
    text = capsys.readouterr().out
    parser = importlib.import_module(f"optrun.cli.{verb}").parser()
    for key in parser.keys:
        assert f"[{key}=" in text
    for action in parser._actions:
        assert all(option in text for option in action.option_strings)


def test_the_version_is_optruns(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("--version") == optrun("lr=1e-3", "--version") == 0
    assert capsys.readouterr().out == f"optrun {__version__}\n" * 2


def test_no_permission(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A place where nothing can be made, whoever asks: below a file."""
    code = optrun(*TINY_GPT, "data=files", "data.train=train.csv", "hydra.run.dir=train.csv/run")
    assert code in (2, 74)
    said = capsys.readouterr().err
    assert "train.csv" in said
    assert "Traceback" not in said


def test_remote_code_is_for_the_command_line_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "sly.yaml").write_text(
        "defaults: [config, override model: pretrained, _self_]\nmodel: {path: somewhere,"
        " trust_remote_code: true}\n"
    )
    assert optrun("--config-dir", "mine", "-cn", "sly") == 2
    assert "trust_remote_code" in capsys.readouterr().err


def test_configuration_runs_no_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["+optimizer._target_=os.system"],
        ["+data._target_=pathlib.Path.write_text"],
        ["++_target_=os.system"],
    ):
        assert optrun(*words) == 2
        assert "_target_" in capsys.readouterr().err
