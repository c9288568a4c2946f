"""4-bit weights of a frozen base.

What is quantised, what it computes, what it takes, what comes back.

Without bitsandbytes (`pip install 'optrun[quantization]'`; each import of peft takes a second
longer beside it, so that it is no part of `[dev]`) there is nothing to try.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from optrun.model.adapter import base_tensors, inject_adapter, merge_adapter
from optrun.model.adapter_modules import linear_modules
from optrun.model.documents import refuse_mixed_documents
from optrun.model.quantization import (
    quantization_of,
    tensor_bytes,
    tensor_sizes,
)
from optrun.model.weights import load_model_tensors, model_tensors
from tests.unit.model.test_adapter import CAUSAL, COMMON, GPT2, SEQUENCE, lora, small

bitsandbytes = pytest.importorskip("bitsandbytes")

LARGER = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 40,
}
KINDS = pytest.mark.parametrize(
    ("auto_class", "kind", "values"),
    [(CAUSAL, "gpt2", GPT2), (CAUSAL, "llama", LARGER), (SEQUENCE, "bert", COMMON)],
    ids=["gpt2", "llama", "bert"],
)


def both(auto_class: str, kind: str, values: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The same model as it is, and quantised, with factors beside it."""
    model = small(auto_class, kind, values)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    inject_adapter(lora(**options), other, auto_class, quantized=True)
    with torch.no_grad():
        for name, param in other.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
    return model, other


def batch(count: int = 2) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(1, 1 + 8 * count).reshape(count, 8) % 40}


@KINDS
def test_the_base_computes_nearly_what_it_did(auto_class: str, kind: str, values: Any) -> None:
    model, other = both(auto_class, kind, values)
    assert quantization_of(other) == "4bit"
    for path in linear_modules(model):
        base = getattr(other.get_submodule(path), "base_layer", None)
        if base is None:  # the head
            assert not hasattr(other.get_submodule(path), "optrun_source")
            continue
        assert type(base).__name__ == "Linear4bit"
        assert not base.weight.requires_grad
    for name, param in other.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(param)
    with torch.no_grad():
        near, exact = (each.eval()(**batch()).logits for each in (other, model))
    assert 0 < float((near - exact).std()) < 0.5 * float(exact.std())


@KINDS
def test_factors_have_gradients_and_the_base_none(auto_class: str, kind: str, values: Any) -> None:
    _, model = both(auto_class, kind, values)
    before = {name: tensor.clone() for name, tensor in base_tensors(model).items()}
    assert any("absmax" in name for name in before), "the constants belong to the base"
    model.train()(**batch()).logits.square().sum().backward()
    with torch.no_grad():
        model.eval()(**batch())
    for name, param in model.named_parameters():
        assert (param.grad is not None and bool(param.grad.abs().sum())) == param.requires_grad, (
            name
        )
    after = base_tensors(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@KINDS
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"]
)
def test_a_merge_computes_the_same(auto_class: str, kind: str, values: Any, options: Any) -> None:
    """Factors beside plain modules with the weights that quantised ones compute with, then one
    plain model.
    """
    plain, model = both(auto_class, kind, values, **options)
    torch.manual_seed(1)
    inject_adapter(lora(**options), plain, auto_class, quantized=True, dequantized=True)
    assert quantization_of(plain) is None
    load_model_tensors(plain, model_tensors(model))
    with torch.no_grad():
        expected = model.eval()(**batch()).logits
        factors = plain.eval()(**batch()).logits
        merge_adapter(plain)
        found = plain(**batch()).logits
    spread = float(expected.std())
    assert float((factors - expected).abs().max()) < 1e-4 * spread
    assert float((found - factors).abs().max()) < 1e-4 * spread
    assert {name: tensor.shape for name, tensor in plain.state_dict().items()} == {
        name: tensor.shape for name, tensor in small(auto_class, kind, values).state_dict().items()
    }


@KINDS
def test_bytes_and_sizes_are_told_before_they_are_taken(
    auto_class: str, kind: str, values: Any
) -> None:
    plain, model = both(auto_class, kind, values)
    with torch.device("meta"):
        shapes = small(auto_class, kind, values)
    inject_adapter(lora(), shapes, auto_class, quantized=True, meta=True)
    found = tensor_bytes(model)
    assert tensor_bytes(shapes) == found
    held = 0
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "quant_state.bitsandbytes" in name or name.endswith("weight_format"):
            continue  # a description, on the CPU
        held += tensor.numel() * tensor.itemsize
    tied = sum(
        p.numel() * 4 for n, p in model.named_parameters(remove_duplicate=False) if n not in found
    )
    offsets = 4 * sum("nested_absmax" in name for name in model.state_dict())
    assert sum(found.values()) == held - tied + offsets
    frozen = {
        name.replace(".base_layer.", "."): size
        for name, size in tensor_sizes(model).items()
        if "lora_" not in name
    }
    for name, param in plain.named_parameters():
        assert frozen.get(name, param.numel()) == param.numel(), name


def test_weights_of_16_bits_are_computed_in_16() -> None:
    model = small(CAUSAL, "llama", LARGER).to(torch.bfloat16)
    inject_adapter(lora(), model, CAUSAL, quantized=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.train()(**batch()).logits.float().square().mean()
    loss.backward()
    assert all(
        param.grad.dtype is torch.float32 for param in model.parameters() if param.requires_grad
    )


def test_documents_of_a_block_stay_apart() -> None:
    _, model = both(CAUSAL, "llama", LARGER)
    refuse_mixed_documents(model, "task.packing=true")
