"""Each implementation of attention keeps documents of a block apart, or is refused by name.

FlexAttention trains on CUDA devices alone, and flash attention's kernels are CUDA's. Here
FlexAttention runs forward as it is written, uncompiled; and in place of the kernel of flash
attention stands its definition in torch, behind all that transformers does of lengths and
positions. The kernels themselves are tested in `tests/gpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from optrun.base.errors import ConfigError
from optrun.model.attention import (
    describe_document_masking,
    needs_device,
    needs_one_row_batch,
    plain_attention,
    refuse_attention,
    refuse_attention_dropout,
)
from optrun.model.documents import refuse_mixed_documents
from optrun.model.forward import without_cache_and_padding_check
from tests.unit.task.test_document_masking import TEXTS, decoder, total_loss
from tests.unit.task.test_task_sft import CHATS

Make = Callable[..., Any]
FLASH = "flash_attention_2"


def varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    causal: bool,
    softmax_scale: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """What flash_attn_varlen_func computes: causal attention within each sequence.

    Shape (tokens, heads, size).
    """
    assert causal
    assert dropout_p == 0
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(each[begin:end].transpose(0, 1)[None] for each in (q, k, v)),
            is_causal=True,
            scale=softmax_scale,
        )[0].transpose(0, 1)
        for begin, end in itertools.pairwise(cu_seqlens_q.tolist())
    ]
    assert int(max_seqlen_q) == int(cu_seqlens_q.diff().max())
    return torch.cat(parts)


def whole(
    q: Any, k: Any, v: Any, *, causal: bool, softmax_scale: Any = None, dropout_p: float = 0.0
) -> Any:
    """What flash_attn_func computes: one sequence a row."""
    states = (each.transpose(1, 2) for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        *states, is_causal=causal, scale=softmax_scale
    ).transpose(1, 2)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' way into flash attention, with the definitions above in place of its
    kernels.
    """
    monkeypatch.setattr(flash_utils, "_loaded_implementation", FLASH)
    monkeypatch.setattr(flash_utils, "_flash_fn", whole)
    monkeypatch.setattr(flash_utils, "_flash_varlen_fn", varlen)
    monkeypatch.setattr(flash_utils, "_flash_with_kvcache_fn", None)
    monkeypatch.setattr(flash_utils, "_pad_fn", None)
    monkeypatch.setattr(flash_utils, "_unpad_fn", None)
    monkeypatch.setattr(
        flash_utils, "_process_flash_kwargs_fn", flash_utils._lazy_define_process_function(varlen)
    )
    monkeypatch.setattr(flash_utils, "_process_with_kvcache_kwargs_fn", dict)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """FlexAttention as it is written.

    Torch neither compiles it, nor differentiates it on the CPU.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def using(kind: str, implementation: str) -> Any:
    model = decoder(kind)
    model.config._attn_implementation = implementation
    return model


def tasks(source: Make, task: Make, bpe: Any, name: str) -> tuple[Any, Any]:
    """The same documents, one by one and in blocks."""
    if name == "sft":
        options = {"chat_template": "chatml", "assistant_only_loss": True, "sample_tokens": 0}
        rows = {"messages": CHATS * 3}
        alone = task("sft", source(rows, max_length=150), bpe, **options)
        return alone, task("sft", source(rows, max_length=150), bpe, packing=True, **options)
    rows = {"text": TEXTS}
    alone = task("causal_lm", source(rows, max_length=300), packing=False)
    return alone, task("causal_lm", source(rows, max_length=300), document_masking=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("flash", "uncompiled")
@pytest.mark.parametrize("name", ["sft", "causal_lm"])
@pytest.mark.parametrize(
    "implementation",
    ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow), FLASH],
)
def test_packed_is_unpacked(
    make_source: Make, make_task: Make, tokenizer: Make, implementation: str, name: str
) -> None:
    """Sum of losses to 1e-6 and, but of FlexAttention, gradients to 1e-5, in float64, against
    each document alone.
    """
    alone, packed = tasks(make_source, make_task, tokenizer("chat"), name)
    trained = implementation != "flex_attention"
    with torch.set_grad_enabled(trained):
        reference = using("llama", "eager")
        rows = [alone.collate([alone.train[index]]) for index in range(len(alone.train))]
        if name == "causal_lm":
            rows = [
                alone.collate([{"input_ids": alone.train[index]["input_ids"]}])
                for index in range(len(TEXTS))
            ]
        expected = [total_loss(reference, row) for row in rows]
        total = torch.stack([loss for loss, _ in expected]).sum()
        model = using("llama", implementation)
        packed.one_row = needs_one_row_batch(model)
        examples = packed.train if name == "sft" else packed.eval
        batch = packed.collate([examples[number] for number in range(len(examples))])
        assert len(batch["input_ids"]) == (
            1 if implementation == FLASH or name == "causal_lm" else len(examples)
        )
        found, count = total_loss(model, batch)
    assert count == sum(number for _, number in expected)
    assert float(found.detach()) == pytest.approx(float(total.detach()), rel=1e-6)
    if trained:
        found.backward()
        total.backward()
        for (key, param), other in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert torch.allclose(
                param.grad, other.grad, rtol=1e-5, atol=1e-5 * float(other.grad.abs().max())
            ), key


def test_sizes_of_one_row(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    for name in ("sft", "causal_lm"):
        packed = tasks(make_source, make_task, tokenizer("chat"), name)[1]
        examples = packed.train if name == "sft" else packed.eval
        every = [examples[number] for number in range(len(examples))]
        rows = packed.collate(every)
        packed.one_row = True
        flat = packed.collate(every)
        assert packed.count_tokens_and_examples(flat) == packed.count_tokens_and_examples(rows)
        assert packed.count(flat) == packed.count(rows)
        assert (
            flat["input_ids"].shape
            == flat["position_ids"].shape
            == (1, sum(len(one["input_ids"]) for one in every))
        )


@pytest.mark.usefixtures("flash")
def test_flash_attention_is_tried_in_one_row() -> None:
    model = using("llama", FLASH).float()
    refuse_mixed_documents(model, "task.packing=true")
    positions = torch.arange(4).repeat(2, 2)
    ids = torch.arange(1, 9).repeat(2, 1)
    with torch.no_grad(), without_cache_and_padding_check(model.eval()):
        apart, mixed = (
            model(input_ids=ids[:rows], position_ids=positions[:rows]).logits[0, 4:]
            for rows in (1, 2)
        )
    assert not torch.allclose(apart, mixed, atol=1e-5), (
        "of two rows transformers keeps no documents apart"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("uncompiled")
def test_flex_attention_is_tried() -> None:
    refuse_mixed_documents(using("llama", "flex_attention").float(), "task.packing=true")


@pytest.mark.usefixtures("flash")
def test_a_batch_of_two_rows_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps documents apart in one row alone is not taken for what does in several."""
    monkeypatch.setattr("optrun.model.documents.needs_one_row_batch", lambda model: False)
    with pytest.raises(
        ConfigError, match=r"task.packing=true: .*attn_implementation=flash_attention_2 see"
    ):
        refuse_mixed_documents(using("llama", FLASH).float(), "task.packing=true")


