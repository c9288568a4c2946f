"""Every trainable parameter in exactly one group, decayed by what it is, scaled by where it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optrun.config import store
from optrun.config.choice import choice
from optrun.config.param_groups import SCHEMAS, LayerwiseConfig
from optrun.errors import ConfigError
from optrun.optimizer import AdamW, Lamb, LazyAdam
from optrun.param_groups import NamedParam, build_param_groups, layerwise_lr_decay
from optrun.scheduler import build_scheduler


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.ln = nn.LayerNorm(width)


class Tiny(nn.Module):
    def __init__(self, depth: int = 3, width: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.final = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 10)
        self.temperature = nn.Parameter(torch.ones(()))
        if tied:
            self.classifier.weight = self.embed.weight


def _by_name(groups: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return {name: group.get(key) for group in groups for name, _ in group["params"]}


def _bert(**options: Any) -> nn.Module:
    config = transformers.BertConfig(num_hidden_layers=3, **options)
    with torch.device("meta"):
        model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


# -- standard and single ----------------------------------------------------------------------------------------------


def test_standard_decays_matrices_and_embeddings_alone() -> None:
    decay = _by_name(build_param_groups(Tiny(1), "standard", lr=1.0, weight_decay=0.1), "weight_decay")
    assert {name for name, value in decay.items() if value == 0.1} == {
        "embed.weight",
        "blocks.0.attention.weight",
        "blocks.0.up.weight",
        "blocks.0.down.weight",
        "classifier.weight",
    }
    assert set(decay.values()) == {0.0, 0.1}
    kept = _by_name(build_param_groups(Tiny(1), "standard", weight_decay=0.1, decay_embeddings=False), "weight_decay")
    assert {name for name in decay if decay[name] != kept[name]} == {"embed.weight"}


def test_groups_say_what_they_are() -> None:
    groups = build_param_groups(Tiny(1), lr=0.5, weight_decay=0.1)
    assert [group["role"] for group in groups] == ["vector", "embedding", "matrix", "bias", "norm", "head"]
    for group in groups:
        assert (group["lr"], group["lr_scale"], group["layer_id"], group["layer"]) == (0.5, 1.0, None, "all")
        assert group["rule"] == "standard"
    assert "lr" not in build_param_groups(Tiny(1))[0]
    assert "weight_decay" not in build_param_groups(Tiny(1), "single")[0]


def test_single_decays_everything() -> None:
    groups = build_param_groups(Tiny(1), "single", lr=1.0, weight_decay=0.1)
    assert {group["weight_decay"] for group in groups} == {0.1}


class OddNorm(nn.Module):
    """A norm of the user's own, two-dimensional and under another name, as some models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 4))


class ScaleNorm(OddNorm):
    pass


class NormedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("module", "leaf", "role"),
    [
        (ScaleNorm(), "gain", "norm"),
        (nn.LayerNorm((2, 4)), "weight", "norm"),
        (nn.RMSNorm(4), "weight", "norm"),
        (nn.BatchNorm2d(4), "weight", "norm"),
        (nn.GroupNorm(2, 4), "bias", "bias"),
        (NormedLinear(), "weight", "matrix"),
        (nn.Linear(4, 1), "weight", "matrix"),
        (nn.Conv1d(4, 4, 3, groups=4), "weight", "matrix"),
        (nn.Embedding(1, 4), "weight", "embedding"),
        (nn.PReLU(), "weight", "vector"),
        (nn.MultiheadAttention(4, 2), "in_proj_bias", "bias"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", "matrix"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_roles_by_module_type(module: nn.Module, leaf: str, role: str) -> None:
    holder = nn.ModuleDict({"ln_1": module})
    assert _by_name(build_param_groups(holder), "role")[f"ln_1.{leaf}"] == role


def test_weight_norm_lengths_and_disguised_vectors_do_not_decay() -> None:
    model = nn.Module()
    model.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    model.layer_scale = nn.Parameter(torch.ones(1, 1, 8))
    model.pos_embed = nn.Parameter(torch.ones(1, 5, 8))
    roles = _by_name(build_param_groups(model), "role")
    assert roles["conv.parametrizations.weight.original0"] == "norm"
    assert roles["conv.parametrizations.weight.original1"] == "matrix"
    assert roles["layer_scale"] == "vector"
    assert roles["pos_embed"] == "embedding"


def test_tied_tensors_count_once_and_frozen_ones_not_at_all() -> None:
    model = Tiny(1, tied=True)
    model.final.requires_grad_(False)
    claimed = _by_name(build_param_groups(model), "role")
    assert claimed["embed.weight"] == "embedding"
    assert "classifier.weight" not in claimed
    assert not {"final.weight", "final.bias"} & set(claimed)
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter trains"):
        build_param_groups(model)


def test_names_and_shapes_are_enough() -> None:
    model = Tiny(2)
    from_names = build_param_groups(model.named_parameters(), "layerwise", lr=1.0, decay_rate=0.5)
    from_model = build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.5)
    assert _by_name(from_names, "lr") == _by_name(from_model, "lr")
    with pytest.raises(TypeError, match=r"expected a model or \(name, parameter\) pairs, got Parameter"):
        build_param_groups(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parameters are called x"):
        build_param_groups([("x", torch.ones(1)), ("x", torch.ones(1))])


# -- layerwise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "head", "blocks", "embeddings"),
    [
        ("paddle", 1.0, [0.125, 0.25, 0.5], 0.0625),
        ("beit", 1.0, [0.125, 0.25, 0.5], 0.0625),
        ("electra", 1.0, [0.0625, 0.125, 0.25], 0.03125),
        ("xlnet", 1.0, [0.25, 0.5, 1.0], 0.25),
    ],
)
def test_dialects(dialect: str, head: float, blocks: list[float], embeddings: float) -> None:
    lr = _by_name(build_param_groups(_bert(), "layerwise", lr=1.0, decay_rate=0.5, dialect=dialect), "lr")
    assert lr["classifier.weight"] == lr["bert.pooler.dense.bias"] == head
    assert [lr[f"bert.encoder.layer.{layer}.output.dense.weight"] for layer in range(3)] == blocks
    assert lr["bert.embeddings.word_embeddings.weight"] == lr["bert.embeddings.LayerNorm.bias"] == embeddings


def test_layers_are_numbered_and_named() -> None:
    groups = build_param_groups(_bert(), "layerwise", lr=1.0, decay_rate=0.5)
    layers = {(group["layer_id"], group["layer"], group["lr_scale"]) for group in groups}
    assert layers == {
        (0, "embeddings", 0.0625),
        (1, "layer_00", 0.125),
        (2, "layer_01", 0.25),
        (3, "layer_02", 0.5),
        (4, "head", 1.0),
    }


def _meta(name: str, **options: Any) -> nn.Module:
    config = transformers.CONFIG_MAPPING[name](**options)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModel.from_config(config)
    return model


def test_towers_have_their_own_depth() -> None:
    lr = _by_name(
        build_param_groups(_meta("t5", num_layers=2, num_decoder_layers=4), "layerwise", lr=1.0, decay_rate=0.5), "lr"
    )
    assert lr["encoder.block.1.layer.0.SelfAttention.q.weight"] == 0.5
    assert lr["encoder.block.0.layer.0.SelfAttention.q.weight"] == 0.25
    assert lr["decoder.block.3.layer.0.SelfAttention.q.weight"] == 0.5
    assert lr["decoder.block.0.layer.0.SelfAttention.q.weight"] == 0.0625
    assert lr["shared.weight"] == 0.03125  # below the deeper of the two
    clip = transformers.CLIPConfig(text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 3})
    with torch.device("meta"):
        groups = build_param_groups(transformers.CLIPModel(clip), "layerwise", lr=1.0, decay_rate=0.5)
    layer = _by_name(groups, "layer")
    assert layer["text_model.encoder.layers.1.mlp.fc1.weight"] == "text_model/layer_01"
    assert layer["vision_model.embeddings.class_embedding"] == "vision_model/embeddings"
    assert layer["visual_projection.weight"] == layer["logit_scale"] == "head"
    assert _by_name(groups, "lr")["vision_model.embeddings.class_embedding"] == 0.0625


def test_stages_count_through() -> None:
    model = _meta("swin", depths=[1, 2], num_heads=[1, 2], embed_dim=8)
    layer = _by_name(build_param_groups(model, "layerwise", lr=1.0), "layer")
    assert layer["encoder.layers.0.blocks.0.attention.q_proj.weight"] == "layer_00"
    assert layer["encoder.layers.1.blocks.1.attention.q_proj.weight"] == "layer_02"
    assert layer["encoder.layers.0.downsample.reduction.weight"] == "layer_00"


def test_an_untied_output_layer_is_the_head_whatever_its_name() -> None:
    config = transformers.GPTNeoXConfig(num_hidden_layers=2, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    lr = _by_name(build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.5), "lr")
    output = next(name for name, param in model.named_parameters() if param is model.get_output_embeddings().weight)
    assert lr[output] == 1.0
    assert lr["gpt_neox.embed_in.weight"] == 0.125


