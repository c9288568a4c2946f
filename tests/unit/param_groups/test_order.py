"""When a model uses its parameters, and what that says of where they lie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from optrun.param_groups import build_param_groups, order, uses_of
from optrun.param_groups.order import example_batches
from tests.group_models import Block, bert, by_name, on_meta

TWO = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 16, "encoder_attention_heads": 2}
TWO |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 99}


@pytest.mark.parametrize("name", ["bart", "mbart", "plbart", "led", "blenderbot-small"])
def test_a_norm_of_embeddings_goes_with_them(name: str) -> None:
    model = on_meta(name, **TWO)
    for groups in (
        build_param_groups(model, "layerwise", decay_rate=0.5),
        build_param_groups(model.named_parameters(), "layerwise", decay_rate=0.5),
    ):
        scale = by_name(groups, "lr_scale")
        for side in ("encoder", "decoder"):
            assert (
                scale[f"{side}.layernorm_embedding.weight"]
                == scale[f"{side}.layernorm_embedding.bias"]
                == 0.125
            )


def test_a_final_norm_is_above_the_blocks_wherever_it_is_registered() -> None:
    options = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "vocab_size": 99,
    }
    model = on_meta("opt", word_embed_proj_dim=8, **options)
    for groups in (
        build_param_groups(model, "layerwise", decay_rate=0.5),
        build_param_groups(model.named_parameters(), "layerwise", decay_rate=0.5),
    ):
        scale = by_name(groups, "lr_scale")
        assert (
            scale["decoder.final_layer_norm.weight"]
            == scale["decoder.final_layer_norm.bias"]
            == 1.0
        )
        assert scale["decoder.embed_positions.weight"] == 0.125
    scale = by_name(build_param_groups(model, "layerwise", decay_rate=0.5), "lr_scale")
    assert scale["decoder.project_in.weight"] == 0.125
    assert scale["decoder.project_out.weight"] == 1.0


@pytest.mark.parametrize(
    ("name", "options", "below", "above"),
    [
        (
            "electra",
            {"embedding_size": 8},
            ["embeddings_project.weight", "embeddings.LayerNorm.weight"],
            [],
        ),
        (
            "albert",
            {"embedding_size": 8},
            ["encoder.embedding_hidden_mapping_in.weight"],
            ["pooler.weight"],
        ),
        ("layoutlmv3", {}, ["encoder.rel_pos_bias.weight", "cls_token", "norm.weight"], []),
        (
            "vit",
            {},
            ["embeddings.cls_token", "embeddings.patch_embeddings.projection.weight"],
            ["layernorm.weight"],
        ),
        ("wav2vec2", {}, ["feature_projection.projection.weight", "encoder.layer_norm.weight"], []),
        (
            "wav2vec2-conformer",
            {},
            ["feature_projection.projection.weight"],
            ["encoder.layer_norm.weight"],
        ),
    ],
)
def test_either_side_by_use(
    name: str, options: dict[str, Any], below: list[str], above: list[str]
) -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    if name.startswith("wav2vec2"):
        sizes |= {"num_conv_pos_embeddings": 2, "num_conv_pos_embedding_groups": 2}
    if name == "layoutlmv3":
        sizes |= {"coordinate_size": 2, "shape_size": 4}
    layer = by_name(build_param_groups(on_meta(name, **sizes, **options), "layerwise"), "layer")
    assert {layer[one] for one in below} == {"embeddings"}
    assert {layer[one] for one in above} <= {"head"}


def test_heads_with_a_transform_and_their_tied_table() -> None:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=8
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    layer = by_name(build_param_groups(model, "layerwise"), "layer")
    assert (
        layer["cls.predictions.transform.LayerNorm.weight"]
        == layer["cls.predictions.bias"]
        == "head"
    )
    assert layer["bert.embeddings.word_embeddings.weight"] == "embeddings", (
        "also the output layer: it embeds"
    )


class Odd(nn.Module):
    """Everything that names and registration mislead about."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(Block(4) for _ in range(2))
        self.mixer = nn.Linear(4, 4, bias=False)
        self.stem_head = nn.Linear(4, 4, bias=False)
        self.both = nn.Linear(4, 4, bias=False)
        self.unused_head = nn.Linear(4, 4, bias=False)
        self.start = nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1  # type: ignore[operator]
        self.cache = x
        torch.rand(1)
        x = self.both(nn.functional.linear(x + self.start, self.stem_head.weight))
        if not torch.isfinite(x).all():
            raise AssertionError("shapes have no values")
        for block in self.layers:
            x = self.mixer(block.ln(block.down(block.up(block.attention(x)))))
        return self.both(self.output(x))


