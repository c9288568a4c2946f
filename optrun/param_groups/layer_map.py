"""Assign every parameter to a layer between embeddings and head, and scale its lr by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.param_groups.order import Uses
from optrun.param_groups.roles import EMBEDDING, HEAD, MATRIX
from optrun.param_groups.stacks import Stack, find_stacks, stacks_of
from optrun.param_groups.tree import is_inside, path_and_ancestors, split_path, tree_of

EMBEDDINGS = "embeddings"
ABOVE = "above the blocks"
BELOW = "below the blocks"

STARTED = "as the run was started"
"""`Layer.why` of a parameter whose layer is that of the start of the run."""

_HEAD_NAME = re.compile(r"head|classif|score|pooler|logits|predict|^cls$")
_EMBEDDING_CHILD = re.compile(r"embed|^wte$|^wpe$|(^|_)emb(_|$)")
_FINAL_CHILD = re.compile(r"^(final|last)_|_(final|last)$")
_EMBEDDING_DIRECT = re.compile(r"embed|(^|_)emb(_|$)|(^|_)pos(_|$)|(^|_)tokens?(_|$)")


@dataclass(frozen=True)
class Layer:
    """The layer of a parameter, counted from the embeddings to the head.

    Attributes:
        layer_id: 0 for embeddings, i + 1 for block i, n_layers + 1 for the head.
        n_layers: Number of blocks of its tower.
        label: `head`, `embeddings` or `layer_03`; with several towers `decoder/layer_03`.
        why: What decided: the list of blocks, or the side of them.
    """

    layer_id: int
    n_layers: int
    label: str
    why: str


def lr_scale_of(layer: Layer, decay_rate: float) -> float:
    """Return the factor on the lr of a layer: decay_rate ** (n_layers + 1 - layer_id).

    Source: PaddleNLP; Bao et al. 2022, arXiv:2106.08254 (BEiT).

    Example:
        >>> [lr_scale_of(Layer(layer_id, 2, "", ""), 0.5) for layer_id in (3, 2, 1, 0)]
        [1.0, 0.5, 0.25, 0.125]
    """
    return float(decay_rate ** (layer.n_layers + 1 - layer.layer_id))


def label_of(layer_id: int, n_layers: int, tower: str = "") -> str:
    """Name a layer for tables and metrics.

    The head has no tower in its name. Block numbers have two digits at least.

    Example:
        >>> label_of(4, 12), label_of(0, 12, "decoder"), label_of(13, 12, "decoder")
        ('layer_03', 'decoder/embeddings', 'head')
    """
    if layer_id > n_layers:
        return HEAD
    width = max(2, len(str(n_layers - 1)))
    name = EMBEDDINGS if layer_id == 0 else f"layer_{layer_id - 1:0{width}d}"
    if tower:
        return f"{tower}/{name}"
    return name


def layer_at(layer_id: int, n_layers: int, why: str, tower: str = "") -> Layer:
    """Make a layer with its label, see `Layer` and `label_of`."""
    return Layer(layer_id, n_layers, label_of(layer_id, n_layers, tower), why)


def restore_layer(layer: Layer, layer_id: int, label: str) -> Layer:
    """Return the layer of a parameter at the start of its run.

    It differs from `layer` if another version of optrun or another batch assigns it otherwise.

    Args:
        layer: The layer now; returned as it is if its label is the saved one.
        layer_id: Saved with the run.
        label: Saved with the run.

    Example:
        >>> restore_layer(Layer(0, 2, "embeddings", BELOW), 3, "head")
        Layer(layer_id=3, n_layers=2, label='head', why='as the run was started')
    """
    if label == layer.label:
        return layer
    n_layers = layer_id - 1 if label == HEAD else layer.n_layers
    return Layer(layer_id, n_layers, label, STARTED)


class Layers:
    """Assign every parameter of a model to a layer.

    Blocks are read from the module tree. A parameter beside the blocks belongs to the embeddings or
    to the head, by the order of use in a forward pass, else by its name and registration.

    Args:
        params: Every parameter by name.
        roles: Role of each parameter.
        model: The model, or None if only names are known.
        uses: When a forward pass uses each parameter, see `uses_of`; may lack some or all.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        roles: Mapping[str, str],
        model: nn.Module | None,
        uses: Uses,
    ) -> None:
        self.params = params
        self.roles = roles
        self.uses = uses
        self.root = tree_of(params, roles, model)
        self.towers = _find_towers(find_stacks(self.root))
        self.output_ids, self.input_ids = _embedding_param_ids(model)

    def heads(self) -> set[str]:
        """Name the matrices of the head.

        For a model without blocks, those of the output layer that the model names itself, if any.
        """
        matrices = [name for name in self.params if self.roles[name] == MATRIX]
        if not self.towers:
            return {name for name in matrices if id(self.params[name]) in self.output_ids}
        layers = self._layers()
        return {name for name in matrices if layers[name].label == HEAD}

    def by_param(self, n_layers: int | None) -> dict[str, Layer]:
        """Map every parameter to its layer.

        Args:
            n_layers: Number of blocks to count from. It is kept as the tower's depth, so a later
                call with None counts from it, too. None: as many as there are.

        Raises:
            ConfigError: No stack of blocks; or `n_layers` is below their number, or set for several
                towers.
        """
        if not self.towers:
            raise ConfigError(
                f"param_groups=layerwise: {self.root.kind or 'this model'} has no stack of blocks"
                " (a list of modules built alike), so its layers cannot be told from the module"
                " tree. Say which parameter belongs to which block with param_groups.name_dict,"
                ' such as {"^trunk\\.(\\d+)\\.": "\\1", "^stem": embeddings}, or take'
                " param_groups=standard."
            )
        if n_layers is not None:
            stacks = [tower.stack for tower in self.towers]
            depths = ", ".join(f"{stack.path} {stack.depth}" for stack in stacks)
            if len(stacks) > 1:
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: this model has several stacks ({depths}),"
                    " each with its own depth; leave it null."
                )
            if n_layers < stacks[0].depth:
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: expected at least {stacks[0].depth}, the"
                    f" depth found ({depths})."
                )
            stacks[0].depth = n_layers
        return self._layers()

    def _layers(self) -> dict[str, Layer]:
        """Map every parameter to its layer by use, else by name."""
        layers = {name: self._layer_by_name(name) for name in self.params}
        for name, layer in self._layers_by_use().items():
            if layer.label != layers[name].label:
                layers[name] = layer
        return layers

    def _layers_by_use(self) -> dict[str, Layer]:
        """Find the parameters used before the first block, or after the last one has begun.

        Only parameters beside the blocks. One that is used in between, such as a projection from
        one tower into the next, is missing; and so is one that is used on both sides, unless it is
        an embedding.
        """
        spans = []
        for tower in self.towers:
            names = [name for name in self.uses if tower.stack.block_of(name) is not None]
            first_uses = [self.uses[name][0] for name in names if not tower.stack.in_stem(name)]
            if first_uses:
                spans.append((tower, min(first_uses), max(first_uses)))
        layers = {}
        for name, (first, last) in self.uses.items():
            if any(tower.stack.block_of(name) is not None for tower in self.towers):
                continue
            towers = self._nearest_towers(name)
            spans_of_towers = [(begin, end) for tower, begin, end in spans if tower in towers]
            if not spans_of_towers:
                continue
            begin = min(begin for begin, _ in spans_of_towers)
            end = max(end for _, end in spans_of_towers)
            if first < begin and (last <= end or self.roles[name] == EMBEDDING):
                layers[name] = replace(_embedding_layer(towers), why="used before the blocks")
            elif first > end:
                layers[name] = replace(_head_layer(towers), why="used after the blocks")
        return layers

    def _layer_by_name(self, name: str) -> Layer:
        """Find the layer of a parameter by its name, its modules and their registration.

        The first rule that applies decides:

        1. A parameter in a block belongs to that block, unless it is an embedding in the stem of
           block 0, which belongs to the embeddings.
        2. One of the output layer that the model names itself belongs to the head.
        3. One of the input embeddings that the model names itself belongs to the embeddings.
        4. Any other is beside the blocks; `_is_below_blocks` says on which side.

        Its tower is the one around it. Rules 2 and 3 take all towers if there is none, rule 4 those
        in its closest ancestor.
        """
        path = name.rpartition(".")[0]
        for tower in self.towers:
            stack = tower.stack
            block = stack.block_of(name)
            if block is None:
                continue
            parent = stack.path.rpartition(".")[0]
            # SegFormer has a patch embedding for each stage, beside its list of blocks: the first
            # embeds the image, the others belong to the first block of their stage.
            if block == 0 and stack.in_stem(path) and self._embeds(path, below=parent):
                return _embedding_layer([tower])
            return layer_at(block + 1, stack.depth, f"{stack.path} {block}", tower.name)
        tower_around = self._tower_around(path)
        if id(self.params[name]) in self.output_ids:
            return _head_layer(tower_around or self.towers)
        if id(self.params[name]) in self.input_ids:
            return _embedding_layer(tower_around or self.towers)
        towers = self._nearest_towers(path)
        if self._is_below_blocks(name, tower_around):
            return _embedding_layer(towers)
        return _head_layer(towers)

    def _is_below_blocks(self, name: str, tower_around: list[_Tower]) -> bool:
        """Tell whether a parameter beside the blocks belongs to the embeddings, else to the head.

        Args:
            name: Name of the parameter.
            tower_around: The tower whose root contains it; empty if there is none.
        """
        path, _, leaf = name.rpartition(".")
        role = self.roles[name]
        has_embedding_name = _EMBEDDING_DIRECT.search(leaf) is not None
        if role == EMBEDDING:
            return True
        if not tower_around:
            return self._embeds(path) or (has_embedding_name and role != "vector")
        # Compare the two children of the lowest module that contains both: the one with the
        # parameter, and the one with the blocks.
        stack_path = tower_around[0].stack.path
        common = next(above for above in path_and_ancestors(path) if is_inside(stack_path, above))
        if common == path:
            return has_embedding_name
        depth = len(split_path(common))
        child, *below_child = split_path(path)[depth:]
        if any(_HEAD_NAME.search(part) for part in (child, *below_child)):
            return False
        siblings = list(self.root.at(common).children)
        child_of_blocks = split_path(stack_path)[depth]
        is_before = siblings.index(child) < siblings.index(child_of_blocks)
        if is_before and not _FINAL_CHILD.search(child):
            return True
        return self._embeds(path, below=common)

    def _embeds(self, path: str, *, below: str = "") -> bool:
        """Tell whether a module, or one of its ancestors below another module, embeds.

        The class decides: its name contains "embed", and it is no model. The module's name decides
        for an embedding layer, a norm, or a class that is not known.

        Args:
            path: Dotted name of the module.
            below: Dotted name of an ancestor, which is not looked at any more.
        """
        for above in takewhile(lambda above: above != below, path_and_ancestors(path)):
            node = self.root.at(above)
            name = above.rpartition(".")[2]
            if re.search("embed", node.kind, re.IGNORECASE) and not node.is_model:
                return True
            name_decides = node.kind in ("", "Embedding") or "norm" in node.kind.lower()
            if name_decides and _EMBEDDING_CHILD.search(name):
                return True
        return False

    def _tower_around(self, path: str) -> list[_Tower]:
        """List the tower around a module: one, or none."""
        return [tower for tower in self.towers if is_inside(path, tower.root)][:1]

    def _nearest_towers(self, path: str) -> list[_Tower]:
        """List the tower around a module, else all towers in its closest ancestor with any."""
        tower_around = self._tower_around(path)
        if tower_around:
            return tower_around
        for ancestor in path_and_ancestors(path):
            towers = [tower for tower in self.towers if is_inside(tower.root, ancestor)]
            if towers:
                return towers
        raise AssertionError("the model itself contains every tower")


