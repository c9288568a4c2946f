"""Assign every parameter to a layer between embeddings and head, and scale its lr by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.param_groups.order import Uses
from optrun.param_groups.roles import EMBEDDING, HEAD, MATRIX, VECTOR
from optrun.param_groups.stacks import Stack, find_stacks
from optrun.param_groups.tree import is_inside, path_and_ancestors, split_path, tree_of

EMBEDDINGS = "embeddings"
ABOVE = "above the blocks"
BELOW = "below the blocks"

WHY_RESTORED = "as the run was started"
"""`Layer.why` if `restore_layer` put a parameter back into its layer at the start of the run."""

# Names of modules: `lm_head` or `classifier`, then `wte`, then `final_norm`.
_HEAD_NAME = re.compile(r"head|classif|score|pooler|logits|predict|^cls$")
_EMBEDDING_CHILD = re.compile(r"embed|^wte$|^wpe$|(^|_)emb(_|$)")
_FINAL_CHILD = re.compile(r"^(final|last)_|_(final|last)$")
# Names of parameters: `pos_embed`, `cls_token`.
_EMBEDDING_DIRECT = re.compile(r"embed|(^|_)emb(_|$)|(^|_)pos(_|$)|(^|_)tokens?(_|$)")


@dataclass(frozen=True)
class Layer:
    """The layer of a parameter, counted from the embeddings to the head.

    Attributes:
        layer_id: 0 for embeddings, i + 1 for block i, n_layers + 1 for the head.
        n_layers: Number of blocks of its stack, a list of blocks such as an encoder.
        label: `head`, `embeddings` or `layer_03`; with several stacks `decoder/layer_03`.
        why: The reason: the list of blocks, or the side of it.
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


def label_of(layer_id: int, n_layers: int, stack: str = "") -> str:
    """Name a layer for tables and metrics.

    Blocks are counted from 0, with two digits at least. The name of the stack comes first if there
    is one, but not for the head.

    Example:
        >>> label_of(4, 12), label_of(0, 12, "decoder"), label_of(13, 12, "decoder")
        ('layer_03', 'decoder/embeddings', 'head')
    """
    if layer_id > n_layers:
        return HEAD
    width = max(2, len(str(n_layers - 1)))
    name = EMBEDDINGS if layer_id == 0 else f"layer_{layer_id - 1:0{width}d}"
    if stack:
        return f"{stack}/{name}"
    return name


def layer_at(layer_id: int, n_layers: int, why: str, stack: str = "") -> Layer:
    """Make a layer with its label, see `Layer` and `label_of`."""
    return Layer(layer_id, n_layers, label_of(layer_id, n_layers, stack), why)


