"""Where every parameter lies between embeddings and head, and what scale that means."""

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

_HEAD_NAME = re.compile(r"head|classif|score|pooler|logits|predict|^cls$")
_EMBEDDING_CHILD = re.compile(r"embed|^wte$|^wpe$|(^|_)emb(_|$)")
_FINAL_CHILD = re.compile(r"^(final|last)_|_(final|last)$")
_EMBEDDING_DIRECT = re.compile(r"embed|(^|_)emb(_|$)|(^|_)pos(_|$)|(^|_)tokens?(_|$)")


@dataclass(frozen=True)
class Layer:
    """The layer of a parameter.

    Attributes:
        layer_id: 0 for embeddings, i + 1 for block i, n_layers + 1 for the head.
        n_layers: Depth of its tower.
        label: `head`, `embeddings` or `layer_03`, after the tower's name where there are several.
        why: What decided: the list of blocks, or the side of them.
    """

    layer_id: int
    n_layers: int
    label: str
    why: str


def lr_scale_of(place: Layer, decay_rate: float) -> float:
    """Return the factor on the learning rate at a place: decay_rate ** (n_layers + 1 - layer).

    Source: PaddleNLP; Bao et al. 2022, arXiv:2106.08254 (BEiT).

    Example:
        >>> [lr_scale_of(Layer(layer, 2, "", ""), 0.5) for layer in (3, 2, 1, 0)]
        [1.0, 0.5, 0.25, 0.125]
    """
    return float(decay_rate ** (place.n_layers + 1 - place.layer_id))


def label_of(layer_id: int, n_layers: int, tower: str = "") -> str:
    """Name of a place in tables and metrics.

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
    """Make the place of a layer, under its label."""
    return Layer(layer_id, n_layers, label_of(layer_id, n_layers, tower), why)


def restore_layer(place: Layer, layer_id: int, label: str) -> Layer:
    """Return the place that a parameter had at the start of the run.

    It differs from `place` if another version of optrun or another batch places it otherwise.

    Args:
        place: The place now; returned as it is if its label is the saved one.
        layer_id: Saved with the run.
        label: Saved with the run.

    Example:
        >>> restore_layer(Layer(0, 2, "embeddings", BELOW), 3, "head")
        Layer(layer_id=3, n_layers=2, label='head', why='as the run was started')
    """
    if label == place.label:
        return place
    return Layer(layer_id, layer_id - 1 if label == HEAD else place.n_layers, label, STARTED)


class Layers:
    """The layers of a model.

    Blocks are read from the module tree, their sides from the order of use.

    Args:
        params: Every parameter by name.
        roles: Role of each.
        model: The model, or None where only names are known.
        uses: Of a forward pass, see `uses_of`. What they do not hold has its side by name and
            registration.
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
        self.outputs, self.inputs = _ends(model)

    def heads(self) -> set[str]:
        """Name the matrices above the blocks.

        Without blocks, those of the output layer that the model names itself.
        """
        matrices = [name for name in self.params if self.roles[name] == MATRIX]
        if not self.towers:
            return {name for name in matrices if id(self.params[name]) in self.outputs}
        places = self._places()
        return {name for name in matrices if places[name].label == HEAD}

    def places(self, n_layers: int | None) -> dict[str, Layer]:
        """Map every parameter to its place.

        Args:
            n_layers: Depth to count from; None: as found.

        Raises:
            ConfigError: No stack of blocks; or `n_layers` is below what was found, or given for
                several towers.
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
        return self._places()

    def _places(self) -> dict[str, Layer]:
        places = {name: self._place_by_name(name) for name in self.params}
        by_use = self._by_use().items()
        return places | {name: place for name, place in by_use if place.label != places[name].label}

    def _by_use(self) -> dict[str, Layer]:
        """Layer parameters by their use before the first block or after the last.

        After the last means after all blocks have begun. What is used in between, such as a
        projection from one tower into the next, keeps its place; and so does what is used on both
        sides, unless it is a table, which embeds.
        """
        spans = []
        for tower in self.towers:
            names = [name for name in self.uses if tower.stack.block_of(name) is not None]
            first_uses = [self.uses[name][0] for name in names if not tower.stack.on_edge(name)]
            spans += [(tower, min(first_uses), max(first_uses))] if first_uses else []
        out = {}
        for name, (first, last) in self.uses.items():
            if any(tower.stack.block_of(name) is not None for tower in self.towers):
                continue
            near = self._towers_near(name)
            ranges_near = [(begin, end) for tower, begin, end in spans if tower in near]
            if not ranges_near:
                continue
            begin = min(begin for begin, _ in ranges_near)
            end = max(end for _, end in ranges_near)
            if first < begin and (last <= end or self.roles[name] == EMBEDDING):
                out[name] = replace(_embedding_place(near), why="used before the blocks")
            elif first > end:
                out[name] = replace(_head_place(near), why="used after the blocks")
        return out

    def _place_by_name(self, name: str) -> Layer:
        """Layer a parameter: in its block, else with the embeddings below or the head above."""
        path = name.rpartition(".")[0]
        for tower in self.towers:
            stack = tower.stack
            block = stack.block_of(name)
            if block is not None:
                holder = stack.path.rpartition(".")[0]
                if block == 0 and stack.on_edge(path) and self._embeds(path, below=holder):
                    return _embedding_place([tower])
                return layer_at(block + 1, stack.depth, f"{stack.path} {block}", tower.name)
        near = self._towers_near(path)
        own_tower = self._own_tower(path)
        if id(self.params[name]) in self.outputs:
            return _head_place(own_tower or self.towers)
        if id(self.params[name]) in self.inputs:
            return _embedding_place(own_tower or self.towers)
        if self._lies_below(name, own_tower):
            return _embedding_place(near)
        return _head_place(near)

    def _lies_below(self, name: str, own_tower: list[_Tower]) -> bool:
        """Tell whether a parameter beside the blocks lies below them."""
        path, _, leaf = name.rpartition(".")
        role = self.roles[name]
        embeds = _EMBEDDING_DIRECT.search(leaf) is not None
        if role == EMBEDDING:
            return True
        if not own_tower:
            return self._embeds(path) or (embeds and role != "vector")
        trunk = own_tower[0].stack.path
        fork = next(above for above in path_and_ancestors(path) if is_inside(trunk, above))
        if fork == path:
            return embeds
        shared = len(split_path(fork))
        branch, *rest = split_path(path)[shared:]
        if any(_HEAD_NAME.search(piece) for piece in (branch, *rest)):
            return False
        siblings = list(self.root.at(fork).children)
        before = siblings.index(branch) < siblings.index(split_path(trunk)[shared])
        return (before and not _FINAL_CHILD.search(branch)) or self._embeds(path, below=fork)

    def _embeds(self, path: str, *, below: str = "") -> bool:
        """Tell whether a module on the way down to `path`, below another one, embeds.

        Its class says so; or its name, where it is an embedding layer, a norm, or nothing is known
        of its class.
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

    def _own_tower(self, path: str) -> list[_Tower]:
        """Find the tower around a module; empty if it lies beside several."""
        return [tower for tower in self.towers if is_inside(path, tower.root)][:1]

    def _towers_near(self, path: str) -> list[_Tower]:
        """Find the tower around `path`, else the towers of its closest ancestor."""
        own_tower = self._own_tower(path)
        if own_tower:
            return own_tower
        for ancestor in path_and_ancestors(path):
            towers = [tower for tower in self.towers if is_inside(tower.root, ancestor)]
            if towers:
                return towers
        raise AssertionError("the whole model holds every tower")


