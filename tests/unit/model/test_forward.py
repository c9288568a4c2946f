"""Training and evaluation keep no keys and values and look for no padding.

Afterwards the model is as it was.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    T5Config,
    T5ForConditionalGeneration,
)

from optrun.model.forward import without_cache_and_padding_check

CHECK = "warn_if_padding_and_no_attention_mask"
IDS = torch.arange(12).reshape(2, 6)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=16, **ids)
    ).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


@pytest.mark.parametrize("make", [gpt2, t5])
def test_a_forward_pass_keeps_nothing_and_computes_the_same(make: type) -> None:
    model = make()
    with torch.no_grad():
        before = model(input_ids=IDS, labels=IDS)
        with without_cache_and_padding_check(model):
            inside = model(input_ids=IDS, labels=IDS)
            assert inside.get("past_key_values") is None
        after = model(input_ids=IDS, labels=IDS)
    assert before.past_key_values is not None
    assert after.past_key_values is not None
    assert torch.equal(before.logits, inside.logits)
    assert model.config.use_cache is True


def test_generation_is_the_same_inside() -> None:
    model = gpt2()
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    outside = model.generate(IDS, **options, return_dict_in_generate=True)
    with without_cache_and_padding_check(model):
        inside = model.generate(IDS, **options, return_dict_in_generate=True)
    assert torch.equal(inside.sequences, outside.sequences)
    assert inside.past_key_values is not None


def test_what_keeps_nothing_anyway_is_left_alone_and_an_error_puts_back() -> None:
    size = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    for model in (BertModel(BertConfig(**size, vocab_size=16)), torch.nn.Linear(1, 1)):
        before = vars(getattr(model, "config", model)).copy()
        with without_cache_and_padding_check(model):
            pass
        assert getattr(model, "config", model).__dict__.keys() == before.keys()
    model = gpt2()
    model.config.use_cache = False
    with without_cache_and_padding_check(model):
        pass
    assert model.config.use_cache is False
    model.config.use_cache = True
    with pytest.raises(ZeroDivisionError), without_cache_and_padding_check(model):
        raise ZeroDivisionError
    assert model.config.use_cache is True


def test_nothing_is_read_from_the_device_to_look_for_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, looked = gpt2(), list[int]()
    monkeypatch.setattr(GPT2Model, CHECK, lambda *_: looked.append(1))
    with without_cache_and_padding_check(model), torch.no_grad():
        model(input_ids=IDS)
    assert looked == []
    model(input_ids=IDS)
    assert looked == [1]
    assert not any(CHECK in vars(part) for part in model.modules())