@dataclass(frozen=True)
class _Tower:
    """A stack of blocks with the modules around it, such as an encoder."""

    stack: Stack
    root: str
    """Dotted name of the topmost module that contains no other tower."""
    name: str
    """Empty for the only tower of a model."""


def _find_towers(stacks: list[Stack]) -> list[_Tower]:
    """Make a tower of each stack: the topmost module around it without another stack."""
    names = _tower_names([stack.path for stack in stacks])
    towers = []
    for stack, name in zip(stacks, names, strict=True):
        root = stack.path
        for ancestor in path_and_ancestors(stack.path):
            stacks_inside = [other for other in stacks if is_inside(other.path, ancestor)]
            if stacks_inside == [stack]:
                root = ancestor
        towers.append(_Tower(stack, root, name))
    return towers


def _tower_names(paths: list[str]) -> list[str]:
    """Shorten each path to its distinguishing parts; empty for a single path.

    Example:
        >>> _tower_names(["text_model.encoder.layers", "vision_model.encoder.layers"])
        ['text_model', 'vision_model']
        >>> _tower_names(["model.encoder.layers", "model.decoder.layers"])
        ['encoder', 'decoder']
    """
    if len(paths) < 2:
        return [""] * len(paths)
    split_paths = [split_path(path) for path in paths]
    common = next(
        above
        for above in path_and_ancestors(paths[0])
        if all(is_inside(path, above) for path in paths)
    )
    depth = len(split_path(common))
    end = depth + 1
    while len({tuple(parts[depth:end]) for parts in split_paths}) < len(paths):
        end += 1
    return [".".join(parts[depth:end]) or parts[-1] for parts in split_paths]


