"""Losses, predictions and gradients without logits are those of the logits, in every
architecture and task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from optrun.model import chunked_loss
from optrun.model.chunked_loss import ChunkedForward, why_not_chunked
from optrun.task.preference_pairs import chunked_pair_outputs, pair_outputs

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK", 3 * VOCABULARY)


def built(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()


def batch(shift: bool) -> dict[str, torch.Tensor]:
    """Three rows, the last padded; some targets alone, as of answers or masks."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (3, 11))
    there = torch.ones_like(ids)
    there[2, 6:] = 0
    labels = ids.masked_fill((torch.rand(3, 11) < 0.6) | (there == 0), -100)
    labels[0, 3 + shift] = ids[0, 3 + shift]
    return {"input_ids": ids, "attention_mask": there, "labels": labels}


def by_hand(
    model: Any, given: dict[str, torch.Tensor], shift: bool, smoothing: float
) -> tuple[torch.Tensor, ...]:
    """The mean loss, from all logits in their own precision, and the predictions."""
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    targets = given["labels"]
    if shift:
        logits, targets = logits[:, :-1], targets[:, 1:]
    loss = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing
    )
    return loss, logits.argmax(-1)[targets != -100]


def gradients(model: Any, *losses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a step of several micro-batches, weighted."""
    model.zero_grad()
    for weight, loss in enumerate(losses, 1):
        (weight / 3 * loss).backward()
    return {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_loss_predictions_and_gradients_are_those_of_the_logits(
    name: str, dtype: torch.dtype, near: float, smoothing: float
) -> None:
    model, shift = built(name, dtype), name != "bert"
    assert why_not_chunked(model, shift=shift) is None
    first, second = batch(shift), {key: value[:2] for key, value in batch(shift).items()}
    wanted = [by_hand(model, one, shift, smoothing) for one in (first, second)]
    expected = gradients(model, *(loss for loss, _ in wanted))
    ChunkedForward(model, shift=shift)
    found = [model(**one) for one in (first, second)]
    losses = [torch.lerp(one.loss, one.uniform_loss, smoothing) for one in found]
    for one, loss, (whole, predicted), given in zip(
        found, losses, wanted, (first, second), strict=True
    ):
        torch.testing.assert_close(loss, whole, rtol=near, atol=near)
        known = (given["labels"][:, 1:] if shift else given["labels"]) != -100
        assert torch.equal(one.predicted[known], predicted)
        torch.testing.assert_close(one.losses.sum() / known.sum(), one.loss, rtol=10 * near, atol=0)
    grads = gradients(model, *losses)
    assert grads.keys() == expected.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[key], rtol=near, atol=near, msg=key)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_log_probabilities_of_pairs(name: str, whole: bool) -> None:
    model = built(name, torch.float64)
    given = {key: value.repeat(2, 1) for key, value in batch(shift=True).items()}
    wanted = pair_outputs(model, given)
    weights = torch.linspace(-1, 2, 6, dtype=torch.float64)
    expected = gradients(
        model, (wanted.logps * weights).sum() + whole * (wanted.nll * weights).sum()
    )
    ChunkedForward(model, shift=True)
    found = chunked_pair_outputs(model, given, nll_of_prompt=whole)
    grads = gradients(model, (found.logps * weights).sum() + whole * (found.nll * weights).sum())
    torch.testing.assert_close(found.logps, wanted.logps, rtol=1e-12, atol=1e-12)
    if whole:
        torch.testing.assert_close(found.nll, wanted.nll, rtol=1e-12, atol=1e-12)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-12, atol=1e-12, msg=key)


def test_without_labels_it_is_the_model() -> None:
    model, given = built("llama", torch.float32), batch(shift=True)
    given.pop("labels")
    wanted = model(**given).logits
    ChunkedForward(model, shift=True)
    assert torch.equal(model(**given).logits, wanted)
    assert model.generate(given["input_ids"][:1], max_new_tokens=2, do_sample=False).shape == (
        1,
        13,
    )


def test_a_batch_without_a_target_has_gradients_of_zero() -> None:
    model, given = built("gpt2", torch.float32), batch(shift=True)
    ChunkedForward(model, shift=True)
    found = model(**given | {"labels": torch.full_like(given["labels"], -100)})
    (found.losses.sum() * 0).backward()
    assert all(not param.grad.any() for param in model.parameters() if param.grad is not None)


def test_no_logits_of_a_whole_batch_exist() -> None:
    model, given = built("llama", torch.float32), batch(shift=True)
    ChunkedForward(model, shift=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: sizes.append(kept.numel()) or kept, lambda kept: kept
    ):
        loss = model(**given).loss
    loss.backward()
    assert max(sizes) < given["labels"].numel() * VOCABULARY


def test_bfloat16_is_as_near_to_float32_as_with_all_logits() -> None:
    given = batch(shift=True)
    exact = gradients(model := built("llama", torch.float32), by_hand(model, given, True, 0.0)[0])
    with torch.autocast("cpu", torch.bfloat16):
        whole = gradients(model, model(**given).loss)
        ChunkedForward(model, shift=True)
        chunked = gradients(model, model(**given).loss)
    away = [
        sum(float((one[key] - exact[key]).square().sum()) for key in exact)
        for one in (whole, chunked)
    ]
    assert away[1] <= 1.5 * away[0]


def test_what_changes_logits_later_or_has_another_head_is_told() -> None:
    torch.manual_seed(0)
    for cap in (30.0, 1000.0):
        capped = Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=cap))
        assert "softcapping" in (why_not_chunked(capped, shift=True) or "")
    model = built("llama", torch.float32)
    assert "mean cross-entropy" in (why_not_chunked(model, shift=False) or "")
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "Sequential" in (why_not_chunked(model, shift=True) or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [1e-6, 1e-3, 0.5])
def test_a_router_loss_is_not_lost(coefficient: float, dtype: torch.dtype) -> None:
    """Chunks have none. In bfloat16 a small one lies within the tolerance of the comparison."""
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for is_trained in (False, True):
        config = MixtralConfig(
            **SMALL,
            **experts,
            output_router_logits=is_trained,
            router_aux_loss_coef=coefficient,
        )
        why = why_not_chunked(MixtralForCausalLM(config).to(dtype), shift=True) or ""
        assert ("loss of its experts" in why) == is_trained
