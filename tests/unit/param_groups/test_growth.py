"""How a model grew beside its base: by names and shapes, on the meta device.

And what cannot be told is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from optrun.base.errors import ConfigError
from optrun.param_groups.branches import _BranchRecorder
from optrun.param_groups.growth import growth_of
from optrun.param_groups.order import run_on_meta

LLAMA = {"vocab_size": 64, "tie_word_embeddings": False}


def on_meta(model_type: str, auto: str = "AutoModelForCausalLM", **values: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(
            transformers.AutoConfig.for_model(model_type, **values)
        )


def llama(width: int, depth: int = 2, **values: Any) -> Any:
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 16}
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": depth,
        **heads,
    }
    return on_meta("llama", **{**LLAMA, **sizes, **values})


def test_dimensions_that_differ_are_infinite() -> None:
    grown = growth_of(llama(64), llama(16))
    assert {
        name: (size.fan_in, size.fan_out) for name, size in grown.items() if "layers.1" not in name
    } == {
        "model.embed_tokens.weight": (1, 4),
        **{f"model.layers.0.self_attn.{part}_proj.weight": (4, 4) for part in "qkvo"},
        **{f"model.layers.0.mlp.{part}_proj.weight": (4, 4) for part in ("gate", "up", "down")},
        "model.layers.0.input_layernorm.weight": (1, 4),
        "model.layers.0.post_attention_layernorm.weight": (1, 4),
        "model.norm.weight": (1, 4),
        "lm_head.weight": (4, 1),
    }
    few = growth_of(llama(64, num_key_value_heads=1), llama(16, num_key_value_heads=1))
    key_heads = few["model.layers.0.self_attn.k_proj.weight"]
    assert (key_heads.kind, key_heads.init) == ("hidden matrix", 0.5), "its outputs stay as many"
    assert (few["lm_head.weight"].kind, few["lm_head.weight"].init) == ("output matrix", 0.25)


def test_a_head_is_a_matrix_that_no_later_one_reads() -> None:
    def net(width: int) -> nn.Sequential:
        sides = [(6, width), (width, 8), (8, width), (width, 4)]
        return nn.Sequential(*(nn.Linear(*side, device="meta") for side in sides))

    grown = growth_of(net(64), net(16))
    assert {name for name, size in grown.items() if size.is_head} == {"3.weight"}
    assert grown["1.weight"].init == 0.5
    latent = {"embedding_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    sizes = ({"hidden_size": 8 * m, "intermediate_size": 8 * m, **latent} for m in (4, 1))
    model, base = (
        on_meta("albert", num_attention_heads=1, auto="AutoModelForMaskedLM", **size)
        for size in sizes
    )
    assert growth_of(model, base)["predictions.dense.weight"].kind == "hidden matrix"


def test_inputs_of_a_transposed_matrix_come_first() -> None:
    sizes = {"vocab_size": 64, "n_layer": 1, "tie_word_embeddings": False, "n_inner": 32}
    grown = growth_of(
        on_meta("gpt2", n_embd=64, n_head=4, **sizes), on_meta("gpt2", n_embd=16, n_head=1, **sizes)
    )
    assert (
        grown["transformer.h.0.mlp.c_fc.weight"].fan_in,
        grown["transformer.h.0.mlp.c_fc.weight"].fan_out,
    ) == (4, 1)
    assert grown["transformer.h.0.mlp.c_proj.weight"].fan_out == 4
    assert grown["transformer.wpe.weight"].kind == "input matrix or vector"


ENDS = {
    "llama": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},
    "cohere": {"self_attn.o_proj.weight", "mlp.down_proj.weight"},
    "gpt2": {f"{part}.c_proj.{leaf}" for part in ("attn", "mlp") for leaf in ("weight", "bias")},
    "gpt_neox": {
        f"{part}.{leaf}"
        for part in ("attention.dense", "mlp.dense_4h_to_h")
        for leaf in ("weight", "bias")
    },
}


@pytest.mark.parametrize("model_type", ENDS)
def test_ends_of_branches_are_found(model_type: str) -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    sizes = {"n_embd": 32, "n_head": 2} if model_type == "gpt2" else sizes
    common = {**sizes, "vocab_size": 64, "tie_word_embeddings": False, "pad_token_id": 0}
    deep, base = (on_meta(model_type, num_hidden_layers=depth, **common) for depth in (4, 2))
    grown = growth_of(deep, base)
    assert {
        name.split(".3.")[1] for name, size in grown.items() if ".3." in name and size.ends_branch
    } == ENDS[model_type]
    assert {size.branch for name, size in grown.items() if ".0." in name} == {0.5}
    base_names = {size.base_name for name, size in grown.items() if ".3." in name}
    assert all(".1." in name for name in base_names), "block 3 of 4 lies where block 1 of 2 does"


class ConvolutionBlock(nn.Module):
    """x + conv(x), where the bias of the convolution follows its weight in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


def test_the_end_of_a_convolution_is_its_weight() -> None:
    model = nn.Sequential(ConvolutionBlock(), ConvolutionBlock())
    recorder = run_on_meta(model, {"input": torch.empty(2, 4, 8)}, _BranchRecorder)
    assert recorder.ends == {"0.conv.weight", "1.conv.weight"}


@pytest.mark.parametrize("model_type", ["bert", "gemma2", "mixtral"])
def test_a_norm_on_the_stream_or_the_branch_is_refused_with_depth(model_type: str) -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    common = {**sizes, "vocab_size": 64, "tie_word_embeddings": False, "pad_token_id": 0}
    auto = "AutoModelForMaskedLM" if model_type == "bert" else "AutoModelForCausalLM"
    with pytest.raises(ConfigError, match=r"cannot be scaled with depth.*number of layers"):
        growth_of(
            *(on_meta(model_type, auto, num_hidden_layers=depth, **common) for depth in (4, 2))
        )


class Raw(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(rows, columns))


@pytest.mark.parametrize(
    ("model", "base", "facts"),
    [
        (nn.Linear(4, 4), nn.Linear(8, 4), ["weight", "(4, 8)", "(4, 4)", "shrinks"]),
        (nn.Linear(8, 4, bias=False), nn.Linear(4, 4), ["bias", "nothing that matches"]),
        (
            nn.Linear(8, 4),
            nn.Linear(4, 4, bias=False),
            ["bias", "matches no parameter of the base"],
        ),
        (nn.Embedding(8, 4), nn.Embedding(4, 4), ["weight", "rows", "vocabulary"]),
        (Raw(8, 4), Raw(4, 4), ["mix", "which of its dimensions are inputs"]),
        (llama(16, 2), llama(16, 4), ["4 blocks", "it shrinks"]),
    ],
)
def test_what_does_not_fit_is_refused(model: nn.Module, base: nn.Module, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        growth_of(model, base)
    for fact in ["parametrization.base", *facts]:
        assert fact in str(refused.value)