def restore_layer(layer: Layer, layer_id: int, label: str) -> Layer:
    """Return the layer of a parameter at the start of its run.

    Another version of optrun, or another batch, may assign it to another layer now. The number of
    blocks is not saved: for a head it follows from `layer_id`, else it is that of `layer`.

    Args:
        layer: The layer now; returned unchanged if its label is the saved one.
        layer_id: Saved with the run.
        label: Saved with the run.

    Example:
        >>> restore_layer(Layer(0, 2, "embeddings", BELOW), 3, "head")
        Layer(layer_id=3, n_layers=2, label='head', why='as the run was started')
    """
    if label == layer.label:
        return layer
    n_layers = layer_id - 1 if label == HEAD else layer.n_layers
    return Layer(layer_id, n_layers, label, WHY_RESTORED)


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
        self.stacks = find_stacks(self.root)
        _set_scopes_and_names(self.stacks)
        self.output_ids, self.input_ids = _embedding_param_ids(model)

    def heads(self) -> set[str]:
        """Return the names of the head's matrices: all matrices in the layer `head`.

        For a model without blocks, those of its `get_output_embeddings`, if it has any.
        """
        matrices = [name for name in self.params if self.roles[name] == MATRIX]
        if not self.stacks:
            return {name for name in matrices if id(self.params[name]) in self.output_ids}
        layers = self._map_params_to_layers()
        return {name for name in matrices if layers[name].label == HEAD}

    def by_param(self, n_layers: int | None) -> dict[str, Layer]:
        """Map every parameter to its layer.

        Args:
            n_layers: Number of blocks to count from. It is kept as the stack's depth, so a later
                call with None counts from it, too. None: as many as there are.

        Raises:
            ConfigError: The model has no stack; or `n_layers` is below the number of blocks, or set
                for several stacks.
        """
        if not self.stacks:
            raise ConfigError(
                f"param_groups=layerwise: {self.root.kind or 'this model'} has no stack of blocks"
                " (a list of modules built alike), so optrun cannot read its layers from the module"
                " tree. Say which parameter belongs to which block with param_groups.name_dict,"
                ' such as {"^trunk\\.(\\d+)\\.": "\\1", "^stem": embeddings}, or use'
                " param_groups=standard."
            )
        if n_layers is not None:
            depths = ", ".join(f"{stack.path} {stack.depth}" for stack in self.stacks)
            if len(self.stacks) > 1:
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: this model has several stacks ({depths}),"
                    " each with its own depth; leave it null."
                )
            (stack,) = self.stacks
            if n_layers < stack.depth:
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: expected at least {stack.depth}, the number"
                    f" of blocks ({depths})."
                )
            stack.depth = n_layers
        return self._map_params_to_layers()

    def _map_params_to_layers(self) -> dict[str, Layer]:
        """Map every parameter to its layer: by its use in a forward pass, else by its name.

        If both say the same layer, the reason (`Layer.why`) is that of the name.
        """
        layers = {name: self._layer_by_name(name) for name in self.params}
        for name, layer in self._layers_by_use().items():
            if layer.label != layers[name].label:
                layers[name] = layer
        return layers

    def _layers_by_use(self) -> dict[str, Layer]:
        """Map parameters outside of all blocks to embeddings or head, by their use.

        The operations of a forward pass are numbered, see `Uses`. The blocks of a stack begin with
        the first use of a parameter in them, stems left out; their last block begins with the
        largest of the first uses. For a parameter near several stacks, their blocks count together.
        With the uses `wte` 1, `h.0` 2 to 5, `h.1` 6 to 9, and `norm` 10, the blocks begin with 2
        and the last one with 6: `wte` belongs to the embeddings, `norm` to the head.

        - Embeddings: used before the blocks begin, and not after the last block has begun. An
          embedding may be used there, too: a tied one is.
        - Head: first used after the last block has begun.
        - Any other is missing, such as a projection between two stacks.
        """
        # 1. Find the uses with which the blocks, and the last block, of each stack begin.
        begin_of_blocks: dict[str, int] = {}
        begin_of_last_block: dict[str, int] = {}
        for stack in self.stacks:
            names = [name for name in self.uses if stack.block_of(name) is not None]
            first_uses = [self.uses[name][0] for name in names if not stack.in_stem(name)]
            if first_uses:
                begin_of_blocks[stack.path] = min(first_uses)
                begin_of_last_block[stack.path] = max(first_uses)
        # 2. Compare the uses of each parameter outside of all blocks with these: `begin` is the
        # first use in any block, `begin_of_last` the first use in the last block.
        layers = {}
        for name, (first, last) in self.uses.items():
            if any(stack.block_of(name) is not None for stack in self.stacks):
                continue
            stacks = self._nearest_stacks(name)
            used_stacks = [stack.path for stack in stacks if stack.path in begin_of_blocks]
            if not used_stacks:
                continue
            begin = min(begin_of_blocks[path] for path in used_stacks)
            begin_of_last = max(begin_of_last_block[path] for path in used_stacks)
            may_be_late = self.roles[name] == EMBEDDING
            if first < begin and (last <= begin_of_last or may_be_late):
                layers[name] = replace(_embedding_layer(stacks), why="used before the blocks")
            elif first > begin_of_last:
                layers[name] = replace(_head_layer(stacks), why="used after the blocks")
            # Else it belongs to neither side, and is left out.
        return layers

    def _layer_by_name(self, name: str) -> Layer:
        """Find the layer of a parameter by its name, its modules and their registration.

        The first rule that applies decides:

        1. In a block: that block. But an embedding in the stem of block 0 belongs to the
           embeddings.
        2. In the model's `get_output_embeddings`: the head.
        3. In the model's `get_input_embeddings`: the embeddings.
        4. Any other is outside of all blocks; `_is_below_blocks` says on which side.

        A model may have several stacks, such as an encoder and a decoder. The layer is that of the
        stack in whose scope the parameter lies; if there is none, rules 2 and 3 take all stacks,
        and rule 4 those in its closest ancestor that contains any.
        """
        path = name.rpartition(".")[0]
        # Rule 1.
        for stack in self.stacks:
            block = stack.block_of(name)
            if block is None:
                continue
            parent = stack.path.rpartition(".")[0]
            # SegFormer has a patch embedding for each stage, beside its list of blocks: the first
            # embeds the image, the others belong to the first block of their stage.
            if block == 0 and stack.in_stem(path) and self._embeds(path, below=parent):
                return _embedding_layer([stack])
            return layer_at(block + 1, stack.depth, f"{stack.path} {block}", stack.name)
        # Rules 2 and 3.
        stack_in_scope = self._stack_in_scope(path)
        stacks = self.stacks if stack_in_scope is None else [stack_in_scope]
        if id(self.params[name]) in self.output_ids:
            return _head_layer(stacks)
        if id(self.params[name]) in self.input_ids:
            return _embedding_layer(stacks)
        # Rule 4.
        nearest_stacks = self._nearest_stacks(path)
        if self._is_below_blocks(name, stack_in_scope):
            return _embedding_layer(nearest_stacks)
        return _head_layer(nearest_stacks)

    def _is_below_blocks(self, name: str, stack_in_scope: Stack | None) -> bool:
        """Tell whether a parameter outside of all blocks belongs to the embeddings, else the head.

        The first rule that applies decides:

        1. Its role is embedding: yes.
        2. It is in the scope of no stack: yes if its module embeds, or if its own name is that of
           an embedding and it is no vector.
        3. It is directly in a module that contains the blocks: yes if its own name is that of an
           embedding, such as `pos_embed`.
        4. Else two children of the lowest module that contains both are compared, the one with the
           parameter and the one with the blocks. For `bert.embeddings.norm.weight` and the blocks
           `bert.encoder.layer` that module is `bert`, and they are `embeddings` and `encoder`:

           - A module on the path to the parameter is named like a head: no.
           - Its child is registered before that of the blocks, and not called final or last: yes.
           - Else: yes if its module embeds.

        Args:
            name: Name of the parameter.
            stack_in_scope: The stack in whose scope it lies, if there is one.
        """
        path, _, leaf = name.rpartition(".")
        role = self.roles[name]
        has_embedding_name = _EMBEDDING_DIRECT.search(leaf) is not None
        if role == EMBEDDING:  # rule 1
            return True
        if stack_in_scope is None:  # rule 2
            return self._embeds(path) or (has_embedding_name and role != VECTOR)
        stack_path = stack_in_scope.path
        # The lowest module that contains both the parameter and the blocks.
        common = next(above for above in path_and_ancestors(path) if is_inside(stack_path, above))
        if common == path:  # rule 3
            return has_embedding_name
        # Rule 4: `child` and `child_with_blocks` are one step below the common module.
        depth = len(split_path(common))
        below_common = split_path(path)[depth:]
        if any(_HEAD_NAME.search(part) for part in below_common):
            return False
        child = below_common[0]
        child_with_blocks = split_path(stack_path)[depth]
        siblings = list(self.root.at(common).children)  # names in the order of registration
        is_before = siblings.index(child) < siblings.index(child_with_blocks)
        if is_before and not _FINAL_CHILD.search(child):
            return True
        return self._embeds(path, below=common)

    def _embeds(self, path: str, *, below: str = "") -> bool:
        """Tell whether a module, or one of its ancestors below another module, embeds its input.

        Yes for a class whose name contains "embed" and that is no model. For `nn.Embedding`, a norm
        or an unknown class the module's own name decides, too: yes for `wte`, `norm_emb`.

        Args:
            path: Dotted name of the module.
            below: Dotted name of an ancestor; this and the ones above it do not count.
        """
        for above in takewhile(lambda above: above != below, path_and_ancestors(path)):
            node = self.root.at(above)
            if re.search("embed", node.kind, re.IGNORECASE) and not node.is_model:
                return True
            name_decides = node.kind in ("", "Embedding") or "norm" in node.kind.lower()
            if name_decides and _EMBEDDING_CHILD.search(above.rpartition(".")[2]):
                return True
        return False

    def _stack_in_scope(self, path: str) -> Stack | None:
        """Return the stack in whose scope a module lies, see `Stack.scope`; None without one."""
        return next((stack for stack in self.stacks if is_inside(path, stack.scope)), None)

    def _nearest_stacks(self, path: str) -> list[Stack]:
        """Return the stack around a module, else all stacks in its closest ancestor with one.

        A stack is a list of repeated blocks; its scope is the largest module with no other stack.
        In a model with `encoder.layer` and `decoder.layer`, `encoder.norm` is in the scope of the
        first, so that one is returned; for `lm_head` beside them it is both.
        """
        stack_in_scope = self._stack_in_scope(path)
        if stack_in_scope is not None:
            return [stack_in_scope]
        for ancestor in path_and_ancestors(path):
            stacks = [stack for stack in self.stacks if is_inside(stack.scope, ancestor)]
            if stacks:
                return stacks
        raise AssertionError("the model itself contains every stack")


