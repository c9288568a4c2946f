"""A small trained run of each task, made when it is first asked for, and files to predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.running import TINY_BERT, TINY_GPT, optrun, sentence, write_labelled

QUICK = [
    "training.max_steps=4",
    "training.per_device_train_batch_size=8",
    "training.dataloader_num_workers=0",
    "lr=1e-2",
]
TAGS = ["O", "B-X", "I-X", "B-Y"]


def rows_of(task: str, count: int = 24) -> list[dict[str, Any]]:
    """Training rows of a task."""
    if task == "token_classification":
        return [
            {
                "tokens": sentence(n).split(),
                "labels": [TAGS[(n + k) % 4] for k in range(len(sentence(n).split()))],
            }
            for n in range(count)
        ]
    if task == "seq2seq_lm":
        return [{"text": sentence(n), "target": sentence(n + 1)} for n in range(count)]
    if task == "pairs":
        return [
            {"a": sentence(n), "b": sentence(n + 5), "label": f"class {n % 3}"}
            for n in range(count)
        ]
    if task == "regression":
        return [{"text": sentence(n), "label": len(sentence(n)) / 10} for n in range(count)]
    return [{"text": sentence(n)} for n in range(count)]


WORDS: dict[str, list[str]] = {
    "sequence_classification": [*TINY_BERT, "task=sequence_classification"],
    "regression": [*TINY_BERT, "task=sequence_classification", "task.problem_type=regression"],
    "pairs": [
        *TINY_BERT,
        "task=sequence_classification",
        "data.text_column=a",
        "data.text_pair_column=b",
    ],
    "token_classification": [*TINY_BERT, "task=token_classification"],
    "masked_lm": [*TINY_BERT, "task=masked_lm", "task.packing=false"],
    "causal_lm": [
        *TINY_GPT[:-2],
        "data.max_length=32",
        "task.sample_tokens=0",
        "task.packing=false",
    ],
    "seq2seq_lm": [
        "task=seq2seq_lm",
        "model=from_config",
        "model.model_type=t5",
        "model.config.d_model=16",
        "model.config.d_kv=8",
        "model.config.d_ff=32",
        "model.config.num_layers=1",
        "model.config.num_heads=2",
        "model.vocab_size=320",
        "task.max_target_length=12",
    ],
    "image_classification": [
        "task=image_classification",
        "data=digits",
        "model=vit_tiny",
        "model.config.hidden_size=16",
        "model.config.num_hidden_layers=1",
        "model.config.num_attention_heads=2",
        "model.config.intermediate_size=32",
        "data.max_train_examples=32",
        "data.max_eval_examples=8",
    ],
}


def train(task: str, folder: Path) -> Path:
    """Train a run of a task in a folder, and return its directory."""
    folder.mkdir()
    words = [*WORDS[task], *QUICK, f"hydra.run.dir={folder / 'run'}"]
    if task == "sequence_classification":
        words += ["data=files", f"data.train={write_labelled(folder)}"]
    elif task != "image_classification":
        words += ["data=files", f"data.train={write_rows(folder / 'train.jsonl', rows_of(task))}"]
    assert optrun(*words) == 0
    return folder / "run"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
