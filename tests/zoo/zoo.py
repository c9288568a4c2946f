"""Every transformers architecture that a default configuration builds, on the meta device.

What grouping says of it.

The checks know nothing of how grouping decides: they look at classes of modules, at shapes and at
what transformers itself calls the input embeddings.
"""

from __future__ import annotations

import functools
import gc
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from unittest import mock

import torch
import transformers
from rich.console import Console
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.schema.run import RunConfig
from optrun.explain.build import explain
from optrun.explain.tables import render
from optrun.param_groups import block_paths, build_param_groups
from optrun.param_groups import build as grouping
from optrun.param_groups.order import describe_uses

SAMPLE = (
    "albert",
    "bart",
    "bert",
    "clip",
    "convnextv2",
    "deberta-v2",
    "distilbert",
    "electra",
    "flaubert",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "llava",
    "mamba",
    "mobilebert",
    "modernbert",
    "mpnet",
    "qwen3",
    "segformer",
    "swin",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
    "xlnet",
)
"""Types of the normal suite: encoders, decoders, both, towers, stages, and the odd ones.

One of each naming.
"""

DECAY_RATE = 0.75
DECAY = 0.1


@dataclass
class Row:
    """One architecture.

    Attributes:
        model_type: Name in transformers.
        kind: Class of the base model; empty where it could not be built.
        why_not: Why it could not be built.
        parameters: Elements, in all tensors.
        norms: Tensors in normalisation layers.
        groups: Groups under `standard` and under `layerwise`.
        towers: Name -> depth.
        message: What `layerwise` says where it refuses.
        state: Bytes of LAMB's state, as `explain` tells.
        tensors: How many it has.
        used: Tensors that a forward pass over shapes used; 0: it could not be made.
        not_run: Why not.
        moved: Tensors beside the blocks that lie elsewhere than names alone would have it.
    """

    model_type: str
    kind: str = ""
    why_not: str = ""
    parameters: int = 0
    norms: int = 0
    groups: tuple[int, int] = (0, 0)
    towers: dict[str, int] = field(default_factory=dict)
    message: str = ""
    state: int = 0
    tensors: int = 0
    used: int = 0
    not_run: str = ""
    moved: list[str] = field(default_factory=list)


def model_types() -> list[str]:
    """Every type that has a base model."""
    return sorted(MODEL_MAPPING_NAMES)


def part_of(types: Sequence[str], part: int, parts: int) -> Iterator[str]:
    """Every so many-th type.

    What transformers has imported for them is kept out of the collector's way.
    """
    for number, model_type in enumerate(types[part::parts]):
        if number % 20 == 0:
            gc.collect()
            gc.freeze()
        yield model_type


DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "n_layer",
)


def shallow(config: Any, depth: int) -> Any:
    """Leave a configuration, and those within it, as few blocks as tell the kinds of modules apart.

    Returns it.
    """
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            shallow(getattr(config, name), depth)
    found = {
        key: value
        for key in DEPTHS
        if isinstance(value := getattr(config, key, None), int) and value > depth
    }
    for key in found:
        setattr(config, key, depth)
    for key, value in list(vars(config).items()):  # such as `layer_types`: an entry for each block
        if isinstance(value, list) and len(value) in found.values():
            setattr(config, key, value[:depth])
    return config


def build(model_type: str, depth: int | None = None) -> nn.Module | str:
    """The base model on the meta device, or why there is none.

    What transformers raises is what it says.

    Args:
        model_type: Name in transformers.
        depth: Blocks of each tower at most, where they have a number; None: as many as the default
            configuration has.
    """
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            if depth is not None:
                shallow(config, depth)
            model: nn.Module = transformers.AutoModel.from_config(config)
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            return f"{type(error).__name__}: {lines[0][:90]}"
        return model


def build_small(model_type: str, fewest: int, most: int) -> nn.Module | str:
    """The base model with the fewer blocks if they are of as many kinds as more blocks are.

    Otherwise with more.
    """
    model, smaller = build(model_type, most), build(model_type, fewest)
    alike = (
        isinstance(model, nn.Module)
        and isinstance(smaller, nn.Module)
        and _kinds(smaller) == _kinds(model)
    )
    return smaller if alike else model


