"""From a configuration to a batch in a model, for every task.

What the rooms promise each other fits.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from optrun.config import overrides, store
from optrun.config.schema.task import SCHEMAS
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.runner.prepare import prepare

T5 = [
    f"model.config.{value}"
    for value in ("d_model=16", "d_kv=8", "d_ff=16", "num_layers=1", "num_heads=2")
]
BERT = ["model=bert_tiny", "model.config.hidden_size=16", "model.config.num_hidden_layers=1"]
TEXTS = ["the cat sat on a mat", "Anna went to Paris", "Bob sat", "a mat in Berlin"] * 4


def write(folder: Path) -> None:
    rows = {
        "lines": [{"text": text} for text in TEXTS],
        "labelled": [{"text": text, "label": "cat" if "cat" in text else "none"} for text in TEXTS],
        "words": [
            {
                "tokens": text.split(),
                "tags": ["B-X" if word[0].isupper() else "O" for word in text.split()],
            }
            for text in TEXTS
        ],
        "preferences": [
            {"prompt": text, "chosen": " yes", "rejected": f" {text} {text}"} for text in TEXTS
        ],
        "pairs": [{"text": text, "target": text[::-1]} for text in TEXTS],
    }
    for name, listed in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    for split in ("train", "test"):
        for number, label in enumerate(["red", "blue"] * 3):
            place = folder / "images" / split / label
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.full(
                (10, 8, 3),
                (200, number, 30) if label == "red" else (30, number, 200),
                dtype=np.uint8,
            )
            Image.fromarray(pixels).save(place / f"{number}.png")


CASES = {
    "causal_lm": [
        "data=files",
        "data.train={}/lines.jsonl",
        "data.max_length=8",
        "model.config.n_embd=24",
    ],
    "masked_lm": ["data=files", "data.train={}/lines.jsonl", "data.max_length=8", *BERT],
    "sequence_classification": ["data=files", "data.train={}/labelled.jsonl", *BERT],
    "token_classification": ["data=files", "data.train={}/words.jsonl", *BERT],
    "embedding": ["data=files", "data.train={}/pairs.jsonl", *BERT],
    "preference": ["data=files", "data.train={}/preferences.jsonl", "task.loss_type=simpo"],
    "seq2seq_lm": [
        "data=files",
        "data.train={}/pairs.jsonl",
        "model=from_config",
        "model.model_type=t5",
        *T5,
    ],
    "sft": [
        "data=files",
        "data.train={}/pairs.jsonl",
        "data.text_column=text",
        "data.target_column=target",
    ],
    "image_classification": [
        "data=hub",
        "data.path={}/images",
        "model=vit_tiny",
        "model.config.image_size=8",
    ],
}


def test_every_task_is_here() -> None:
    assert set(CASES) == set(SCHEMAS)


@pytest.mark.parametrize("task", CASES)
def test_a_task_trains_and_is_evaluated(task: str, tmp_path: Path) -> None:
    write(tmp_path)
    small = [] if task == "image_classification" else ["model.vocab_size=300"]
    words = [f"task={task}", *[word.format(tmp_path) for word in CASES[task]], *small]
    hydra = store.open_hydra(None)
    checked = overrides.parse_checked(hydra, "config", words, sweep=False)
    prepared = prepare(store.typed(store.without_hydra(store.compose(hydra, "config", checked))))
    model, made = prepared.model, prepared.task
    feed = BatchLoader(made.train, made.transform, made.collate, seed=0, workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _, (batch, *_) in zip(
        range(24), feed.training(EpochPlan(len(made.train), 4, 1, 0), 0), strict=False
    ):
        assert made.weight(batch) > 0
        assert all(size >= 0 for size in made.count_tokens_and_examples(batch))
        loss = made.loss(made.forward(model, batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])
    evaluation = made.evaluation()
    model.eval()
    with torch.no_grad():
        for batch in BatchLoader(
            made.eval, made.transform, made.collate, seed=0, workers=0
        ).evaluation(3):
            evaluation.update(made.forward(model, batch), batch)
    found = evaluation.compute()
    assert list(found) == made.metric_names()
    assert np.isfinite(list(found.values())).all()
    assert made.main_metric in found
    prepared.tokenizer.save_pretrained(str(tmp_path / "saved"))
    model.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").is_file()