def test_no_stack_of_blocks_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no stack of blocks.*name_dict"):
        build_param_groups(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "layerwise", lr=1.0)


def test_depth_may_be_given_as_more_than_found() -> None:
    lr = _by_name(build_param_groups(_bert(), "layerwise", lr=1.0, decay_rate=0.5, n_layers=12), "lr")
    assert lr["bert.encoder.layer.2.output.dense.weight"] == 0.5**10
    with pytest.raises(ConfigError, match=r"n_layers=2: expected at least 3, the depth found \(bert.encoder.layer 3\)"):
        build_param_groups(_bert(), "layerwise", n_layers=2)
    with pytest.raises(ConfigError, match=r"several stacks \(encoder.block 6, decoder.block 6\)"):
        build_param_groups(_meta("t5"), "layerwise", n_layers=6)


def test_name_dict_by_patterns() -> None:
    names = {r"layer\.(\d+)\.": r"\1", "word_embeddings": "embeddings", "pooler": "head"}
    groups = build_param_groups(_bert(), "layerwise", lr=1.0, decay_rate=0.5, name_dict=names)
    lr = _by_name(groups, "lr")
    assert lr["bert.encoder.layer.2.output.dense.weight"] == 0.5
    assert lr["bert.embeddings.word_embeddings.weight"] == 0.0625
    assert lr["bert.embeddings.position_embeddings.weight"] == 1.0  # nobody said where it lies


def test_name_dict_from_the_command_line() -> None:
    hydra = store.open_hydra()
    word = r"param_groups.name_dict={h\.\(\\d+\)\.: '\1', wte: embeddings}"
    config = store.typed(store.without_hydra(store.compose(hydra, "config", ["param_groups=layerwise", word])))
    assert isinstance(config.param_groups, LayerwiseConfig)
    assert config.param_groups.name_dict == {r"h\.(\d+)\.": r"\1", "wte": "embeddings"}


def test_name_dict_by_names_is_paddles() -> None:
    model = _bert()
    names = {name: name.replace("encoder.layer.", "encoder.layers.") for name, _ in model.named_parameters()}
    lr = _by_name(build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.8, name_dict=names), "lr")
    for name in names:
        assert lr[name] == pytest.approx(layerwise_lr_decay(0.8, names, 3, name), rel=1e-12), name


def test_name_dict_with_towers() -> None:
    model = _meta("t5", num_layers=2, num_decoder_layers=4)
    names = {r"^(encoder|decoder)\.block\.(\d+)\.": r"\1.layers.\2", "shared": "embeddings"}
    by_hand = build_param_groups(model, "layerwise", lr=1.0, name_dict=names)
    by_itself = build_param_groups(model, "layerwise", lr=1.0)
    assert _by_name(by_hand, "layer") == _by_name(by_itself, "layer")
    assert _by_name(by_hand, "lr") == _by_name(by_itself, "lr")


@pytest.mark.parametrize(
    ("name_dict", "message"),
    [
        ({"bert.encodr.layer": 1}, r"name_dict\[bert.encodr.layer\]: neither the name of a parameter nor found in one"),
        ({"bert": 1, "bert.encoder": 2}, r"name_dict\[bert.encoder\]: everything it is found in.*other keys"),
        ({"bert": "embedings"}, "embedings is no place.*Did you mean embeddings"),
        ({"bert": "head"}, "no parameter belongs to a block"),
        ({"bert": r"\1"}, "the pattern has no such bracket"),
        ({"(": 1}, "not a regular expression"),
        ({"bert": 1.5}, "expected a block number, head, embeddings"),
        ({}, "a mapping with at least one name, or null"),
    ],
)
def test_name_dict_refusals(name_dict: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_param_groups(_bert(), "layerwise", name_dict=name_dict)


def test_name_dict_beyond_n_layers() -> None:
    with pytest.raises(ConfigError, match="n_layers=2: name_dict names block 2, from 0"):
        build_param_groups(_bert(), "layerwise", name_dict={r"layer\.(\d+)\.": r"\1"}, n_layers=2)


def test_a_function_in_its_place() -> None:
    for model in (_bert(), _meta("t5", num_layers=2, num_decoder_layers=4), _meta("gpt2", n_layer=2)):
        ours = build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.8)
        theirs = build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.8, set_param_lr_fun=layerwise_lr_decay)
        assert _by_name(theirs, "lr") == pytest.approx(_by_name(ours, "lr"), rel=1e-12)
    seen: list[tuple[float, int, NamedParam]] = []

    def function(rate: float, names: Any, depth: int, param: NamedParam) -> float:
        seen.append((rate, depth, param))
        return 0.5 if names[param.name].startswith("encoder.layers.1.") else 1.0

    lr = _by_name(build_param_groups(_bert(), "layerwise", lr=2.0, set_param_lr_fun=function), "lr")
    assert lr["bert.encoder.layer.1.output.dense.bias"] == 1.0
    assert lr["bert.encoder.layer.0.output.dense.bias"] == 2.0
    assert {entry[:2] for entry in seen} == {(0.9, 3)}


