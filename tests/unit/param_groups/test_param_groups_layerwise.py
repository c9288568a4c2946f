"""The layer of every parameter, by the module tree, by a `name_dict`, or by a function, and the
scale of its lr.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.schema.param_groups import LayerwiseConfig
from optrun.param_groups import build_param_groups, layerwise_lr_decay
from tests.group_models import bert, by_name, on_meta

# -- layerwise
# --------------------------------------------------------------------------------------------------


def test_scales() -> None:
    lr = by_name(build_param_groups(bert(), "layerwise", lr=1.0, decay_rate=0.5), "lr")
    blocks = [lr[f"bert.encoder.layer.{layer}.output.dense.weight"] for layer in range(3)]
    assert lr["classifier.weight"] == lr["bert.pooler.dense.bias"] == 1.0
    assert blocks == [0.125, 0.25, 0.5]
    assert lr["bert.embeddings.word_embeddings.weight"] == 0.0625
    assert lr["bert.embeddings.LayerNorm.bias"] == 0.0625


def test_layers_are_numbered_and_named() -> None:
    groups = build_param_groups(bert(), "layerwise", lr=1.0, decay_rate=0.5)
    layers = {(group["layer_id"], group["layer"], group["lr_scale"]) for group in groups}
    assert layers == {
        (0, "embeddings", 0.0625),
        (1, "layer_00", 0.125),
        (2, "layer_01", 0.25),
        (3, "layer_02", 0.5),
        (4, "head", 1.0),
    }


def test_towers_have_their_own_depth() -> None:
    lr = by_name(
        build_param_groups(
            on_meta("t5", num_layers=2, num_decoder_layers=4), "layerwise", lr=1.0, decay_rate=0.5
        ),
        "lr",
    )
    assert lr["encoder.block.1.layer.0.SelfAttention.q.weight"] == 0.5
    assert lr["encoder.block.0.layer.0.SelfAttention.q.weight"] == 0.25
    assert lr["decoder.block.3.layer.0.SelfAttention.q.weight"] == 0.5
    assert lr["decoder.block.0.layer.0.SelfAttention.q.weight"] == 0.0625
    assert lr["shared.weight"] == 0.03125  # below the deeper of the two
    clip = transformers.CLIPConfig(
        text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 3}
    )
    with torch.device("meta"):
        groups = build_param_groups(
            transformers.CLIPModel(clip), "layerwise", lr=1.0, decay_rate=0.5
        )
    layer = by_name(groups, "layer")
    assert layer["text_model.encoder.layers.1.mlp.fc1.weight"] == "text_model/layer_01"
    assert layer["vision_model.embeddings.class_embedding"] == "vision_model/embeddings"
    assert layer["visual_projection.weight"] == layer["logit_scale"] == "head"
    assert by_name(groups, "lr")["vision_model.embeddings.class_embedding"] == 0.0625


def tower(path: str, depth: int) -> list[tuple[str, torch.Tensor]]:
    """Names and shapes of a stack of blocks."""
    kinds = {"query": (4, 4), "up": (8, 4), "down": (4, 8), "norm": (4,)}
    return [
        (f"{path}.layers.{block}.{kind}.weight", torch.ones(shape, requires_grad=True))
        for block in range(depth)
        for kind, shape in kinds.items()
    ]


def matrix(name: str, *shape: int) -> tuple[str, torch.Tensor]:
    return name, torch.ones(shape or (4, 4), requires_grad=True)


def test_names_alone_tell_what_lies_below_and_above_each_tower() -> None:
    """Before a tower's blocks: its embeddings. Behind them: its head.

    Beside both towers: what its name says.
    """
    params = [matrix("shared_embed.weight"), matrix("ears.weight")]
    for side, depth in (("left", 2), ("right", 3)):
        params += [
            matrix(f"{side}.first.weight"),
            *tower(side, depth),
            matrix(f"{side}.last.weight"),
        ]
    layer = by_name(build_param_groups(params, "layerwise", decay_rate=0.5), "layer")
    scale = by_name(build_param_groups(params, "layerwise", decay_rate=0.5), "lr_scale")
    assert layer["left.first.weight"] == "left/embeddings"
    assert layer["left.layers.1.up.weight"] == "left/layer_01"
    assert layer["right.last.weight"] == layer["left.last.weight"] == layer["ears.weight"] == "head"
    assert layer["shared_embed.weight"] == "embeddings"
    assert scale["left.first.weight"] == 0.5**3
    assert scale["shared_embed.weight"] == 0.5**4  # below the deeper of the two


def test_blocks_built_alike_are_blocks_whatever_lists_they_hold() -> None:
    """Experts are most of a block, and no layers of their own."""
    params = []
    for block in range(3):
        params += [matrix(f"h.{block}.attention.weight"), matrix(f"h.{block}.norm.weight", 4)]
        params += [
            matrix(f"h.{block}.experts.{n}.{kind}.weight", 8, 8)
            for n in range(4)
            for kind in ("up", "down")
        ]
    scale = by_name(build_param_groups(params, "layerwise", decay_rate=0.5), "lr_scale")
    assert [scale[f"h.{block}.experts.{n}.up.weight"] for block, n in ((0, 0), (0, 3), (2, 1))] == [
        0.125,
        0.125,
        0.5,
    ]


@pytest.mark.parametrize(("depth", "alone"), [(5, False), (6, True)])
def test_a_deep_stack_is_a_tower_however_narrow(depth: int, alone: bool) -> None:
    wide = [
        matrix(f"wide.layers.{n}.{kind}.weight", 200, 200)
        for n in range(2)
        for kind in ("up", "gate", "down")
    ]
    scale = by_name(
        build_param_groups([*wide, *tower("narrow", depth)], "layerwise", decay_rate=0.5),
        "lr_scale",
    )
    assert (scale["narrow.layers.0.up.weight"] == 0.5**depth) is alone


def test_towers_are_called_by_the_piece_that_tells_them_apart() -> None:
    params = [*tower("model.encoder", 2), *tower("model.decoder.inner", 2)]
    layer = by_name(build_param_groups(params, "layerwise"), "layer")
    assert layer["model.encoder.layers.0.up.weight"] == "encoder/layer_00"
    assert layer["model.decoder.inner.layers.1.up.weight"] == "decoder/layer_01"


def test_lists_of_one_length_beside_each_other_are_one_stack() -> None:
    """Attentions and feed-forwards kept apart: block i is element i of each."""
    params = [
        matrix(f"m.attentions.{n}.{kind}.weight")
        for n in range(3)
        for kind in ("query", "key", "value")
    ]
    params += [
        matrix(f"m.ffns.{n}.{kind}.weight") for n in range(3) for kind in ("up", "gate", "down")
    ]
    layer = by_name(build_param_groups(params, "layerwise"), "layer")
    for n in range(3):
        assert (
            layer[f"m.attentions.{n}.key.weight"] == layer[f"m.ffns.{n}.up.weight"] == f"layer_0{n}"
        )


def test_what_lies_between_towers_belongs_to_the_nearest() -> None:
    params = [
        matrix("text.shared_embed.weight"),
        *tower("text.left", 2),
        *tower("text.right", 2),
        *tower("vision", 4),
    ]
    scale = by_name(build_param_groups(params, "layerwise", decay_rate=0.5), "lr_scale")
    assert scale["text.shared_embed.weight"] == 0.5**3
    assert scale["vision.layers.0.up.weight"] == 0.5**4


def test_a_token_or_position_that_the_model_holds_itself_is_below_the_blocks() -> None:
    tokens = [matrix("cls_token", 1, 1, 4), matrix("pos_embed", 1, 9, 4), matrix("mixing", 3, 4)]
    params = [*tokens, *tower("encoder", 2), matrix("head.weight")]
    layer = by_name(build_param_groups(params, "layerwise"), "layer")
    assert layer["cls_token"] == layer["pos_embed"] == "embeddings"
    assert layer["mixing"] == layer["head.weight"] == "head"


def test_stages_count_through() -> None:
    model = on_meta("swin", depths=[1, 2], num_heads=[1, 2], embed_dim=8)
    layer = by_name(build_param_groups(model, "layerwise", lr=1.0), "layer")
    assert layer["encoder.layers.0.blocks.0.attention.q_proj.weight"] == "layer_00"
    assert layer["encoder.layers.1.blocks.1.attention.q_proj.weight"] == "layer_02"
    assert layer["encoder.layers.0.downsample.reduction.weight"] == "layer_00"


def test_an_untied_output_layer_is_the_head_whatever_its_name() -> None:
    config = transformers.GPTNeoXConfig(num_hidden_layers=2, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.GPTNeoXForCausalLM(config)
    lr = by_name(build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.5), "lr")
    output = next(
        name
        for name, param in model.named_parameters()
        if param is model.get_output_embeddings().weight
    )
    assert lr[output] == 1.0
    assert lr["gpt_neox.embed_in.weight"] == 0.125


def test_no_stack_of_blocks_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no stack of blocks.*name_dict"):
        build_param_groups(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "layerwise", lr=1.0
        )


def test_a_list_of_single_matrices_is_no_stack_of_blocks() -> None:
    params = [
        ("heads." + str(n) + ".linear.weight", torch.ones(4, 4, requires_grad=True))
        for n in range(3)
    ]
    with pytest.raises(ConfigError, match="has no stack of blocks"):
        build_param_groups(params, "layerwise")


def test_depth_may_be_given_as_more_than_found() -> None:
    lr = by_name(build_param_groups(bert(), "layerwise", lr=1.0, decay_rate=0.5, n_layers=12), "lr")
    assert lr["bert.encoder.layer.2.output.dense.weight"] == 0.5**10
    with pytest.raises(
        ConfigError,
        match=r"n_layers=2: expected at least 3, the number of blocks \(bert.encoder.layer 3\)",
    ):
        build_param_groups(bert(), "layerwise", n_layers=2)
    with pytest.raises(ConfigError, match=r"several stacks \(encoder.block 6, decoder.block 6\)"):
        build_param_groups(on_meta("t5"), "layerwise", n_layers=6)


def test_name_dict_by_patterns() -> None:
    names = {r"layer\.(\d+)\.": r"\1", "word_embeddings": "embeddings", "pooler": "head"}
    groups = build_param_groups(bert(), "layerwise", lr=1.0, decay_rate=0.5, name_dict=names)
    lr = by_name(groups, "lr")
    assert lr["bert.encoder.layer.2.output.dense.weight"] == 0.5
    assert lr["bert.embeddings.word_embeddings.weight"] == 0.0625
    assert lr["bert.embeddings.position_embeddings.weight"] == 1.0  # nobody said where it lies


def test_name_dict_from_the_command_line() -> None:
    hydra = store.open_hydra()
    word = r"param_groups.name_dict={h\.\(\\d+\)\.: '\1', wte: embeddings}"
    config = store.typed(
        store.without_hydra(store.compose(hydra, "config", ["param_groups=layerwise", word]))
    )
    assert isinstance(config.param_groups, LayerwiseConfig)
    assert config.param_groups.name_dict == {r"h\.(\d+)\.": r"\1", "wte": "embeddings"}


def test_name_dict_by_names_is_paddles() -> None:
    model = bert()
    names = {
        name: name.replace("encoder.layer.", "encoder.layers.")
        for name, _ in model.named_parameters()
    }
    lr = by_name(
        build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.8, name_dict=names), "lr"
    )
    for name in names:
        assert lr[name] == pytest.approx(layerwise_lr_decay(0.8, names, 3, name), rel=1e-12), name


def test_name_dict_with_towers() -> None:
    model = on_meta("t5", num_layers=2, num_decoder_layers=4)
    names = {r"^(encoder|decoder)\.block\.(\d+)\.": r"\1.layers.\2", "shared": "embeddings"}
    by_hand = build_param_groups(model, "layerwise", lr=1.0, name_dict=names)
    by_itself = build_param_groups(model, "layerwise", lr=1.0)
    assert by_name(by_hand, "layer") == by_name(by_itself, "layer")
    assert by_name(by_hand, "lr") == by_name(by_itself, "lr")


@pytest.mark.parametrize(
    ("name_dict", "message"),
    [
        (
            {"bert.encodr.layer": 1},
            r"name_dict\[bert.encodr.layer\]: matches no parameter name",
        ),
        (
            {"bert": 1, "bert.encoder": 2},
            r"name_dict\[bert.encoder\]: other keys match all of its parameters",
        ),
        ({"bert": "embedings"}, "embedings is no layer.*Did you mean embeddings"),
        ({"bert": "head"}, "no parameter belongs to a block"),
        ({"bert": r"\1"}, "the pattern has no such group"),
        ({"(": 1}, "not a regular expression"),
        ({"bert": 1.5}, "expected a block number, head, embeddings"),
        ({}, "a mapping with at least one name, or null"),
    ],
)
def test_name_dict_refusals(name_dict: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_param_groups(bert(), "layerwise", name_dict=name_dict)


def test_name_dict_beyond_n_layers() -> None:
    with pytest.raises(ConfigError, match="n_layers=2: name_dict names block 2, counted from 0"):
        build_param_groups(bert(), "layerwise", name_dict={r"layer\.(\d+)\.": r"\1"}, n_layers=2)
    with pytest.raises(
        ConfigError, match="n_layers=2: name_dict names block 2 of text, counted from 0"
    ):
        build_param_groups(
            bert(), "layerwise", name_dict={r"layer\.(\d+)\.": r"text.layers.\1"}, n_layers=2
        )


def test_it_is_the_published_function_of_the_depth() -> None:
    """Over names as PaddleNLP gives them."""
    groups = build_param_groups(bert(), "layerwise", lr=1.0, decay_rate=0.8)
    for name, lr in by_name(groups, "lr").items():
        structured = name.replace("encoder.layer.", "encoder.layers.")
        expected = layerwise_lr_decay(0.8, {name: structured}, 3, name)
        assert lr == pytest.approx(expected, rel=1e-12)
