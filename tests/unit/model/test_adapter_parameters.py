"""Factors of LoRA beside parameters that are no modules, such as stacked experts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.model.adapter import base_tensors, inject, injected, merge, without_factors
from optrun.model.weights import load_model_tensors, model_tensors
from tests.unit.model.test_adapter import CAUSAL, COMMON, batch, lora, small, whole_of

MOE = {
    **COMMON,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
FUSED = ["experts.down_proj", "experts.gate_up_proj"]
EXPERTS = [
    # architecture, its values, options of the adapter, ends of the parameters with factors
    (
        "qwen3_moe",
        {"num_experts": 4, "moe_intermediate_size": 12},
        {"target_parameters": FUSED},
        FUSED,
    ),
    (
        "gpt_oss",
        {"num_local_experts": 3},
        {"target_parameters": FUSED, "target_modules": []},
        FUSED,
    ),
    (
        "llama4_text",
        {"num_local_experts": 3, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1},
        {"target_parameters": FUSED[1:], "rank_pattern": {"gate_up_proj": 4}, "use_rslora": True},
        FUSED[1:],
    ),
    (
        "mixtral",
        {"num_local_experts": 4},
        {
            "target_parameters": [
                "q_proj.weight",
                "mlp.gate.weight",
                "layers.0.mlp.experts.down_proj",
            ]
        },
        ["experts.down_proj", "gate.weight", "q_proj.weight"],
    ),
]


def own_experts(
    kind: str, values: dict[str, Any], adapter: dict[str, Any], held: dict[str, torch.Tensor]
) -> Any:
    """A model that peft adapts by itself."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            small(CAUSAL, kind, values), peft.LoraConfig(task_type="CAUSAL_LM", **adapter)
        )
        peft.set_peft_model_state_dict(
            model, {f"base_model.model.{name}": held[name] for name in held}
        )
    return model


@pytest.mark.parametrize(
    ("kind", "values", "options", "ends"), EXPERTS, ids=lambda value: str(value)[:20]
)
def test_stacked_experts(
    kind: str, values: dict[str, Any], options: dict[str, Any], ends: list[str]
) -> None:
    """Each expert has factors.

    What they compute is what peft computes, and what a merge and a rebuilt model do.
    """
    import peft

    values = MOE | values
    model = small(CAUSAL, kind, values)
    before, inputs = whole_of(model), batch(CAUSAL)
    first = model.eval()(**inputs).logits
    (note,) = inject(lora(r=2, **options), model, CAUSAL)
    facts = injected(model)
    assert facts is not None
    assert f"{len(ends)} parameter{'s'[: len(ends) - 1]} (" in note
    assert all(
        name.endswith(end) for name, end in zip(sorted(facts.places.parameters), ends, strict=True)
    )
    assert bool(facts.places.targets) == (options.get("target_modules") != [])
    torch.testing.assert_close(model(**inputs).logits, first, rtol=1e-6, atol=1e-6)
    frozen = base_tensors(model)
    assert frozen.keys() == before.keys()
    with torch.no_grad():
        for tensor in model_tensors(model).values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model(**inputs).loss.backward()
    idle = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and not param.grad.any()
    ]
    assert idle == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in base_tensors(model).items()), (
        "the base is frozen"
    )
    trained = model(**inputs).logits
    held = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    named = {
        "target_modules": list(facts.places.targets),
        "target_parameters": list(facts.places.parameters),
    }
    own = {"r": 2, "lora_alpha": 16, **options, **named}
    theirs = own_experts(
        kind, values, own, peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    )
    assert torch.equal(theirs.eval()(**inputs).logits, trained)
    again = small(CAUSAL, kind, values)
    inject(lora(r=2, **options | named), again, CAUSAL)
    load_model_tensors(again, held)
    assert torch.equal(again.eval()(**inputs).logits, trained)
    with without_factors(again):
        assert torch.equal(again(**inputs).logits, first)
    merge(model)
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(model(**inputs).logits, trained, rtol=1e-4, atol=1e-5)


REFUSED = [
    (
        "mamba",
        {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 40},
        {"target_parameters": ["A_log"]},
        ["A_log stands beside modules in backbone.layers.0.mixer"],
    ),
    *(
        (
            "qwen3_moe",
            {**MOE, **EXPERTS[0][1], **more},
            {"target_parameters": names, **options},
            facts,
        )
        for names, more, options, facts in (
            (
                ["experts.gate_up_prj"],
                {},
                {},
                ["gate_up_prj is the name of no parameter", "experts.gate_up_proj?"],
            ),
            (["norm.weight"], {}, {}, ["norm.weight has 1 axis, and factors stand beside 2 or 3"]),
            (
                ["q_proj.weight"],
                {},
                {"target_modules": ["q_proj"]},
                ["q_proj holds one of", "factors twice"],
            ),
            (
                ["o_proj.weight"],
                {},
                {"modules_to_save": ["o_proj"]},
                ["o_proj.weight trains whole"],
            ),
            (["lm_head.weight"], {"tie_word_embeddings": True}, {}, ["lm_head.weight"]),
            (
                ["down_proj"],
                {},
                {"rank_pattern": {"dwn_proj": 4}},
                ["adapter.rank_pattern=dwn_proj", "down_proj?"],
            ),
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "values", "options", "facts"), REFUSED, ids=lambda value: str(value)[:20]
)
def test_refused(
    kind: str, values: dict[str, Any], options: dict[str, Any], facts: list[str]
) -> None:
    model = small(CAUSAL, kind, values)
    with pytest.raises(ConfigError) as refusal:
        inject(lora(**options), model, CAUSAL)
    assert all(fact in str(refusal.value) for fact in facts), refusal.value


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("lora_dropout", 0.1, "0 with adapter.target_parameters"),
        ("use_dora", True, "false with adapter.target_parameters"),
        ("layers_to_transform", [0], "name the parameters with their layers"),
        ("init_lora_weights", "pissa", "true, false or gaussian with adapter.target_parameters"),
        ("target_modules", "", "module names, or null"),
    ],
)
def test_what_peft_cannot_do_beside_parameters(key: str, value: Any, fact: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        lora(target_parameters=["down_proj"], **{key: value})
    assert str(refusal.value).startswith(f"adapter.{key}=")
    assert fact in str(refusal.value)