def _kinds(model: nn.Module) -> set[tuple[object, ...]]:
    """Classes of modules, the shapes of their tensors, and where they lie but for numbers."""
    return {
        (
            type(module),
            re.sub(r"\d+", "#", path),
            *(param.shape for param in module.parameters(recurse=False)),
        )
        for path, module in model.named_modules()
    }


def examine(model_type: str, model: nn.Module, *, fills_row: bool = True) -> Row:
    """Group a model both ways and hold the result against what is known of its modules.

    Args:
        model_type: Name in transformers.
        model: On the meta device.
        fills_row: Whether `state` and `moved` are found, too: a page of `explain` and a grouping by
            names alone, which take half of the time.

    Raises:
        AssertionError: A parameter claimed not once, a norm or bias that decays, a matrix that does
            not, layer scales that do not fall from the head to the embeddings, or a module on
            another side of the blocks than its calls.
    """
    params = dict(model.named_parameters())
    row = Row(model_type, type(model).__name__, tensors=len(params))
    row.parameters = sum(param.numel() for param in params.values())
    standard = build_param_groups(model, "standard", lr=1.0, weight_decay=DECAY)
    _claimed_once(params, standard)
    row.norms = _decays_right(model, standard)
    calls = _note_calls(model)
    looked = describe_uses(model, None)
    row.used, (_, _, why) = len(looked[0]), looked[1].partition("was made (")
    row.not_run = why.partition("). ")[0]
    with mock.patch.object(grouping, "describe_uses", return_value=looked):
        try:
            layerwise = build_param_groups(
                model, "layerwise", lr=1.0, weight_decay=DECAY, decay_rate=DECAY_RATE
            )
        except ConfigError as error:
            row.message = str(error)
            assert "no stack of blocks" in row.message
            assert "name_dict" in row.message
            row.groups = (len(standard), 0)
            return row
        _claimed_once(params, layerwise)
        assert _decays_right(model, layerwise) == row.norms
        row.towers = _falls(model, layerwise)
        row.groups = (len(standard), len(layerwise))
        if fills_row:
            row.state = _explained(model, layerwise)
    layers = {name: group["layer"] for group in layerwise for name, _ in group["params"]}
    if row.used:
        _runs_where_it_lies(model, layers, calls)
    if row.used and fills_row:
        with mock.patch.object(grouping, "describe_uses", return_value=({}, "")):
            by_name = build_param_groups(model, "layerwise", lr=1.0, decay_rate=DECAY_RATE)
        row.moved = [
            name
            for group in by_name
            for name, _ in group["params"]
            if group["layer"] != layers[name]
        ]
    return row


def _note_calls(model: nn.Module) -> list[str]:
    """A list that gets the dotted name of each module that the last pass of the model, or of a
    copy of it, calls.
    """
    calls: list[str] = []

    def hook_of(path: str) -> Callable[..., None]:
        def note(*_: Any) -> None:  # copied models share functions, and so the list
            if not path:
                calls.clear()
            calls.append(path)

        return note

    for path, module in model.named_modules():
        module.register_forward_pre_hook(hook_of(path))
    return calls


def _runs_where_it_lies(model: nn.Module, layers: dict[str, str], calls: list[str]) -> None:
    """Hold the side of each module beside the blocks against its calls.

    Embeddings before them, heads after them.
    """
    at: dict[str, list[int]] = {}
    for index, path in enumerate(calls):
        at.setdefault(path, []).append(index)
    blocks = [path for path in block_paths(model) if path in at]
    for path, module in model.named_modules():
        names = [
            f"{path}.{leaf}" if path else leaf for leaf, _ in module.named_parameters(recurse=False)
        ]
        sides = {layers[name].rpartition("/")[2] for name in names if name in layers}
        nested = any(f"{block}.".startswith(f"{path}." if path else "") for block in blocks)
        nested = nested or any(path.startswith(f"{block}.") for block in blocks)
        if (
            path not in at
            or nested
            or not blocks
            or not sides
            or not sides <= {"head", "embeddings"}
        ):
            continue
        shared = [
            sum(1 for _ in takewhile(_equal, zip(block.split("."), path.split("."), strict=False)))
            for block in blocks
        ]
        near = [
            at[block][0]
            for block, common in zip(blocks, shared, strict=True)
            if common == max(shared)
        ]
        if max(at[path]) < min(near):
            assert sides == {"embeddings"}, (
                f"{path} is called before the blocks and lies in {sides}"
            )
        elif min(at[path]) > max(near):
            assert sides == {"head"}, f"{path} is called after the blocks and lies in {sides}"


