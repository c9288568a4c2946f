"""Which norm can carry a factor on the logits of a tied head.

Found in a forward pass, on the meta device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from optrun.param_groups.tied_head import NoCarrierError, carrier_of_logits

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2}
TEXT, PAIRS, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"


def on_meta(model_type: str, auto: str, values: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(model_type, vocab_size=64, pad_token_id=0, **values)
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config)


@pytest.mark.parametrize(
    ("model_type", "auto", "values", "path", "factor"),
    [
        ("gpt2", TEXT, {"n_embd": 32, "n_head": 2, "n_layer": 2}, "transformer.ln_f", 1),
        ("llama", TEXT, DECODER, "model.norm", 1),
        ("bert", MASKED, SIZES, "cls.predictions.transform.LayerNorm", 1),
        ("t5", PAIRS, T5, "decoder.final_layer_norm", 32**-0.5),
        ("t5", PAIRS, {**T5, "tie_word_embeddings": False}, "decoder.final_layer_norm", 1),
        ("openai-gpt", TEXT, {"n_embd": 32, "n_head": 2, "n_layer": 2}, "transformer.h.1.ln_2", 1),
    ],
)
def test_the_norm_and_what_multiplies_its_output(
    model_type: str, auto: str, values: dict[str, Any], path: str, factor: float
) -> None:
    """The second T5 is its version 1.1, whose logits nothing scales."""
    assert carrier_of_logits(on_meta(model_type, auto, values)) == (path, pytest.approx(factor))


@pytest.mark.parametrize(
    ("model_type", "values", "why"),
    [
        (
            "gemma",
            {"head_dim": 16},
            r"model.norm is not linear in its parameters",
        ),  # 1 is added to its weight
        ("olmo", {}, r"model.norm is not linear in its parameters"),  # it has none
    ],
)
def test_a_norm_that_is_not_linear_in_its_parameters(
    model_type: str, values: dict[str, Any], why: str
) -> None:
    with pytest.raises(NoCarrierError, match=why):
        carrier_of_logits(on_meta(model_type, TEXT, {**DECODER, **values}))


def test_no_norm_of_its_own() -> None:
    projected = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 64}
    model = on_meta(
        "opt", TEXT, {**projected, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
    )
    with pytest.raises(NoCarrierError, match="no norm that is used only before the head"):
        carrier_of_logits(model)
    with pytest.raises(NoCarrierError, match="no transformers model"):
        carrier_of_logits(torch.nn.Linear(2, 2))
