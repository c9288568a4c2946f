"""Dropout that is switched off leaves nothing to chance, in any decoder of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optrun.task.dropout import disable_dropout

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {**WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5},
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    "biogpt": {**WIDE, "intermediate_size": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "is_decoder": True,
        "is_encoder_decoder": False,
    },
    "llama": {**WIDE, "intermediate_size": 64, "attention_dropout": 0.5},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "attention_dropout": 0.3,
        "resid_dropout": 0.3,
    },
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "attn_pdrop": 0.3},
    "mixtral": {
        **WIDE,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "num_local_experts": 2,
        "attention_dropout": 0.5,
    },
    "phi": {**WIDE, "intermediate_size": 64, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "falcon": {**WIDE, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64},
}


EAGER_ALONE = ("xglm", "gpt_neo", "codegen", "ctrl")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CASES)
def test_training_is_what_evaluation_is(kind: str, implementation: str) -> None:
    """And the configuration that is saved is as it was."""
    config = AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, **CASES[kind])
    if implementation == "sdpa" and kind in EAGER_ALONE:
        return
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    before = copy.deepcopy(model.config.to_dict())
    disable_dropout(model)
    ids = torch.arange(2, 26).reshape(2, 12)
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.train()
        for seed in range(3):
            torch.manual_seed(seed)
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert model.config.to_dict() == before