def test_a_function_must_return_a_number() -> None:
    with pytest.raises(TypeError, match=r"set_param_lr_fun returned None for bert.embeddings.word_embeddings.weight"):
        build_param_groups(_bert(), "layerwise", set_param_lr_fun=lambda *_: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="returned -1"):
        build_param_groups(_bert(), "layerwise", set_param_lr_fun=lambda *_: -1)
    with pytest.raises(TypeError, match="param_groups=standard has no layers"):
        build_param_groups(_bert(), "standard", set_param_lr_fun=layerwise_lr_decay)


# -- rules ------------------------------------------------------------------------------------------------------------


def test_rules_override_in_order() -> None:
    rules = [
        {"pattern": r"classifier\.bias", "lr": 0.25},
        {"pattern": "classifier", "lr_scale": 10, "weight_decay": 0.0, "betas": [0.5, 0.6]},
        {"pattern": "layer.0", "freeze": True},
        {"pattern": "pooler", "schedule": {"name": "constant"}, "adaptation": False},
        {"pattern": "layer.1", "adaptation": True, "centralization": True, "optimizer": "adamw"},
    ]
    model = _bert()
    groups = build_param_groups(model, "layerwise", lr=0.5, weight_decay=0.1, decay_rate=0.5, rules=rules)
    of = {name: group for group in groups for name, _ in group["params"]}
    head = of["classifier.weight"]
    assert (head["lr"], head["lr_scale"], head["weight_decay"], head["betas"]) == (5.0, 10.0, 0.0, (0.5, 0.6))
    assert head["rule"] == "rules[1] classifier"
    absolute = of["classifier.bias"]
    assert absolute["lr"] == 0.25
    assert "lr_scale" not in absolute
    assert not any(name.startswith("bert.encoder.layer.0.") for name in of)
    assert not model.get_parameter("bert.encoder.layer.0.output.dense.bias").requires_grad
    assert of["bert.pooler.dense.weight"]["schedule"] == {"name": "constant"}
    assert of["bert.pooler.dense.weight"]["exclude_from_layer_adaptation"] == (".*",)
    second = of["bert.encoder.layer.1.output.dense.weight"]
    assert (second["always_adapt"], second["exclude_from_layer_adaptation"]) == (True, None)
    assert (second["grad_centralization"], second["optimizer"]) == (True, "adamw")
    assert second["lr_scale"] == 0.25  # the layer's own, where the rule says nothing of it


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [{"pattern": "clasifier", "lr_scale": 2}],
            r"rules\[0\].pattern=clasifier: matches no parameter. Did you mean",
        ),
        ([{"pattern": "b", "lr_scale": 2}, {"pattern": "bert", "lr": 1}], r"rules\[1\].*taken by earlier rules"),
        ([{"pattern": "bert", "lr_scal": 2}], r"rules\[0\].lr_scal: no such override. Did you mean lr_scale"),
        ([{"patern": "bert", "lr_scale": 2}], r"rules\[0\]: has no `pattern`. `patern` may be it"),
        ([{"pattern": "bert"}], "at least one override"),
        ([{"pattern": "(", "lr": 1}], "not a regular expression"),
        ([{"pattern": "bert", "lr": 1, "lr_scale": 2}], "either lr or lr_scale"),
        ([{"pattern": "bert", "lr_scale": -2}], r"lr_scale=-2: expected a number of 0 or more"),
        ([{"pattern": "bert", "freeze": True, "lr": 1}], "freeze alone"),
        ([{"pattern": "bert", "freeze": False}], "expected true. To train them, leave the rule out"),
        ([{"pattern": "bert", "adaptation": "no"}], "expected true or false"),
        (["bert"], "expected a mapping with `pattern`"),
    ],
)
def test_rule_refusals(rules: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_param_groups(_bert(), "standard", rules=rules)


def test_a_rule_for_a_tied_or_frozen_name_says_so() -> None:
    model = Tiny(1, tied=True)
    rule = [{"pattern": r"classifier\.weight", "lr_scale": 2}]
    with pytest.raises(ConfigError, match=r"classifier.weight is the same tensor as embed.weight; match it by that"):
        build_param_groups(model, "standard", rules=rule)
    model.final.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"matches only parameters that do not train, such as final.weight"):
        build_param_groups(model, "standard", rules=[{"pattern": "^final", "lr_scale": 2}])


