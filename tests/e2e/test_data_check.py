"""What is said of data, tokenizer and learning rate before the first step, and what a damaged
cache does to a run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.running import TINY_BERT, optrun, sentence, write_labelled

FEW = ["training.max_steps=2", "training.per_device_train_batch_size=4", "checkpoint=none"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    write_labelled(tmp_path)
    lines = [
        "text,label",
        f'"{sentence(4)}",even',
        f'"{sentence(5)} {"word " * 300}",odd',
        '"something else",odd',
    ]
    (tmp_path / "dev.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def words(*more: str) -> list[str]:
    data = ["data=files", "data.train=train.csv", "data.eval=dev.csv", "data.max_length=32"]
    return ["task=sequence_classification", *data, *FEW, *more]


def losses(run: str) -> list[float]:
    found = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in found for name in ("train/loss", "eval/loss") if name in line]


def test_data_are_told_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*words(*TINY_BERT), "hydra.run.dir=run") == 0
    said = capsys.readouterr().out
    before = said[: said.index("step 0/2")]
    train, *_, leaked, folder_line = before[before.index("train  60 examples") :].splitlines()
    assert train.endswith("even: 50.0 %, odd: 50.0 %")
    assert "eval   3 examples" in before
    assert "data.max_length=32 cuts 1 of 3 examples" in before
    assert (
        leaked
        == "warning: 1 of 3 texts of data.eval are in data.train, too: evaluation sees texts that"
        " were trained on"
    )
    assert folder_line == "-> run"
    assert "data.max_length=32 cuts 1 of 3" in (folder / "run" / "optrun.log").read_text()


def test_a_damaged_cache_changes_nothing_and_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, ids and the trained tokenizer, one flipped bit in each."""
    assert optrun(*words(*TINY_BERT), "hydra.run.dir=first") == 0
    kept = [*folder.glob("cache/**/*.arrow"), *folder.glob("cache/**/input_ids.uint16")]
    kept += folder.glob("cache/**/tokenizer.json")
    assert {path.parent.parent.name for path in kept} == {"rows", "tokens", "tokenizers"}
    for path in kept:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if path.suffix != ".json" else content[: len(content) // 2])
    capsys.readouterr()
    assert optrun(*words(*TINY_BERT), "hydra.run.dir=second") == 0
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "this part of the cache was damaged" in line
    ]
    assert sum(path.name in line for line in said for path in kept) >= len(kept)
    assert losses("second") == losses("first")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a run has published."""
    place = tmp_path_factory.mktemp("made")
    data = f"data.train={write_labelled(place)}"
    assert (
        optrun(
            *TINY_BERT,
            "task=sequence_classification",
            "data=files",
            data,
            *FEW,
            f"hydra.run.dir={place}/run",
        )
        == 0
    )
    return place / "run" / "model"


@pytest.fixture
def pretrained(folder: Path, made: Path) -> Path:
    """Its copy."""
    return Path(shutil.copytree(made, folder / "made" / "model"))


def test_a_pretrained_model_says_where_its_lr_comes_from(
    pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert optrun(*words("model=pretrained", f"model.path={pretrained}"), "hydra.run.dir=run") == 0
    said = capsys.readouterr().out
    assert (
        "lr=1e-4 is the default of optimizer=adamw, 2e-3, times model.default_lr_factor=0.05"
        in said
    )
    assert "lr: 0.0001" in Path("run", "config.yaml").read_text()
    assert (
        optrun(
            *words("model=pretrained", f"model.path={pretrained}", "lr=1e-3"), "hydra.run.dir=given"
        )
        == 0
    )
    assert "default_lr_factor" not in capsys.readouterr().out


def test_a_folder_without_its_tokenizer_trains_nothing(
    pretrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in [*pretrained.glob("tokenizer*"), *pretrained.glob("special_tokens_map.json")]:
        path.unlink()
    for verb in ([], ["explain"]):
        assert optrun(*verb, *words("model=pretrained", f"model.path={pretrained}")) == 2
        said = capsys.readouterr().err
        assert "there is no tokenizer" in said
        assert "model.tokenizer" in said


def test_explain_looks_at_named_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("explain", *words(*TINY_BERT)) == 0
    said = capsys.readouterr().out
    for piece in (
        "60 rows for training, 3 for evaluation",
        "even: 50.0 %",
        "cuts 1 of 3 examples",
        "1 of 3 texts of data.eval",
    ):
        assert piece in said
    assert optrun("explain", "--json", *words(*TINY_BERT)) == 0
    shown = json.loads(capsys.readouterr().out)["data"]
    assert (shown["train_rows"], shown["facts"]["train"]["labels"]) == (60, {"even": 30, "odd": 30})


@pytest.mark.parametrize("labels", [("yes", "no"), ("a", "b", "c", "d", "e")])
def test_explain_counts_the_parameters_of_the_run(
    labels: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the tokenizer that the rows give, and of a head for their labels."""
    rows = [f"{sentence(n)},{labels[n % len(labels)]}" for n in range(60)]
    Path("train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    Path("dev.csv").write_text("\n".join(["text,label", *rows[:5]]) + "\n")
    asked = words(
        *TINY_BERT[:-1]
    )  # with the vocabulary of the default, which so few rows do not fill
    capsys.readouterr()
    assert optrun("explain", *asked, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert optrun(*asked, "hydra.run.dir=run") == 0
    assert (
        said["parameters"]
        == json.loads(Path("run/summary.json").read_text())["model"]["parameters"]
    )
    assert not [note for note in said["notes"] if "model's own" in note]


def test_explain_looks_at_a_sample_of_many_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optrun.config import store
    from optrun.explain import data

    monkeypatch.setattr(data, "MOST_ROWS", 20)
    hydra = store.open_hydra()
    config = store.typed(store.without_hydra(store.compose(hydra, "config", words(*TINY_BERT))))
    sampled = data.sample_data(config, [])
    assert sampled is not None
    assert (sampled.train_rows, sampled.looked_at) == (60, (20, 3))
    assert sampled.facts is not None
    assert sampled.facts.train.examples == 20
    assert sampled.facts.eval_sets[""].texts_in_train is None, "of a sample this is not known"
    assert sampled.spec is not None
    assert sampled.spec.vocab_size == 320, "as many as all rows may give"
    unheld = replace(config, data=replace(config.data, eval=None, eval_fraction=0.0))
    sampled = data.sample_data(unheld, [])
    assert sampled is not None
    assert sampled.looked_at == (20, 0), "without evaluation rows the training rows are looked at"
    assert sampled.facts is not None
    monkeypatch.setattr(data, "MOST_BYTES", 10)
    notes: list[str] = []
    assert data.sample_data(config, notes) is None
    assert "read when a run begins" in notes[0]
