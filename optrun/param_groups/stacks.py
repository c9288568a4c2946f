"""Find the stacks of blocks in a module tree, over which the depth of a model is counted.

A stack is an outermost list whose elements are blocks: modules made of modules, with several
matrices and a norm. A list of stages that each hold a list of blocks counts the blocks through.
Lists of equal length beside each other (attentions and feed-forwards kept apart) are one stack. Of
several lists, each that is a model's own, or large beside the largest, is a tower with its own
depth; small ones (feature extractors, heads, mergers) belong to their tower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from optrun.param_groups.roles import roles_of
from optrun.param_groups.tree import Node, is_inside, path_and_ancestors, tree_of

LARGE = 0.15
"""Share of the largest stack's elements from which another stack of the model is a tower."""

DEEP = 6
"""Number of blocks from which a stack is a tower however narrow it is."""

STAGE_SHARE = 0.5
"""Share of a stage's elements above which an inner list is its list of blocks."""


@dataclass
class Stack:
    """The blocks of one tower.

    Attributes:
        path: Dotted name of its list of modules.
        depth: Number of blocks.
        blocks: Dotted name of a module -> block number from 0. A parameter belongs to the block of
            its innermost module in it.
        stems: Dotted names of modules of a stage before its first block, such as a patch embedding.
            They count with that block.
        numel: Elements of its parameters.
    """

    path: str
    depth: int
    blocks: dict[str, int]
    stems: set[str] = field(default_factory=set)
    numel: int = 0

    def block_of(self, path: str) -> int | None:
        """Return the block number of a parameter or module by its name; None outside the stack."""
        for ancestor in path_and_ancestors(path):
            if ancestor in self.blocks:
                return self.blocks[ancestor]
        return None

    def in_stem(self, path: str) -> bool:
        """Tell whether a parameter or module is in one of the `stems`."""
        return any(is_inside(path, stem) for stem in self.stems)


def stacks_of(model: nn.Module) -> list[Stack]:
    """List the towers of a model, see `find_stacks`."""
    return find_stacks(tree_of(dict(model.named_parameters()), roles_of(model), model))


def find_stacks(root: Node) -> list[Stack]:
    """List the towers of a tree, in its order; none without a list of blocks.

    Blocks must have three matrices and a norm; if no stack has such blocks, two matrices.
    """
    merged = _merge_siblings(_outermost_lists(root))
    for strict in (True, False):
        candidates = [stack for stack in merged if _made_of_blocks(root, stack, strict=strict)]
        if candidates:
            break
    else:
        return []
    lists = {stack.path for stack in candidates}
    for stack in candidates:
        _take_companions(root, stack, lists)
    largest = max(candidates, key=lambda stack: stack.numel)
    return [stack for stack in candidates if stack is largest or _is_tower(root, stack, largest)]


def _outermost_lists(node: Node) -> list[tuple[Stack, Node]]:
    """List the outermost lists of repeated modules, as stacks, each with its parent node."""
    lists: list[tuple[Stack, Node]] = []
    for child in node.children.values():
        if child.numbered and _repeats(child):
            lists.append((_number_blocks(child), node))
        else:
            lists += _outermost_lists(child)
    return lists


def _repeats(node: Node) -> bool:
    """Tell whether the elements of a list of modules may be blocks or stages.

    At least half of them must have child modules. A single element must have three matrices; of
    several, two must be of one kind, unless they are stages.
    """
    elements = list(node.children.values())
    composite = [element for element in elements if element.children]
    if not composite or 2 * len(composite) < len(elements):
        return False
    if len(elements) == 1:
        return elements[0].matrices >= 3
    return (
        len(elements) > len({_kind(element) for element in elements}) or _stages(node) is not None
    )


def _kind(node: Node) -> str:
    """Return the class name; without one, the names of the parameters as text."""
    return node.kind or str([name for name, _ in node.signature()])


def _number_blocks(node: Node) -> Stack:
    """Make the stack of a list of modules, with the blocks numbered through all stages.

    Modules of a stage before its blocks count with its first block, as `stems`; modules behind them
    with its last.
    """
    stages = _stages(node)
    if stages is None:
        blocks = {element.path: index for index, element in enumerate(node.children.values())}
        return Stack(node.path, len(blocks), blocks, numel=node.numel)
    out = Stack(node.path, 0, {}, numel=node.numel)
    for stage, inner in zip(node.children.values(), stages, strict=True):
        first = out.depth
        if inner is None:
            out.blocks[stage.path] = first
            out.depth += 1
            continue
        for block in inner.children.values():
            out.blocks[block.path] = out.depth
            out.depth += 1
        if inner is stage:
            continue
        out.blocks[stage.path] = out.depth - 1
        for child in stage.children.values():
            if child is inner:
                break
            out.blocks[child.path] = first
            out.stems.add(child.path)
    return out