def test_names_and_registration_give_way_to_use() -> None:
    notes: list[str] = []
    model = Odd()
    groups = build_param_groups(model, "layerwise", batch={"x": torch.zeros(1, 4)}, notes=notes)
    layer, rule = by_name(groups, "layer"), by_name(groups, "rule")
    assert layer["output.weight"] == "head", "registered before the blocks"
    assert layer["stem_head.weight"] == layer["start"] == "embeddings", (
        "called head; used without calling its module"
    )
    assert rule["stem_head.weight"] == "used before the blocks"
    by_names = by_name(build_param_groups(Odd(), "layerwise"), "layer")
    for undecided in ("both", "mixer", "unused_head"):
        assert layer[f"{undecided}.weight"] == by_names[f"{undecided}.weight"]
    count = sum(1 for _ in model.parameters())
    assert f"used {count - 1} of {count} parameters" in notes[0]


def test_looking_changes_nothing() -> None:
    model = Odd()
    model.layers[0].eval()
    held, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(0)
    random = torch.get_rng_state()
    uses_of(model, {"x": torch.zeros(1, 4)})
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert model.cache is None
    assert all(param.requires_grad and param.device.type == "cpu" for param in model.parameters())


def test_a_model_that_cannot_run_on_shapes_is_placed_by_name_and_told() -> None:
    notes: list[str] = []
    build_param_groups(Odd(), "layerwise", batch={"y": 1}, notes=notes)
    for fact in ("Odd", "by name", "TypeError", "param_groups.name_dict"):
        assert fact in notes[0]
    nothing: list[str] = []
    build_param_groups(Odd(), "layerwise", name_dict={r"layers\.(\d+)": r"\1"}, notes=nothing)
    build_param_groups(bert(), "standard", notes=nothing)
    assert nothing == []


def test_a_loop_that_shapes_never_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max() > 0.5:
                x = super().forward(x) / 4
            return x

    monkeypatch.setattr(order, "_MAX_OPERATIONS", 100)
    uses, told = order.describe_uses(Settles(2, 2), {"x": torch.ones(1, 2)})
    assert uses == {}
    assert "more than 100 operations" in told


def test_tensors_that_modules_merely_hold_are_shapes_too() -> None:
    """They would be copied whole; and what a graph made cannot be copied."""

    class Holds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.held

    model = Holds(2, 2)
    model.held = model.weight.sum(0)
    assert uses_of(model, {"x": torch.ones(1, 2)}).keys() == {"weight", "bias"}


def test_examples_hold_what_a_model_takes() -> None:
    (text,) = example_batches(bert())
    assert {key: tuple(value.shape) for key, value in text.items()} == {"input_ids": (1, 8)}
    clip = transformers.CLIPConfig(
        vision_config={"image_size": 32, "patch_size": 16, "num_hidden_layers": 1}
    )
    with torch.device("meta"):
        both, tokens = example_batches(transformers.CLIPModel(clip))
        (pairs,) = example_batches(
            transformers.BertForMultipleChoice(transformers.BertConfig(num_hidden_layers=1))
        )
    assert tuple(both["pixel_values"].shape) == (1, 3, 32, 32)
    assert tokens.keys() == {"input_ids"}
    assert tuple(pairs["input_ids"].shape) == (1, 2, 8)
    assert example_batches(Odd()) == []


def test_groups_of_an_earlier_start_hold() -> None:
    model = bert()
    before = build_param_groups(model, "layerwise", lr=1.0, decay_rate=0.5)
    saved = [{**group, "param_names": [name for name, _ in group["params"]]} for group in before]
    norm = "bert.embeddings.LayerNorm.weight"
    for group in saved:
        if norm in group["param_names"]:
            assert group["layer"] == "embeddings"
            group |= {"layer": "head", "layer_id": 4}
    notes: list[str] = []
    groups = build_param_groups(
        model, "layerwise", lr=1.0, decay_rate=0.5, started=saved, notes=notes
    )
    assert by_name(groups, "lr")[norm] == 1.0
    assert f"{norm} (head)" in notes[1]
    assert len(notes) == 2