# -- with optimizers and schedulers -----------------------------------------------------------------------------------


def test_the_scale_survives_a_scheduler_and_names_stay() -> None:
    model = Tiny(2)
    groups = build_param_groups(model, "layerwise", lr=1.0, weight_decay=0.1, decay_rate=0.5)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = build_scheduler(optimizer, "cosine", num_training_steps=10, num_warmup_steps=3)
    for _ in range(9):
        scheduler.step()
        top = next(group["lr"] for group in optimizer.param_groups if group["layer"] == "head")
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(top * group["lr_scale"], rel=1e-14)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_our_optimizers_take_what_rules_say() -> None:
    model = Tiny(1)
    rules = [
        {"pattern": "classifier", "adaptation": False},
        {"pattern": "^final", "adaptation": True},
        {"pattern": "embed", "betas": [0.8, 0.9], "eps": 1e-3},
    ]
    groups = build_param_groups(model, "standard", lr=1e-2, weight_decay=0.1, rules=rules)
    optimizer = Lamb(groups, lr=1e-2)
    by_name = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    params = dict(model.named_parameters())
    adapted = {name: optimizer.adapted(params[name], group) for name, group in by_name.items()}
    assert adapted["blocks.0.up.weight"]
    assert adapted["final.weight"]  # not decayed, and adapted all the same
    assert not adapted["classifier.weight"]  # decayed, and not adapted
    assert by_name["embed.weight"]["eps"] == 1e-3
    centred = build_param_groups(model, "standard", lr=1e-2, rules=[{"pattern": "blocks", "centralization": True}])
    assert any(group["grad_centralization"] for group in LazyAdam(centred, lr=1e-2).param_groups)
    with pytest.raises((TypeError, ValueError), match="grad_centralization"):
        AdamW(centred, lr=1e-2)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_parameter_is_claimed_once_whatever_the_model(data: st.DataObject) -> None:
    model = Tiny(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), tied=data.draw(st.booleans()))
    names = [name for name, _ in model.named_parameters()]
    frozen = data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    training = [name for name in names if name not in frozen]
    chosen = data.draw(st.lists(st.sampled_from(training), max_size=4, unique=True))
    rules = [
        {"pattern": f"^{name}$".replace(".", r"\."), "lr_scale": scale}
        for name, scale in zip(chosen, data.draw(st.lists(st.floats(0, 9), min_size=4, max_size=4)), strict=False)
    ]
    kind = data.draw(st.sampled_from(sorted(SCHEMAS)))
    groups = build_param_groups(model, kind, lr=1.0, weight_decay=0.1, rules=rules)
    claimed = [(name, param) for group in groups for name, param in group["params"]]
    assert sorted(name for name, _ in claimed) == sorted(training)
    assert len({id(param) for _, param in claimed}) == len(claimed)
    scales = _by_name(groups, "lr_scale")
    assert all(scales[rule["pattern"][1:-1].replace("\\", "")] == rule["lr_scale"] for rule in rules)
    torch.optim.SGD(groups, lr=1.0)  # torch refuses a parameter in two groups


def test_configurations_are_checked() -> None:
    for options, message in (
        ({"decay_rate": 0.0}, "param_groups.decay_rate=0.0: expected a number above 0"),
        ({"n_layers": 0}, "param_groups.n_layers=0"),
        ({"dialect": "bert"}, "param_groups.dialect=bert: expected one of paddle, beit, electra, xlnet"),
        ({"decay_rat": 0.5}, "param_groups.decay_rat: param_groups=layerwise has no such key. Did you mean decay_rate"),
    ):
        with pytest.raises(ConfigError, match=message):
            choice("param_groups", SCHEMAS, "layerwise", options)
    with pytest.raises(ConfigError, match=r"param_groups=layered: no such choice. Did you mean layerwise"):
        build_param_groups(Tiny(1), "layered")


def test_matrices_above_the_blocks_are_heads() -> None:
    roles = _by_name(build_param_groups(_bert(), "standard"), "role")
    assert {name for name, role in roles.items() if role == "head"} == {"bert.pooler.dense.weight", "classifier.weight"}
    assert roles["bert.encoder.layer.2.output.dense.weight"] == "matrix"


def test_a_rule_names_an_optimizer_that_exists() -> None:
    with pytest.raises(ConfigError, match=r"rules\[0\].optimizer=lam: .*Did you mean lamb"):
        build_param_groups(_bert(), "standard", rules=[{"pattern": "bert", "optimizer": "lam"}])
