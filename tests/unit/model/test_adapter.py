"""Low-rank factors in models of transformers.

Where they go, what is frozen, and what peft makes of the same.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.adapter import SCHEMAS, LoraConfig
from optrun.config.schema.model import SCHEMAS as MODELS
from optrun.model.adapter import (
    adapter_of,
    base_tensors,
    inject_adapter,
    merge_adapter,
    require_adapter,
    without_adapter,
)
from optrun.model.adapter_modules import head_modules, linear_modules
from optrun.model.quantization import is_quantized, require_quantization
from optrun.model.weights import load_model_tensors, model_tensors
from optrun.param_groups import build_param_groups
from tests.zoo.zoo import model_types, part_of, shallow

SEQUENCE, TOKEN, CAUSAL, MASKED, SEQ2SEQ, IMAGE = (
    f"AutoModelFor{kind}"
    for kind in (
        "SequenceClassification",
        "TokenClassification",
        "CausalLM",
        "MaskedLM",
        "Seq2SeqLM",
        "ImageClassification",
    )
)
COMMON = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 40,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "pad_token_id": 0}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 40,
    "decoder_start_token_id": 0,
}
VIT = {**COMMON, "image_size": 8, "patch_size": 4}
SMALL = [
    # class, architecture, its values, modules that train whole
    (SEQUENCE, "bert", COMMON, ["classifier"]),
    (SEQUENCE, "roberta", COMMON, ["classifier"]),
    (
        SEQUENCE,
        "distilbert",
        {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
        ["pre_classifier", "classifier"],
    ),
    (SEQUENCE, "gpt2", GPT2, ["score"]),
    (
        SEQUENCE,
        "xlnet",
        {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
        ["sequence_summary", "logits_proj"],
    ),
    (SEQUENCE, "t5", T5, ["classification_head"]),
    (TOKEN, "bert", COMMON, ["classifier"]),
    (CAUSAL, "gpt2", GPT2, []),
    (CAUSAL, "llama", {**COMMON, "num_key_value_heads": 1}, []),
    (
        CAUSAL,
        "mamba",
        {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 40},
        [],
    ),
    (MASKED, "bert", COMMON, []),
    (MASKED, "albert", {**COMMON, "embedding_size": 16}, []),
    (SEQ2SEQ, "t5", T5, []),
    (IMAGE, "vit", VIT, ["classifier"]),
]


def lora(**options: Any) -> LoraConfig:
    made = choice("adapter", SCHEMAS, "lora", options)
    assert isinstance(made, LoraConfig)
    return made


def small(auto_class: str, model_type: str, values: dict[str, Any]) -> Any:
    labels = {"num_labels": 3} if "Classification" in auto_class else {}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **values, **labels)
    return getattr(transformers, auto_class).from_config(config, dtype=torch.float32)


def batch(auto_class: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    if auto_class == IMAGE:
        return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 2])}
    ids = torch.cat([torch.randint(3, 40, (2, 6)), torch.ones(2, 1, dtype=torch.int64)], 1)
    labels = (
        torch.tensor([0, 2]) if auto_class == SEQUENCE else ids % 3 if auto_class == TOKEN else ids
    )
    return {"input_ids": ids, "labels": labels}


def whole_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("auto_class", "kind", "values", "saved"), SMALL, ids=lambda value: str(value)[:20]
)
def test_the_default_fits(
    auto_class: str, kind: str, values: dict[str, Any], saved: list[str]
) -> None:
    """Every factor has a gradient, a step moves the adapter alone, and a merge is what the
    adapter computed.
    """
    model = small(auto_class, kind, values)
    before, linear = whole_of(model), linear_modules(model)
    inputs = batch(auto_class)
    first = model.eval()(**inputs).logits
    notes = inject_adapter(lora(r=2), model, auto_class)
    facts = adapter_of(model)
    assert facts is not None
    assert list(facts.modules.saved) == saved
    heads = (
        tuple(f"{path}." for path in head_modules(model))
        if not saved
        else tuple(f"{path}." for path in saved)
    )
    assert set(facts.modules.targets) == {
        path for path in linear if not f"{path}.".startswith(heads or ("-",))
    }
    assert "parameters train" in notes[0]
    torch.testing.assert_close(
        model(**inputs).logits, first, rtol=1e-6, atol=1e-6
    )  # B starts at zero
    frozen = {name: tensor.clone() for name, tensor in base_tensors(model).items()}
    assert frozen.keys() <= before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.items())
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.05
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    idle = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.grad is None
    ]
    assert idle == []
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in base_tensors(model).items()), (
        "the base is frozen"
    )
    trained = model(**inputs).logits
    assert not torch.allclose(trained, first)
    held = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    assert held.keys() == facts.names
    assert set(held) == {name for name, param in model.named_parameters() if param.requires_grad}
    merge_adapter(model)
    assert adapter_of(model) is None
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(model(**inputs).logits, trained, rtol=1e-4, atol=1e-5)
    again = small(auto_class, kind, values)
    inject_adapter(lora(r=2), again, auto_class)
    load_model_tensors(again, held)
    assert torch.equal(again.eval()(**inputs).logits, trained)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"rank_pattern": {"query": 4}, "alpha_pattern": {"attention.output.dense": 4}},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "exclude_modules": ["output.dense"]},
        {"exclude_modules": r".*\.intermediate\.dense"},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": False},
    ],
    ids=str,
)
def test_peft_computes_the_same(options: dict[str, Any]) -> None:
    """The same factors in a model that peft adapted by itself give the same logits, bit for bit."""
    import peft

    config = choice(
        "adapter", SCHEMAS, "lora", {"r": 2, "target_modules": ["query", "dense"], **options}
    )
    assert isinstance(config, LoraConfig)
    model = small(SEQUENCE, "bert", COMMON)
    inject_adapter(config, model, SEQUENCE)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in model_tensors(model):
                param.add_(0.1 * torch.randn_like(param))
    own = peft.LoraConfig(
        r=2, lora_alpha=16, target_modules=["query", "dense"], task_type="SEQ_CLS", **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of transformers' that will be others
        theirs = peft.get_peft_model(small(SEQUENCE, "bert", COMMON), own)
        held = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        peft.set_peft_model_state_dict(
            theirs, {f"base_model.model.{name}": held[name] for name in held}
        )
    inputs = batch(SEQUENCE)
    assert torch.equal(theirs.eval()(**inputs).logits, model.eval()(**inputs).logits)
    names = {
        name.replace("base_model.model.", "", 1)
        for name, param in theirs.named_parameters()
        if param.requires_grad
    }
    assert names == model_tensors(model).keys()


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"rank_pattern": {"query": 4}},
        {"layers_to_transform": 1},
    ],
    ids=str,
)
def test_a_model_is_built_again_and_merged(options: dict[str, Any]) -> None:
    """As a checkpoint is: from the base and the factors, by the names of what has some.

    The start is the model's.
    """
    inputs, plain = batch(SEQUENCE), small(SEQUENCE, "bert", COMMON)
    model = small(SEQUENCE, "bert", COMMON)
    inject_adapter(lora(r=2, **options), model, SEQUENCE)
    started = model.eval()(**inputs).logits
    torch.testing.assert_close(started, plain.eval()(**inputs).logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for tensor in model_tensors(model).values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    trained, held = (
        model(**inputs).logits,
        {name: one.clone() for name, one in model_tensors(model).items()},
    )
    facts = adapter_of(model)
    assert facts is not None
    again = small(SEQUENCE, "bert", COMMON)
    named = {
        "target_modules": list(facts.modules.targets),
        "modules_to_save": list(facts.modules.saved),
    }
    inject_adapter(lora(r=2, **{**options, **named, "layers_to_transform": None}), again, SEQUENCE)
    load_model_tensors(again, held)
    assert torch.equal(again.eval()(**inputs).logits, trained)
    merge_adapter(model)
    torch.testing.assert_close(model(**inputs).logits, trained, rtol=1e-4, atol=1e-5)


def test_all_linear_is_what_null_is() -> None:
    places = []
    for asked in (None, "all-linear"):
        model = small(SEQUENCE, "bert", COMMON)
        inject_adapter(lora(target_modules=asked), model, SEQUENCE)
        facts = adapter_of(model)
        assert facts is not None
        places.append(facts.modules)
    assert places[0] == places[1]


def test_shapes_alone() -> None:
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig())
    inject_adapter(lora(), model, SEQUENCE, meta=True)
    assert {param.device.type for param in model.parameters()} == {"meta"}


def test_new_modules_train_whole() -> None:
    model = small(SEQUENCE, "bert", COMMON)
    inject_adapter(lora(), model, SEQUENCE, ["classifier.weight", "bert.pooler.dense.weight"])
    facts = adapter_of(model)
    assert facts is not None
    assert set(facts.modules.saved) == {"classifier", "bert.pooler.dense"}
    assert "bert.pooler.dense" not in facts.modules.targets


REFUSED = [
    # class, architecture, its values, options of the adapter, pieces of the message
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"target_modules": ["qury"]},
        ["adapter.target_modules=['qury']", "mean query?"],
    ),
    (SEQUENCE, "bert", COMMON, {"target_modules": ["query", "zzz"]}, ["zzz", "Names are such as"]),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"target_modules": "quer"},
        ["adapter.target_modules=quer", "the whole name of no module", "query"],
    ),
    (SEQUENCE, "bert", COMMON, {"target_modules": ["classifier"]}, ["train in full (classifier)"]),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"rank_pattern": {"qury": 4}},
        ["adapter.rank_pattern=qury", "query"],
    ),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"alpha_pattern": {"layer.7.query": 4}},
        ["adapter.alpha_pattern=layer.7.query"],
    ),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"layers_to_transform": [0, 5]},
        ["adapter.layers_to_transform=[0, 5]", "layer 5 has no module"],
    ),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"exclude_modules": ["qery"]},
        ["adapter.exclude_modules=['qery']", "mean query?"],
    ),
    (SEQUENCE, "bert", COMMON, {"exclude_modules": ".*"}, ["no module is left"]),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"target_modules": ["LayerNorm"]},
        ["peft cannot take this model", "not supported"],
    ),
    (
        SEQUENCE,
        "bert",
        COMMON,
        {"modules_to_save": ["clasifier"]},
        ["adapter.modules_to_save", "mean classifier?"],
    ),
    (
        CAUSAL,
        "gpt2",
        GPT2,
        {"target_modules": ["lm_head"]},
        ["lm_head", "shares its weight with", "wte"],
    ),
    (
        CAUSAL,
        "gpt2",
        GPT2,
        {"modules_to_save": ["lm_head"]},
        ["lm_head", "shares its weight with", "wte"],
    ),
    (
        IMAGE,
        "resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
        {},
        ["BatchNorm2d", "statistics"],
    ),
]


@pytest.mark.parametrize(
    ("auto_class", "kind", "values", "options", "facts"), REFUSED, ids=lambda value: str(value)[:20]
)
def test_refused(
    auto_class: str, kind: str, values: dict[str, Any], options: dict[str, Any], facts: list[str]
) -> None:
    model = small(auto_class, kind, values)
    with pytest.raises(ConfigError) as refusal:
        inject_adapter(lora(**options), model, auto_class)
    assert all(fact in str(refusal.value) for fact in facts), refusal.value


def test_what_is_frozen_must_not_be_random() -> None:
    with pytest.raises(
        ConfigError, match=r"modules_to_save=\[\]: classifier.weight is not in .*such as classifier"
    ):
        inject_adapter(
            lora(modules_to_save=[]),
            small(SEQUENCE, "bert", COMMON),
            SEQUENCE,
            ["classifier.weight"],
        )


@pytest.mark.parametrize(
    ("key", "value", "facts"),
    [
        ("r", 0, ["adapter.r=0", "1 or more"]),
        ("lora_alpha", 0, ["adapter.lora_alpha=0", "above 0"]),
        ("lora_dropout", 1.0, ["adapter.lora_dropout=1.0", "[0, 1)"]),
        ("target_modules", [], ["adapter.target_modules=[]", "a list of module names"]),
        ("target_modules", "a(", ["adapter.target_modules=a(", "not a regular expression"]),
        ("loraplus_lr_ratio", -1.0, ["adapter.loraplus_lr_ratio=-1.0", "above 0"]),
        ("default_lr_factor", 0.0, ["adapter.default_lr_factor=0.0", "above 0"]),
    ],
)
def test_values_out_of_range(key: str, value: Any, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        lora(**{key: value})
    assert all(fact in str(refusal.value) for fact in facts), refusal.value


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError,
        match=r"adapter=lora: the package peft is not installed. pip install 'optrun\[lora\]'",
    ):
        require_adapter(lora())
    require_adapter(choice("adapter", SCHEMAS, "none", {}))


def test_layers_and_lora_plus() -> None:
    """Factors lie in the layers of their matrices.

    B takes its multiple of the layer's lr, the head none.
    """
    model = small(SEQUENCE, "bert", COMMON)
    inject_adapter(lora(), model, SEQUENCE)
    groups = build_param_groups(
        model, "layerwise", lr=1.0, weight_decay=0.1, decay_rate=0.5, loraplus_lr_ratio=16.0
    )
    found = {name: (group["layer"], group["lr"]) for group in groups for name, _ in group["params"]}
    lower, upper = (f"bert.encoder.layer.{number}.attention.self.query.lora" for number in (0, 1))
    assert found[f"{lower}_A.default.weight"] == ("layer_00", 0.25)
    assert found[f"{lower}_B.default.weight"] == ("layer_00", 4.0)
    assert found[f"{upper}_A.default.weight"] == ("layer_01", 0.5)
    assert found[f"{upper}_B.default.weight"] == ("layer_01", 8.0)
    assert found["classifier.modules_to_save.default.weight"] == ("head", 1.0)
    assert found.keys() == {name for name, param in model.named_parameters() if param.requires_grad}
    rules = [{"pattern": "lora_B", "lr_scale": 2.0}]
    ruled = build_param_groups(model, "standard", lr=1.0, rules=rules, loraplus_lr_ratio=16.0)
    assert {group["lr"] for group in ruled for name, _ in group["params"] if "lora_B" in name} == {
        2.0
    }, "a rule wins"


TYPES = (
    "albert",
    "bart",
    "bert",
    "clip",
    "deberta-v2",
    "distilbert",
    "gpt2",
    "gpt_oss",
    "jina_embeddings_v3",
    "llama",
    "mamba",
    "t5",
    "vit",
    "xlnet",
)


def _of(auto_class: str, config: Any) -> nn.Module:
    """The model of a configuration, with few blocks where it can be built like that."""
    build = getattr(transformers, auto_class).from_config
    try:
        model: nn.Module = build(shallow(copy.deepcopy(config), 2))
    except Exception:
        model = build(config)
    return model


def adapted(model_type: str) -> str:
    """Put the default adapter into the default model of an architecture, without memory.

    Say what came of it.
    """
    transformers.logging.set_verbosity_error()
    for auto_class in (SEQUENCE, IMAGE, CAUSAL, SEQ2SEQ, "AutoModel"):
        mapping = getattr(transformers, auto_class)._model_mapping
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            try:
                config = transformers.CONFIG_MAPPING[model_type]()
                if type(config) not in mapping:
                    continue
                model = _of(auto_class, config)
            except (
                Exception
            ) as error:  # what a default configuration cannot build is no matter here
                return f"not built: {type(error).__name__}"
        break
    else:
        return "not built: no class"
    linear = linear_modules(model)
    try:
        inject_adapter(lora(r=2), model, auto_class, meta=True)
    except ConfigError as error:
        known = any(
            why in str(error) for why in ("BatchNorm", "no linear module", "by the end of its name")
        )
        return f"{'refused' if known else 'wrong'}: {error}"
    facts = adapter_of(model)
    assert facts is not None
    assert set(facts.modules.targets) <= set(linear)
    assert all(
        param.requires_grad == (name in facts.names) for name, param in model.named_parameters()
    )
    if (
        auto_class in (SEQUENCE, IMAGE) and model_type != "perceiver"
    ):  # its decoder is a part of its body
        assert facts.modules.saved, f"{auto_class} has a head"
    build_param_groups(model, "standard", lr=1.0)
    return "adapted"


@pytest.mark.parametrize("model_type", TYPES)
def test_architectures_of_transformers(model_type: str) -> None:
    assert adapted(model_type) == "adapted"


@pytest.mark.slow
@pytest.mark.parametrize("quarter", range(4))
def test_every_architecture_of_transformers(quarter: int) -> None:
    found = {}
    for model_type in part_of(model_types(), quarter, 4):
        try:
            found[model_type] = adapted(model_type)
        except AssertionError as error:
            found[model_type] = f"wrong: {error}"
    assert {name: said for name, said in found.items() if said.startswith("wrong")} == {}
    adapted_ones = [name for name, said in found.items() if said == "adapted"]
    assert len(adapted_ones) > 75, found
    assert len([name for name, said in found.items() if "by the end of its name" in said]) < 6, (
        found
    )


def test_a_missing_package_for_quantised_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = choice("model", MODELS, "pretrained", {"path": "x", "quantization": "4bit"})
    assert is_quantized(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"model.quantization=4bit: the package bitsandbytes .*optrun\[quantization\]",
    ):
        require_quantization(config)
    require_quantization(choice("model", MODELS, "pretrained", {"path": "x"}))


def test_a_factor_that_is_frozen_stays_so_beside_the_base() -> None:
    """`without_adapter` puts back which parameters train."""
    model = small(SEQUENCE, "bert", COMMON)
    inject_adapter(lora(), model, SEQUENCE)
    frozen = next(name for name, _ in model.named_parameters() if "lora_A" in name)
    model.get_parameter(frozen).requires_grad_(False)
    before = {name: param.requires_grad for name, param in model.named_parameters()}
    with without_adapter(model):
        pass
    assert {name: param.requires_grad for name, param in model.named_parameters()} == before