def _embedding_param_ids(model: nn.Module | None) -> tuple[set[int], set[int]]:
    """Collect the ids of the parameters of the output layer and of the input embeddings.

    A tied parameter counts as an input embedding. Both sets are empty for a model without
    `get_output_embeddings` and `get_input_embeddings`.
    """
    ids: list[set[int]] = []
    for method in ("get_output_embeddings", "get_input_embeddings"):
        get_layer = getattr(model, method, None)
        try:
            layer = get_layer() if callable(get_layer) else None
        except (NotImplementedError, AttributeError):  # models without such a layer raise these
            layer = None
        params = layer.parameters() if isinstance(layer, nn.Module) else ()
        ids.append({id(param) for param in params})
    outputs, inputs = ids
    return outputs - inputs, inputs


def _embedding_layer(towers: list[_Tower]) -> Layer:
    """Make the layer of embeddings below the deepest of the towers that they feed."""
    deepest = max(towers, key=lambda tower: tower.stack.depth)
    return layer_at(0, deepest.stack.depth, BELOW, deepest.name if len(towers) == 1 else "")


def _head_layer(towers: list[_Tower]) -> Layer:
    """Make the layer of a head above the deepest of the towers."""
    depth = max(tower.stack.depth for tower in towers)
    return layer_at(depth + 1, depth, ABOVE)


def block_paths(model: nn.Module) -> list[str]:
    """List the dotted names of a model's blocks, in its order.

    Empty for a model without a stack of blocks.
    """
    return [path for stack in stacks_of(model) for path in stack.blocks]
