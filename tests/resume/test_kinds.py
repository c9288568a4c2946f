"""A run is trained, resumed and evaluated as the same kind, whatever its choices are called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optrun.config import store
from optrun.config.saved import changed, plain, read_config, with_schemas
from optrun.runner import train as experiment
from tests.running import TINY_GPT, optrun, records, tensors, write_labelled, write_text

RUN = [
    *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
    "data=files",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=1",
    "checkpoint.save_steps=2",
]
RADAM = [
    "optimizer=pytorch_optimizer",
    "optimizer.class_name=radam",
    "lr=1e-4",
    "scheduler=constant",
]
LIBRARY = ["lamb", "muon", "tiger"]
"""Names of that library, all but the last names of ours, too."""
OWN = {
    "optimizer": ("adam", "betas: [0.8, 0.9]"),
    "scheduler": ("inverse_time", "decay_rate: 0.5\ndecay_steps: 4"),
    "clip": ("norm", "max_norm: 0.3"),
    "param_groups": ("layerwise", "decay_rate: 0.7"),
    "model": ("gpt_tiny", "vocab_size: 320"),
    "data": ("files", "max_length: 16"),
    "task": ("causal_lm", "sample_tokens: 0"),
    "training": ("default", "logging_steps: 1"),
    "checkpoint": ("default", "save_steps: 2"),
    "tracking": ("tensorboard", ""),
}
"""A choice of ours for each group, and what a user's own one changes."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)
    write_text(tmp_path, 60)
    return tmp_path


def write_own(group: str, kind: str, more: str, name: str = "mine") -> None:
    folder = Path("conf", group)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(f"defaults: [{kind}, _self_]\nname: {name}\n{more}\n")


def trained(path: str, *words: str, steps: int = 4) -> None:
    given = [*RUN, "data.train=corpus.txt", *words, f"training.max_steps={steps}"]
    assert optrun(*given, f"hydra.run.dir={path}") == 0


@pytest.mark.parametrize("name", LIBRARY)
def test_every_name_of_the_library_is_taken_up_again(name: str) -> None:
    hydra = store.open_hydra()
    words = ["optimizer=pytorch_optimizer", f"optimizer.class_name={name}"]
    cfg = store.without_hydra(store.compose(hydra, "config", words))
    values = plain(cfg)
    assert values["optimizer"]["name"] == "pytorch_optimizer"
    assert store.typed(with_schemas(values, "here")) == store.typed(cfg)
    assert plain(changed(hydra, with_schemas(values, "here"), words)) == values


@pytest.fixture(scope="module")
def of_the_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps by an optimizer of the library with the name of one of ours."""
    pytest.importorskip("pytorch_optimizer")
    folder = tmp_path_factory.mktemp("library")
    write_text(folder, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(experiment, "draw_curves", lambda path: None)
        trained("run", *RADAM, steps=2)
    return folder / "run"


def test_an_optimizer_of_the_library_with_the_name_of_one_of_ours(
    of_the_library: Path, here: Path
) -> None:
    trained("straight", *RADAM)
    shutil.copytree(of_the_library, "run")
    assert read_config(Path("run/config.yaml"))["optimizer"]["class_name"] == "radam"
    assert optrun("evaluate", "run") == 0
    assert optrun("resume=run", "training.max_steps=4", *RADAM[:2]) == 0
    assert tensors(here / "run", 4) == tensors(here / "straight", 4)
    assert optrun("verify", "run") == 0


def test_choices_of_the_users_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All groups at once; resumed and evaluated without the files they came from."""
    for group, (kind, more) in OWN.items():
        write_own(group, kind, more)
    own = [f"{group}=mine" for group in OWN]
    small = [word for word in RUN if word.startswith("model.config.")]

    def start(path: str, steps: int) -> None:
        given = [*own, *small, "data.train=corpus.txt", f"training.max_steps={steps}"]
        assert optrun("--config-dir", "conf", *given, f"hydra.run.dir={path}") == 0

    start("straight", 4)
    start("run", 2)
    saved = read_config(Path("run/config.yaml"))
    assert {group: saved[group]["kind"] for group in OWN} == {
        group: kind for group, (kind, _) in OWN.items()
    }
    assert [saved[group]["name"] for group in OWN] == ["mine"] * len(OWN)
    capsys.readouterr()
    assert optrun("evaluate", "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2
    assert optrun("--config-dir", "conf", "resume=run", *own, "training.max_steps=4") == 0
    assert "kind" not in capsys.readouterr().out
    assert tensors(here / "run", 4) == tensors(here / "straight", 4)
    assert records(here / "run") == records(here / "straight")
    assert optrun("report", "run", "straight", "out=both") == 0
    assert "mine (adam)" in Path("both/report.md").read_text()


def test_a_task_of_the_users_own_is_explained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_own("task", "sequence_classification", "")
    write_labelled(here)
    words = [
        "--config-dir",
        "conf",
        "task=mine",
        "model=bert_tiny",
        "data=files",
        "data.train=train.csv",
    ]
    assert optrun("explain", *words) == 0
    said = capsys.readouterr().out
    assert "BertForSequenceClassification" in said
    assert "even: " in said


@pytest.mark.parametrize(
    ("group", "text", "facts"),
    [
        (
            "optimizer",
            "name: mine\ndefault_lr: 0.1\nweight_decay: 0\n",
            ("optimizer=mine", "defaults: [", "adamw"),
        ),
        ("clip", "name: mine\n", ("clip=mine", "global_norm")),
        ("tracking", "name: mine\n", ("tracking=mine", "tensorboard")),
        ("task", "name: mine\n", ("task=mine", "causal_lm")),
        (
            "optimizer",
            "defaults: [lamb, _self_]\nname: adamw\n",
            ("optimizer.name=adamw", "this one is lamb"),
        ),
        (
            "tracking",
            "defaults: [wandb, _self_]\nname: trackio\n",
            ("tracking.name=trackio", "this one is wandb"),
        ),
    ],
)
def test_a_choice_that_is_none_or_another_is_refused(
    group: str, text: str, facts: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a choice of ours beneath it, a file would be taken for one that does nothing."""
    write_own(group, "", "")
    Path("conf", group, "mine.yaml").write_text(text)
    code = optrun(
        "--config-dir", "conf", *RUN, "data.train=corpus.txt", f"{group}=mine", "hydra.run.dir=run"
    )
    said = capsys.readouterr().err
    assert code == 2
    assert [fact for fact in facts if fact not in said] == []
    assert not Path("run").exists()