def test_what_keeps_documents_apart_is_said() -> None:
    said = {
        name: describe_document_masking(using("llama", name), "KEY")
        for name in ("eager", "sdpa", "flex_attention", FLASH)
    }
    for name, text in said.items():
        assert name in text
    assert "block-diagonal" in said["sdpa"]
    assert "variable lengths" in said[FLASH]
    assert [needs_device(using("llama", name)) for name in said] == [False, False, True, True]


def test_plain_attention_runs_anywhere() -> None:
    model = using("llama", FLASH).float()
    ids = torch.arange(1, 9)[None]
    with plain_attention(model), torch.no_grad():
        found = model(input_ids=ids).logits
    assert model.config._attn_implementation == FLASH
    assert torch.allclose(found, using("llama", "eager").float()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("chosen", "device", "precision", "facts"),
    [
        ("spda", "cpu", "fp32", ["spda", "no attention of this name", "Did you mean sdpa"]),
        ("flex_attention", "cpu", "fp32", ["training.device=cpu", "CUDA", "sdpa"]),
    ],
)
def test_what_cannot_run_is_refused(
    chosen: str, device: str, precision: str, facts: list[str]
) -> None:
    config: Any = SimpleNamespace(attn_implementation=chosen)
    with pytest.raises(ConfigError) as refused:
        refuse_attention(config, device, precision)
    for fact in (f"model.attn_implementation={chosen}", *facts):
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("device", "precision", "facts"),
    [
        ("cpu", "bf16", ["training.device=cpu"]),
        ("cuda:0", "fp32", ["training.precision=fp32", "bf16"]),
        ("cuda", "bf16", []),
    ],
)
def test_flash_attention_is_of_gpus_and_16_bits(
    device: str, precision: str, facts: list[str]
) -> None:
    config: Any = SimpleNamespace(attn_implementation=FLASH)
    if not facts:
        refuse_attention(config, device, precision)
        return
    with pytest.raises(ConfigError) as refused:
        refuse_attention(config, device, precision)
    for fact in facts:
        assert fact in str(refused.value)


def test_flex_attention_has_no_dropout() -> None:
    model = using("llama", "flex_attention")
    refuse_attention_dropout(model)
    model.config.attention_dropout = 0.1
    with pytest.raises(
        ConfigError,
        match=r"attention_dropout=0.1.*model.config.atten",
    ):
        refuse_attention_dropout(model)