def _equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


@functools.cache
def _layerwise_run() -> RunConfig:
    words = [
        "optimizer=lamb",
        "param_groups=layerwise",
        f"param_groups.decay_rate={DECAY_RATE}",
        "lr=1.0",
    ]
    words += ["training.max_steps=10", f"optimizer.weight_decay={DECAY}"]
    return store.typed(store.without_hydra(store.compose(store.open_hydra(), "config", words)))


def _explained(model: nn.Module, groups: list[dict[str, Any]]) -> int:
    """Bytes of state; what `explain` shows is what the groups hold, and it fits the page."""
    facts = explain(_layerwise_run(), model)
    shown = {tensor.name: (tensor.lr_peak, tensor.weight_decay) for tensor in facts.tensors}
    held = {
        name: (group["lr"], group["weight_decay"])
        for group in groups
        for name, _ in group["params"]
    }
    assert shown == held
    assert facts.state_bytes == sum(8 * tensor.parameters for tensor in facts.tensors)
    page = io.StringIO()
    render(facts, Console(file=page, width=120, highlight=False))
    assert max(len(line) for line in page.getvalue().splitlines()) <= 120
    return facts.state_bytes


def _claimed_once(params: dict[str, nn.Parameter], groups: list[dict[str, Any]]) -> None:
    claimed = [name for group in groups for name, _ in group["params"]]
    assert sorted(claimed) == sorted(
        name for name, param in params.items() if param.requires_grad
    ), "every trainable parameter exactly once"
    ids = [id(param) for group in groups for _, param in group["params"]]
    assert len(set(ids)) == len(ids), "tied tensors once"


def _decays_right(model: nn.Module, groups: list[dict[str, Any]]) -> int:
    """Number of tensors in normalisation layers, none of which decays."""
    decays = {name: group["weight_decay"] for group in groups for name, _ in group["params"]}
    norms = 0
    for path, module in model.named_modules():
        kind = type(module).__name__
        is_norm = isinstance(
            module, nn.LayerNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm
        ) or (re.search(r"(Norm(Gated)?\d?d?|GRN)$", kind) is not None)
        for leaf, param in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            if name not in decays:
                continue
            if is_norm:
                norms += 1
                assert decays[name] == 0, f"{name} of {kind} decays"
            elif param.dim() <= 1:
                assert decays[name] == 0, f"{name} has one dimension and decays"
            elif leaf == "weight" and isinstance(
                module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding
            ):
                assert decays[name] == DECAY, f"{name} of {kind} does not decay"
    return norms


def _falls(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, int]:
    """Depth of each tower, the scales of which fall by one factor from the top block to the
    lowest.
    """
    towers: dict[str, dict[int, float]] = {}
    for group in groups:
        tower, _, place = group["layer"].rpartition("/")
        if place.startswith("layer_"):
            at = towers.setdefault(tower, {})
            assert at.setdefault(group["layer_id"], group["lr_scale"]) == group["lr_scale"]
        elif place == "head":
            assert group["lr_scale"] == 1.0
    depths = {}
    for tower, scales in towers.items():
        depth = max(scales)
        depths[tower] = depth
        for layer, scale in scales.items():
            assert abs(scale - DECAY_RATE ** (depth + 1 - layer)) < 1e-12, (
                f"block {layer - 1} of {tower}"
            )
    scale_of = {name: group["lr_scale"] for group in groups for name, _ in group["params"]}
    lowest_block = DECAY_RATE ** min(depths.values())
    for name in _input_embeddings(model):
        assert scale_of.get(name, 0.0) < lowest_block, (
            f"{name} embeds and has scale {scale_of[name]}"
        )
    return depths


def _input_embeddings(model: nn.Module) -> list[str]:
    try:
        layer = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return []
    ids = {id(param) for param in layer.parameters()} if isinstance(layer, nn.Embedding) else set()
    return [name for name, param in model.named_parameters() if id(param) in ids]
