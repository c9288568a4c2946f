"""On a CUDA device.

FlexAttention and flash attention keep documents of a block apart, forward and backward.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.model.attention import needs_one_row_batch
from optrun.model.documents import refuse_mixed_documents
from optrun.model.forward import without_cache_and_padding_check
from tests.e2e.test_sft import SMALL, write_chats
from tests.running import optrun, records

pytestmark = [pytest.mark.gpu, pytest.mark.device_only]

FLASH = "flash_attention_2"
IMPLEMENTATIONS = [
    "eager",
    "sdpa",
    "flex_attention",
    *([FLASH] if importlib.util.find_spec("flash_attn") else []),
]
KINDS = [(each, "bf16") for each in IMPLEMENTATIONS]
KINDS += [(each, "fp32") for each in IMPLEMENTATIONS if each != FLASH]  # flash has no float32
LENGTHS = [[70, 3, 40, 15], [100, 28]]
"""Of the documents of two blocks."""


def llama(implementation: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    model = LlamaForCausalLM._from_config(
        LlamaConfig(vocab_size=320, **shape), attn_implementation=implementation
    )
    return model.cuda()


def blocks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 320, (2, 128), generator=generator)
    places = torch.stack(
        [torch.cat([torch.arange(length) for length in block]) for block in LENGTHS]
    )
    return {"input_ids": ids, "labels": ids.where(places > 0, -100), "position_ids": places}


def step(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    count = int((batch["labels"][:, 1:] != -100).sum())
    with (
        without_cache_and_padding_check(model),
        torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32),
    ):
        loss = model(**{name: values.cuda() for name, values in batch.items()}).loss * count
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(("implementation", "precision"), KINDS)
def test_a_block_is_its_documents(implementation: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    near = 3e-2 if precision == "bf16" else 1e-4
    model, reference, whole = llama(implementation), llama("eager"), blocks()
    refuse_mixed_documents(
        model,
        "task.packing=true",
        torch.autocast("cuda", dtype=dtype, enabled=precision == "bf16"),
    )
    given = (
        {name: values.reshape(1, -1) for name, values in whole.items()}
        if needs_one_row_batch(model)
        else whole
    )
    found = step(model, given, dtype)
    expected = torch.zeros((), device="cuda")
    for row, block in enumerate(LENGTHS):
        for ids in whole["input_ids"][row].split(block):
            expected += step(reference, {"input_ids": ids[None], "labels": ids[None]}, dtype)
    assert float(found) == pytest.approx(float(expected), rel=near)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert float((param.grad - other.grad).norm()) <= near * float(other.grad.norm()), name


@pytest.mark.parametrize(
    ("implementation", "precision"), [kind for kind in KINDS if kind[0] in IMPLEMENTATIONS[2:]]
)
def test_a_packed_run(
    implementation: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, evaluates and answers as with sdpa."""
    monkeypatch.chdir(tmp_path)
    words = [word for word in SMALL if not word.startswith("model.")]
    words += [f"data.train={write_chats(tmp_path)}", "model=from_config", "model.model_type=llama"]
    words += [
        f"model.config.{key}={value}"
        for key, value in {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }.items()
    ]
    words += [
        "model.vocab_size=320",
        "task.packing=true",
        "training.max_steps=4",
        "training.device=cuda",
    ]
    words += [f"training.precision={precision}"]
    losses = {}
    for name in ("sdpa", implementation):
        assert optrun(*words, f"model.attn_implementation={name}", f"hydra.run.dir={name}") == 0
        losses[name] = [record["train/loss"] for record in records(Path(name))]
    assert losses[implementation] == pytest.approx(losses["sdpa"], rel=2e-2)
