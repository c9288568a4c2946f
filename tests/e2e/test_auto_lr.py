"""lr=auto lr_from=SWEEP_DIR: shown, recorded, and refused where the sweep does not tell."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from optrun.config import saved, store
from tests.running import TINY_GPT, optrun, summary, write_text
from tests.unit.report.conftest import write_run

WIDTH = "model.config.n_embd"


def words(folder: Path, *more: str) -> list[str]:
    given = [
        *(each for each in TINY_GPT if "n_layer" not in each),
        "data=files",
        f"data.train={folder / 'corpus.txt'}",
        "training.max_steps=2",
        "checkpoint=none",
    ]
    return [word for word in given if not word.startswith(WIDTH)] + [
        "data.max_eval_examples=4",
        *more,
    ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a sweep over lr at widths 16 and 32, whose optima are 4e-3 and
    2e-3.
    """
    folder = tmp_path_factory.mktemp("swept")
    write_text(folder)
    hydra = store.open_hydra()
    for width in (16, 32):
        cfg = store.compose(hydra, "config", words(folder, f"{WIDTH}={width}"))
        values: dict[str, Any] = saved.plain(store.without_hydra(cfg))
        for lr in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2):
            for seed in (0, 1):
                final = 3 + 0.2 * math.log(lr * width / 0.064) ** 2 + 0.01 * seed
                run = write_run(
                    folder / "sweep" / f"{width}-{lr}-{seed}",
                    lr=lr,
                    seed=seed,
                    final=final,
                    max_steps=2,
                )
                (run / "config.yaml").write_text(yaml.safe_dump(values | {"lr": lr, "seed": seed}))
    return folder


@pytest.fixture
def place(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the text, from another one with the sweep."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(swept / "sweep", "sweep")
    return swept


def test_the_number_is_shown_and_recorded(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for width, how in ((32, "optimum at this size"), (64, f"predicted for {WIDTH}=64")):
        asked = words(
            place, f"{WIDTH}={width}", "lr=auto", "lr_from=sweep", f"hydra.run.dir=run-{width}"
        )
        assert optrun(*asked, "training.eval_steps=1") == 0
        shown = next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("lr=auto: ")
        )
        config = yaml.safe_load(Path(f"run-{width}/config.yaml").read_text())
        assert config["lr"] == pytest.approx(0.064 / width, rel=0.02)
        assert config["lr_from"] == shown.removeprefix("lr=auto: ")
        for fact in ("sweep: lr", "90 % interval", how):
            assert fact in shown
    told = summary(Path("run-64"))
    assert "lr=auto" in told["command"]
    assert not any("auto" in word for word in told["overrides"])
    assert optrun("resume=run-64", "training.max_steps=3") == 2, (
        "checkpoint=none: what is refused is no key of the record"
    )
    assert "lr_from" not in capsys.readouterr().err


def test_a_standard_sweep_at_the_base_is_the_sweep_of_mup(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mup = ["parametrization=mup", f"parametrization.base.{WIDTH.rpartition('.')[2]}=32"]
    heads = ["model.config.n_head=4", "parametrization.base.n_head=2"]
    untied = "model.config.tie_word_embeddings=false"
    for run in Path("sweep").iterdir():
        path = run / "config.yaml"
        values = yaml.safe_load(path.read_text())
        values["model"]["config"] |= {"tie_word_embeddings": False, "n_head": 2}
        path.write_text(yaml.safe_dump(values))
    asked = words(place, f"{WIDTH}=64", "lr=auto", "lr_from=sweep", untied, *mup, *heads)
    asked = [word for word in asked if word != "model.config.n_head=2"]
    assert optrun(*asked, "hydra.run.dir=run") == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["lr"] == pytest.approx(0.002, rel=0.02)
    assert config["lr_from"].endswith("at the base of muP")
    assert "at the base of muP" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_may_go_on_begins_with_the_number(place: Path) -> None:
    asked = words(
        place, f"{WIDTH}=32", "lr=auto", "lr_from=sweep", "hydra.run.dir=run", "resume=auto"
    )
    assert optrun(*asked) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["lr"] == pytest.approx(
        0.002, rel=0.02
    )


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (["lr=auto"], ("lr=auto", "lr_from=SWEEP_DIR")),
        (["lr_from=sweep"], ("lr_from=sweep", "lr=auto")),
        (["lr=1e-3", "lr_from=sweep"], ("lr_from=sweep", "lr=auto")),
        (["lr=auto", "lr_from=nowhere"], ("lr_from=nowhere", "no such directory")),
        (["lr=auto", "lr_from=s3://bucket/sweep"], ("lr_from=s3://bucket/sweep", "URL")),
        (["lr=auto", "lr_from=sweep", "optimizer=lamb"], ("optimizer.name=lamb", "adamw")),
        (
            ["lr=auto", "lr_from=sweep", "model.config.n_layer=1"],
            ("model.config.n_layer=1", "predict lr only for model.config.n_layer=2"),
        ),
        (["lr=auto", "lr_from=sweep", "scheduler=linear"], ("scheduler.name=linear", "cosine")),
    ],
)
def test_what_is_refused(
    place: Path, more: list[str], facts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*words(place, f"{WIDTH}=32", *more)) == 2
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts), said
    assert not Path("outputs").exists()


def test_explained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(place, f"{WIDTH}=32", "+lr=auto", "lr_from=sweep")
    assert optrun("explain", *asked, "--json") == 0
    said = capsys.readouterr()
    assert "lr=auto: sweep: lr" in said.err
    peaks = [group["lr_peak"][0] for group in json.loads(said.out)["groups"]]
    assert peaks == [pytest.approx(0.002, rel=0.02)] * len(peaks)


def test_elsewhere_it_is_no_key(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        optrun("explain", *words(place), "lr_from=sweep")
        == optrun("-m", *words(place), "lr=auto", "seed=0,1")
        == 2
    )
    assert "lr=auto" in capsys.readouterr().err
