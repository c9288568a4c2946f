"""Fine-tuning on chats beside TRL.

The same tokens, the same loss and the same gradients as its `SFTTrainer`.

TRL packs with boundaries only on flash attention, which needs a GPU. So packed batches of optrun's
are compared with
what TRL trains on without packing: the same documents, a row each, weighed alike.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data.source import Source, Split
from optrun.model.forward import without_cache_and_padding_check
from optrun.model.tokenizer import train_tokenizer
from optrun.task import Task, build_task
from tests.running import sentence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # of TRL and of what it imports

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
COMPLETIONS = [
    {"prompt": [turn("user", row)], "completion": [turn("assistant", row + 9)]} for row in range(6)
]
PLAIN = [
    {"prompt": sentence(row) + " =", "completion": f" {sentence(row + 9)}"} for row in range(6)
]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {}}},
    },
}


def asked(number: int, *, system: bool) -> list[dict[str, Any]]:
    """A question, a call, what the tool returns, and the answer."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}
    said = {
        "role": "assistant",
        "content": sentence(number) if number % 2 else "",
        "tool_calls": [call],
    }
    chat = [
        turn("user", number),
        said,
        {"role": "tool", "content": str(number)},
        turn("assistant", number + 9),
    ]
    return [*SYSTEM, *chat] if system else chat


CALLS: list[dict[str, Any]] = [
    {"messages": asked(row, system=row % 3 == 0), "tools": json.dumps([TOOL])} for row in range(6)
]
CALLED = [
    {"prompt": row["messages"][:-3], "completion": row["messages"][-3:], "tools": row["tools"]}
    for row in CALLS
]


def model_of(size: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 3)
    shape = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=1024, **shape, **ids))


def ours(rows: list[dict[str, Any]], tokenizer: Any, max_length: int, **options: Any) -> Task:
    data: Any = choice("data", DATA, "files", {"train": "x", "max_length": max_length})
    split = Split(Dataset.from_list(rows), "data.train")
    source = Source(split, {"": Split(split.rows.select([]), "data.eval")}, data)
    return build_task(choice("task", TASKS, "sft", options), data, source, tokenizer, seed=0)


def theirs_of(
    model: Any, rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **options: Any
) -> tuple[Any, Any]:
    """TRL's trainer, and the batch of all rows that it makes."""
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=len(rows),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    prepared = trainer.data_collator(
        [trainer.train_dataset[index] for index in range(len(trainer.train_dataset))]
    )
    return trainer, prepared


def expect_same_step(task: Task, mine: Any, batch: Any, trainer: Any, prepared: Any) -> None:
    """Loss to 1e-6, gradients to 1e-5."""
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(prepared))
    loss.backward()
    mine.train()
    with without_cache_and_padding_check(mine):
        own = task.loss(mine(**batch), batch)
    own.backward()
    assert float(own.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    compared = 0
    for (name, param), (_, other) in zip(
        mine.named_parameters(), trainer.model.named_parameters(), strict=True
    ):
        assert param.grad is not None
        assert other.grad is not None
        assert torch.allclose(
            param.grad, other.grad, rtol=1e-5, atol=1e-6 * float(other.grad.abs().max())
        ), name
        compared += 1
    assert compared > 20


def chat_tokenizer() -> Any:
    return train_tokenizer(lambda: iter(map(sentence, range(60))), vocab_size=340, kind="chat")


CASES = [
    (MESSAGES, {"assistant_only_loss": True}, 512),
    (MESSAGES, {}, 512),
    (MESSAGES, {"assistant_only_loss": True, "overlong_rows": "drop"}, 100),
    (COMPLETIONS, {"completion_only_loss": True}, 512),
    (COMPLETIONS, {"assistant_only_loss": True}, 512),
    (PLAIN, {}, 512),
    (PLAIN, {"completion_only_loss": False}, 20),
]
NAMES = [
    "assistant",
    "all",
    "cut",
    "completion",
    "assistant of completion",
    "plain",
    "plain, all, cut",
]
WITH_TOOLS = [
    (CALLS, {"assistant_only_loss": True}, 512),
    (CALLS, {}, 512),
    (CALLS, {"assistant_only_loss": True}, 300),
    (CALLED, {"completion_only_loss": True}, 512),
    (CALLED, {"assistant_only_loss": True}, 512),
]
NAMES_WITH_TOOLS = [
    f"tools, {name}"
    for name in ("assistant", "all", "cut", "completion", "assistant of completion")
]


@pytest.mark.parametrize(
    ("template", "rows", "options", "max_length"),
    [
        *(
            pytest.param(template, *case, id=f"{template}-{name}")
            for template in ("chatml", "zephyr", "alpaca")
            for case, name in zip(CASES, NAMES, strict=True)
        ),
        *(
            pytest.param("chatml", *case, id=f"chatml-{name}")
            for case, name in zip(WITH_TOOLS, NAMES_WITH_TOOLS, strict=True)
        ),
    ],
)
def test_loss_and_gradients_are_those_of_trl(
    template: str,
    rows: list[dict[str, Any]],
    options: dict[str, Any],
    max_length: int,
    tmp_path: Path,
) -> None:
    tokenizer = chat_tokenizer()
    task = ours(rows, tokenizer, max_length, chat_template=template, **options)
    mine = model_of(len(tokenizer))
    also = {
        key: options[key]
        for key in ("assistant_only_loss", "completion_only_loss")
        if key in options
    }
    trainer, prepared = theirs_of(
        copy.deepcopy(mine), rows, tokenizer, tmp_path, max_length=max_length, **also
    )
    batch = task.collate([task.train[index] for index in range(len(task.train))])
    assert (batch["input_ids"] * batch["attention_mask"]).tolist() == (
        prepared["input_ids"] * prepared["attention_mask"]
    ).tolist()
    assert batch["labels"].tolist() == prepared["labels"].tolist()
    assert 0 < task.count(batch) < batch["labels"].numel()
    expect_same_step(task, mine, batch, trainer, prepared)


@pytest.mark.parametrize(
    ("rows", "options", "room"),
    [
        pytest.param(MESSAGES, {"assistant_only_loss": True}, 512, id="assistant"),
        pytest.param(COMPLETIONS, {}, 200, id="completion"),
        pytest.param(CALLS, {"assistant_only_loss": True}, 1024, id="tools"),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_learn_what_trl_learns_of_them_one_by_one(
    rows: list[dict[str, Any]], options: dict[str, Any], room: int, attention: str, tmp_path: Path
) -> None:
    """Documents of a block against TRL's rows.

    Its own packing keeps them apart on flash attention alone.
    """
    tokenizer = chat_tokenizer()
    task = ours(rows, tokenizer, room, chat_template="chatml", packing=True, **options)
    assert 1 < len(task.train) < len(rows)
    assert task.train.documents.lost.sum() == 0
    mine = model_of(len(tokenizer))
    trainer, prepared = theirs_of(
        copy.deepcopy(mine), rows, tokenizer, tmp_path, max_length=room, **options
    )
    mine.set_attn_implementation(attention)
    batch = task.collate([task.train[index] for index in range(len(task.train))])
    assert "attention_mask" not in batch
    assert task.count(batch) == int((prepared["labels"][:, 1:] != -100).sum())
    expect_same_step(task, mine, batch, trainer, prepared)
