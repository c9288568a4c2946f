"""Fine-tuning on chats beside TRL: the same tokens, the same loss and the same gradients as its `SFTTrainer`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data.source import Source, Split
from optrun.model.forward import lean_forward
from optrun.model.tokenizer import train_tokenizer
from optrun.task import Task, build_task
from tests.running import sentence

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of TRL and of what it imports

SYSTEM = [{"role": "system", "content": "Be brief."}]


def turn(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": sentence(number)}


MESSAGES = [
    {
        "messages": [
            *(SYSTEM if row % 2 else []),
            *(turn(("user", "assistant")[at % 2], row + at) for at in range(2 * (1 + row % 3))),
        ]
    }
    for row in range(6)
]
COMPLETIONS = [{"prompt": [turn("user", row)], "completion": [turn("assistant", row + 9)]} for row in range(6)]
PLAIN = [{"prompt": sentence(row) + " =", "completion": f" {sentence(row + 9)}"} for row in range(6)]


def model_of(size: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 3)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=512, **shape, **ids))


def ours(rows: list[dict[str, Any]], tokenizer: Any, max_length: int, **options: Any) -> Task:
    data: Any = choice("data", DATA, "files", {"train": "x", "max_length": max_length})
    split = Split(Dataset.from_list(rows), "data.train")
    source = Source(split, {"": Split(split.rows.select([]), "data.eval")}, data)
    return build_task(choice("task", TASKS, "sft", {"samples": 0, **options}), data, source, tokenizer, seed=0)


@pytest.mark.parametrize("template", ["chatml", "zephyr", "alpaca"])
@pytest.mark.parametrize(
    ("rows", "options", "max_length"),
    [
        (MESSAGES, {"assistant_only_loss": True}, 512),
        (MESSAGES, {}, 512),
        (MESSAGES, {"assistant_only_loss": True, "overlong_rows": "drop"}, 100),
        (COMPLETIONS, {"completion_only_loss": True}, 512),
        (COMPLETIONS, {"assistant_only_loss": True}, 512),
        (PLAIN, {}, 512),
        (PLAIN, {"completion_only_loss": False}, 20),
    ],
    ids=["assistant", "all", "cut", "completion", "assistant of completion", "plain", "plain, all, cut"],
)
def test_loss_and_gradients_are_those_of_trl(
    template: str, rows: list[dict[str, Any]], options: dict[str, Any], max_length: int, tmp_path: Path
) -> None:
    from trl import SFTConfig, SFTTrainer

    tokenizer = train_tokenizer(lambda: iter(map(sentence, range(60))), vocab_size=340, kind="chat")
    task = ours(rows, tokenizer, max_length, chat_template=template, **options)
    mine = model_of(len(tokenizer))
    theirs = copy.deepcopy(mine)
    trainer = SFTTrainer(
        model=theirs,
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_length=max_length,
            per_device_train_batch_size=len(rows),
            assistant_only_loss=options.get("assistant_only_loss", False),
            completion_only_loss=options.get("completion_only_loss"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    batch = task.collate([task.train[index] for index in range(len(task.train))])
    prepared = trainer.data_collator([trainer.train_dataset[index] for index in range(len(trainer.train_dataset))])
    assert (batch["input_ids"] * batch["attention_mask"]).tolist() == (
        prepared["input_ids"] * prepared["attention_mask"]
    ).tolist()
    assert batch["labels"].tolist() == prepared["labels"].tolist()
    assert 0 < task.count(batch) < batch["labels"].numel()

    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(prepared))
    loss.backward()
    mine.train()
    with lean_forward(mine):
        own = task.loss(mine(**batch), batch)
    own.backward()
    assert float(own.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    compared = 0
    for (name, param), (_, other) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        assert torch.allclose(param.grad, other.grad, rtol=1e-5, atol=1e-6 * float(other.grad.abs().max())), name
        compared += 1
    assert compared > 20