def _stages(node: Node) -> list[Node | None] | None:
    """Find the list of blocks in each element of a list of stages.

    Returns:
        For each element its list of blocks, or None for an element that is a block itself. None in
        place of the list if the elements are no stages: those that are all built alike are blocks,
        whatever lists they contain.
    """
    elements = list(node.children.values())
    inners = [_inner_list(element) for element in elements]
    block_lists = [inner for inner in inners if inner is not None]
    if 2 * len(block_lists) < len(elements) or not block_lists:
        return None
    nested = all(inner is element for inner, element in zip(inners, elements, strict=True))
    same_structure = len({element.signature() for element in elements}) == 1
    if same_structure and not nested:
        return None
    kinds: Counter[str] = Counter()
    for inner in block_lists:
        kinds.update(_kind(block) for block in inner.children.values())
    blocks = sum(kinds.values())
    if blocks > len(kinds) or nested:
        return inners
    return None


def _inner_list(stage: Node) -> Node | None:
    """Find the list of blocks in a stage: the stage itself, or a child; None if there is none.

    It must have more than `STAGE_SHARE` of the stage's elements, and its own elements must have
    children and not all be of different kinds.
    """
    for node in (stage, *stage.children.values()):
        if node.numbered and node.numel > STAGE_SHARE * stage.numel:
            blocks = list(node.children.values())
            one_kind = len({_kind(block) for block in blocks}) < max(len(blocks), 2)
            if one_kind and all(block.children for block in blocks):
                return node
    return None


def _merge_siblings(lists: list[tuple[Stack, Node]]) -> list[Stack]:
    """Join stacks of equal depth with the same parent, such as attentions and feed-forwards.

    Block i of the joined stack has element i of each. Only stacks without stems, of two blocks or
    more; the first of them is changed.
    """
    out: list[Stack] = []
    parents: list[Node] = []
    for stack, parent in lists:
        for earlier, earlier_parent in zip(out, parents, strict=True):
            can_join = not stack.stems and not earlier.stems and stack.depth > 1
            if earlier_parent is parent and earlier.depth == stack.depth and can_join:
                earlier.blocks |= stack.blocks
                earlier.numel += stack.numel
                break
        else:
            out.append(stack)
            parents.append(parent)
    return out


def _take_companions(root: Node, stack: Stack, lists: set[str]) -> None:
    """Add the elements of lists beside a stack, one for each block or stage, to its blocks.

    Such lists, of the norms or patch embeddings of each layer for instance, are no stacks
    themselves. Those registered before the stack are its stems. Changes `stack`.

    Args:
        root: The tree.
        stack: One of its stacks.
        lists: Paths of all stacks.
    """
    above, _, list_name = stack.path.rpartition(".")
    parent = root.at(above)
    element_count = len(parent.children[list_name].children)
    if element_count < 2:
        return
    before = True
    for name, child in parent.children.items():
        if name == list_name:
            before = False
            continue
        if child.path in lists or not child.numbered or len(child.children) != element_count:
            continue
        if any(f"{child.path}.{number}" in stack.blocks for number in child.children):
            continue
        for number in child.children:
            element = f"{stack.path}.{number}"
            numbers = [block for path, block in stack.blocks.items() if is_inside(path, element)]
            if numbers:
                stack.blocks[f"{child.path}.{number}"] = min(numbers) if before else max(numbers)
                if before:
                    stack.stems.add(f"{child.path}.{number}")


def _made_of_blocks(root: Node, stack: Stack, *, strict: bool) -> bool:
    """Tell whether at least half of the numbered modules are blocks, see `_is_block`."""
    per_block: dict[int, list[Node]] = {}
    for path, block in stack.blocks.items():
        if path not in stack.stems:
            per_block.setdefault(block, []).append(root.at(path))
    block_count = sum(_is_block(nodes, strict=strict) for nodes in per_block.values())
    return 2 * block_count >= len(per_block)


def _is_block(nodes: list[Node], *, strict: bool) -> bool:
    """Tell whether the modules of one block number have the parameters of a block.

    Two matrices; if `strict`, three, and a norm or another vector. Modules without biases pass
    without one, since a norm may be frozen.
    """
    matrices = sum(node.matrices for node in nodes)
    if not strict:
        return matrices >= 2
    normed = any(node.vectors for node in nodes) or not any(node.biases for node in nodes)
    return matrices >= 3 and normed


def _is_tower(root: Node, stack: Stack, largest: Stack) -> bool:
    """Tell whether a stack is a tower beside the largest one.

    It is if it has `LARGE` of its elements, `DEEP` blocks, or lies in a model of transformers that
    does not contain the largest.
    """
    if stack.numel >= LARGE * largest.numel or stack.depth >= DEEP:
        return True
    return any(
        root.at(above).is_model
        for above in path_and_ancestors(stack.path)
        if not is_inside(largest.path, above)
    )