def _set_scopes_and_names(stacks: list[Stack]) -> None:
    """Set the scope and the name of each stack of a model, in place.

    The scope is the topmost module with this stack and no other. Beside `decoder.layers`, the list
    `encoder.layers` gets the scope `encoder` and the name `encoder`.

    Args:
        stacks: All stacks of the model.
    """
    names = _short_names([stack.path for stack in stacks])
    for stack, name in zip(stacks, names, strict=True):
        stack.name = name
        stack.scope = stack.path
        # From the list upwards: the last ancestor without another stack stays.
        for ancestor in path_and_ancestors(stack.path):
            stacks_inside = [other for other in stacks if is_inside(other.path, ancestor)]
            if len(stacks_inside) == 1:
                stack.scope = ancestor


def _short_names(paths: list[str]) -> list[str]:
    """Shorten each path to its first distinguishing parts; empty for a single path.

    Example:
        >>> _short_names(["text_model.encoder.layers", "vision_model.encoder.layers"])
        ['text_model', 'vision_model']
        >>> _short_names(["model.encoder.layers", "model.decoder.layers"])
        ['encoder', 'decoder']
    """
    if len(paths) < 2:
        return [""] * len(paths)
    parts_of_paths = [split_path(path) for path in paths]
    common = next(
        above
        for above in path_and_ancestors(paths[0])
        if all(is_inside(path, above) for path in paths)
    )
    # Leave out what all paths have in common, then take parts until no two paths are equal.
    begin = len(split_path(common))
    end = begin + 1
    while len({tuple(parts[begin:end]) for parts in parts_of_paths}) < len(paths):
        end += 1
    # Of the path that is the common one itself no part is left: it keeps its last part.
    return [".".join(parts[begin:end]) or parts[-1] for parts in parts_of_paths]


