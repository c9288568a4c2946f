"""Every recipe composes and runs two steps; those that need files of the user's get small ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.running import TINY_BERT, optrun, sentence, summary, write_labelled, write_text

SMALL = ["training.max_steps=2", "data.max_train_examples=64", "data.max_eval_examples=8"]
SMALL_GPT = [
    "model.config.n_layer=1",
    "model.config.n_embd=32",
    "model.config.n_head=2",
    "task.sample_tokens=4",
]
SMALL_BERT = [
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=1",
    "model.config.intermediate_size=64",
]


def sst2(folder: Path) -> list[str]:
    """TSV files as GLUE and as others have them.

    The text has another name in the evaluation file.
    """
    for name, column in (("train.tsv", "sentence"), ("dev.tsv", "content")):
        rows = [f"label\t{column}", *(f"{n % 2}\t{sentence(n)}" for n in range(40))]
        (folder / name).write_text("\n".join(rows) + "\n")
    words = [
        *TINY_BERT,
        "task=masked_lm",
        "data=files",
        "data.max_length=64",
        f"data.train={write_text(folder, 60)}",
    ]
    assert optrun(*words, "training.max_steps=1", "hydra.run.dir=encoder") == 0
    return ["model.path=encoder/model", "data.train=train.tsv", "data.eval=dev.tsv"]


def tokens(folder: Path) -> list[str]:
    """What the example writes of two texts."""
    script = Path(__file__).parents[2] / "examples" / "tokenize_text.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.argv", [str(script), str(write_text(folder)), str(write_labelled(folder))]
        )
        runpy.run_path(str(script), run_name="__main__")
    return [*SMALL_GPT, "data.max_length=32"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("pretrain_tokens", tokens),
        ("stdlib_gpt", SMALL_GPT),
        ("bert_mlm_stdlib", SMALL_BERT),
        ("sst2_minilm", sst2),
    ],
)
def test_recipe(recipe: str, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = words(tmp_path) if callable(words) else words
    assert optrun("-cn", recipe, *SMALL, *given, "hydra.run.dir=run") == 0
    told = summary(Path("run"))
    assert (told["status"], told["global_step"], told["config_name"]) == ("finished", 2, recipe)
    assert optrun("-cn", recipe, *given, "--cfg", "job") == 0
