"""Documents of a block that see nothing of each other.

The same loss and gradient as each of them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optrun.base.errors import ConfigError
from optrun.model.documents import refuse_mixed_documents
from optrun.model.forward import without_cache_and_padding_check
from optrun.task.evaluation import IGNORED
from tests.running import composed

TEXTS = [
    "the cat sat on a mat",
    "Anna Smith went to Paris and Berlin with Bob",
    "Bob",
    "unbelievable things happened",
] * 3
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    },
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
}
Make = Callable[..., Any]


def decoder(kind: str) -> Any:
    """A small one of an architecture, the same each time."""
    torch.manual_seed(0)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=320, **ids, **SMALL[kind])
    ).double()


def total_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum over targets, and how many there are."""
    count = int((batch["labels"][:, 1:] != IGNORED).sum())
    with without_cache_and_padding_check(model):
        return model(**batch).loss * count, count


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("masking", [True, False])
def test_a_block_is_its_documents(
    make_source: Make, make_task: Make, kind: str, masking: bool
) -> None:
    alone = make_task("causal_lm", make_source({"text": TEXTS}, max_length=300), packing=False)
    rows = [alone.train[index]["input_ids"] for index in range(len(TEXTS))]
    packed = make_task(
        "causal_lm", make_source({"text": TEXTS}, max_length=300), document_masking=masking
    )
    assert len(packed.eval) == 1, "all of them in one block"
    sums, grads = [], []
    for batches in (
        [alone.collate([{"input_ids": row}]) for row in rows],
        [packed.collate([packed.eval[0]])],
    ):
        model = decoder(kind)
        found = [total_loss(model, batch) for batch in batches]
        total = torch.stack([loss for loss, _ in found]).sum()
        total.backward()
        sums.append((float(total.detach()), sum(count for _, count in found)))
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    near = [
        torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))
        for a, b in zip(*grads, strict=True)
    ]
    if masking:
        assert sums[1] == (pytest.approx(sums[0][0], rel=1e-6), sums[0][1])
        assert all(near)
    else:
        assert sums[1][1] == sums[0][1] + len(TEXTS) - 1, (
            "each first token was predicted from another document"
        )
        assert not all(near)


def test_a_batch_of_blocks_and_a_rest(make_source: Make, make_task: Make) -> None:
    task = make_task(
        "causal_lm", make_source({"text": TEXTS}, max_length=16), document_masking=True
    )
    examples = [task.eval[index] for index in range(len(task.eval))]
    assert len({len(example["input_ids"]) for example in examples}) == 2, "the last is shorter"
    batch = task.collate(examples)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    model = decoder("gpt2").eval()
    with torch.no_grad(), without_cache_and_padding_check(model):
        together = model(**batch).logits
        for number, example in enumerate(examples):
            one = task.collate([example])
            length = len(example["input_ids"])
            assert torch.allclose(
                model(**one).logits[0], together[number, :length], rtol=1e-6, atol=1e-9
            )
            assert (batch["labels"][number, :length] == one["labels"][0]).all()
            assert (batch["labels"][number, length:] == IGNORED).all()
    for ids, places, labels in zip(
        batch["input_ids"], batch["position_ids"], batch["labels"], strict=True
    ):
        begins = [0, *((ids[:-1] == task.document_end_id).nonzero().flatten() + 1).tolist()]
        assert set(begins) <= set((places == 0).nonzero().flatten().tolist())
        assert (labels[torch.tensor(begins[1:], dtype=torch.long)] == IGNORED).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_that_keeps_documents_apart_is_left_as_it_was(kind: str) -> None:
    model = decoder(kind).float().train()
    before = torch.get_rng_state()
    refuse_mixed_documents(model)
    assert model.training
    assert model.config.use_cache
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["bloom", "opt", "mamba", "xlnet"])
def test_a_model_that_mixes_documents_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"task.document_masking=true: .*ForCausalLM|LMHeadModel"):
        refuse_mixed_documents(decoder(kind).float())


def test_a_model_without_positions_is_refused() -> None:
    model = decoder("gpt2").float()

    def forward(input_ids: torch.Tensor) -> Any:
        return type(model).forward(model, input_ids=input_ids)

    model.forward = forward
    with pytest.raises(ConfigError, match=r"takes no positions that start again .*position_ids"):
        refuse_mixed_documents(model)


def test_rows_of_their_own_need_no_masking() -> None:
    with pytest.raises(
        ConfigError, match=r"task.document_masking=true: expected false with task.packing=false"
    ):
        composed("task.packing=false", "task.document_masking=true")