def _embedding_param_ids(model: nn.Module | None) -> tuple[set[int], set[int]]:
    """Return the ids of the parameters of the output layer, and of the input embeddings.

    The layers are those of the model's `get_output_embeddings` and `get_input_embeddings`; a set is
    empty if the model lacks the method or the layer. A tied parameter is in the second set only.
    """
    outputs = _param_ids(model, "get_output_embeddings")
    inputs = _param_ids(model, "get_input_embeddings")
    return outputs - inputs, inputs


def _param_ids(model: nn.Module | None, method: str) -> set[int]:
    """Call a method of the model for a layer, and return the ids of its parameters.

    Empty without a model, such a method or such a layer.
    """
    get_layer = getattr(model, method, None)
    try:
        layer = get_layer() if callable(get_layer) else None
    except (NotImplementedError, AttributeError):  # models without such a layer raise these
        return set()
    if isinstance(layer, nn.Module):
        return set(map(id, layer.parameters()))
    return set()


def _embedding_layer(stacks: list[Stack]) -> Layer:
    """Make the layer of embeddings below the deepest of these stacks.

    Its label has the name of the stack if there is only one.
    """
    deepest = max(stacks, key=lambda stack: stack.depth)
    return layer_at(0, deepest.depth, BELOW, deepest.name if len(stacks) == 1 else "")


def _head_layer(stacks: list[Stack]) -> Layer:
    """Make the layer of a head above the deepest of these stacks."""
    depth = max(stack.depth for stack in stacks)
    return layer_at(depth + 1, depth, ABOVE)