@dataclass(frozen=True)
class _Tower:
    stack: Stack
    root: str
    """Topmost module that holds no other tower."""
    name: str
    """Empty where it is the only one."""


def _find_towers(stacks: list[Stack]) -> list[_Tower]:
    """Find the root of each tower: the highest module that contains no other tower's blocks."""
    names = _tower_names([stack.path for stack in stacks])
    out = []
    for stack, name in zip(stacks, names, strict=True):
        root = stack.path
        for ancestor in path_and_ancestors(stack.path):
            towers_inside = [tower for tower in stacks if is_inside(tower.path, ancestor)]
            if towers_inside == [stack]:
                root = ancestor
        out.append(_Tower(stack, root, name))
    return out


def _tower_names(paths: list[str]) -> list[str]:
    """Shorten each path to its distinguishing piece; empty for a single path.

    Example:
        >>> _tower_names(["text_model.encoder.layers", "vision_model.encoder.layers"])
        ['text_model', 'vision_model']
        >>> _tower_names(["model.encoder.layers", "model.decoder.layers"])
        ['encoder', 'decoder']
    """
    if len(paths) < 2:
        return [""] * len(paths)
    split = [path.split(".") for path in paths]
    fork = next(
        above
        for above in path_and_ancestors(paths[0])
        if all(is_inside(path, above) for path in paths)
    )
    shared = len(split_path(fork))
    length = shared + 1
    while len({tuple(pieces[shared:length]) for pieces in split}) < len(paths):
        length += 1
    return [".".join(pieces[shared:length]) or pieces[-1] for pieces in split]


def _ends(model: nn.Module | None) -> tuple[set[int], set[int]]:
    """Collect the identities of the output layer's and the input embeddings' parameters.

    If the model names them.
    """
    ends: list[set[int]] = []
    for method in ("get_output_embeddings", "get_input_embeddings"):
        ask = getattr(model, method, None)
        try:
            layer = ask() if callable(ask) else None
        except (NotImplementedError, AttributeError):  # some models have none and say it so
            layer = None
        ends.append(
            {id(param) for param in layer.parameters()} if isinstance(layer, nn.Module) else set()
        )
    outputs, inputs = ends
    return outputs - inputs, inputs


def _embedding_place(towers: list[_Tower]) -> Layer:
    """Layer an embedding below the deepest of the towers it feeds."""
    deepest = max(towers, key=lambda tower: tower.stack.depth)
    return layer_at(0, deepest.stack.depth, BELOW, deepest.name if len(towers) == 1 else "")


def _head_place(towers: list[_Tower]) -> Layer:
    depth = max(tower.stack.depth for tower in towers)
    return layer_at(depth + 1, depth, ABOVE)


def block_paths(model: nn.Module) -> list[str]:
    """List the dotted names of a model's blocks, in its order.

    Empty for a model without a stack of blocks.
    """
    return [path for stack in stacks_of(model) for path in stack.blocks]
