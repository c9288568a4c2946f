"""`optrun --help` fits on a screen, and its words name a group, a choice or a key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from optrun.cli.verbs import VERBS
from optrun.config import reference
from tests.running import optrun


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert optrun("--help", *words) == 0
    return capsys.readouterr().out


def test_the_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys).splitlines()
    assert len(lines) <= 42
    for group in reference.CHOICES:
        assert group.startswith("hydra/") or any(line.startswith(f"{group}: ") for line in lines)
    for verb in VERBS:
        assert any(line.startswith(f"optrun {verb} ") for line in lines)


def test_the_help_needs_neither_hydra_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from optrun.cli.main import run; run(['--help']); print({'hydra', 'torch'} &"
        " sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_help_shows_choices_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizer").mkdir()
    for name in ("my_lamb", "lion"):
        (tmp_path / "optimizer" / f"{name}.yaml").write_text(
            f"defaults: [{name.removeprefix('my_')}]\n"
        )
    assert "lazy_adam, lion, mars, muon, my_lamb, pytorch_optimizer" in said(
        capsys, "--config-dir", str(tmp_path)
    )


@pytest.mark.parametrize("group", reference.CHOICES)
def test_every_key_of_every_choice_is_explained(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(f"{group}={choice}" in said(capsys, group) for choice in reference.CHOICES[group])
    for choice in reference.CHOICES[group]:
        text = said(capsys, f"{group}={choice}")
        for entry in reference.entries(group, choice):
            assert f"  {entry.key}={entry.default}" in text
            assert entry.meaning.split()[-1] in text.replace("\n" + " " * 44, "")
        assert max(map(len, text.splitlines())) <= 130


def test_a_key_is_explained_with_the_choices_that_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "optimizer.eps", "lr")
    assert "optimizer.eps=1.0e-6" in text
    assert "with optimizer=lamb" in text
    assert "Peak learning rate" in text
    assert "lr=computed" in text


@pytest.mark.parametrize("word", ["search", "search.lamb.lr"])
def test_the_help_says_what_a_search_is(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, word)
    assert "hydra/sweeper=optuna" in text
    assert "search.NAME.KEY=VALUES" in text
    page = text.splitlines()[-1].removeprefix("Page: ")
    assert Path(page).name == "sweeps.md"
    assert Path(page).is_file()


@pytest.mark.parametrize(
    ("word", "fact"),
    {
        "optimizer=lamm": "no such optimizer. Did you mean lamb?",
        "lamb": "Did you mean optimizer=lamb?",
        "optimiser": "Did you mean optimizer",
        "optimizer.bettas": "optimizer.betas",
        "nothing_like_it": "Groups: task, data",
    }.items(),
)
def test_a_word_that_names_nothing_is_refused(
    word: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun("--help", word) == 2
    assert fact in capsys.readouterr().err
