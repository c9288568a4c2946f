"""Stacks of blocks in a module tree.

Which lists of modules are the layers that depth is counted over.

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
"""Share of the largest stack's elements from which another one, in the same model, counts as a
tower.
"""

DEEP = 6
"""Blocks from which a stack counts as a tower however narrow it is."""

STAGE_SHARE = 0.5
"""Share of a stage's elements that its inner list of blocks holds."""


@dataclass
class Stack:
    """The blocks of one tower.

    Attributes:
        path: Dotted name of its list.
        depth: Number of blocks.
        blocks: Dotted name of a module -> block number from 0; the innermost name that fits
            decides.
        edges: Modules of a stage that lie before its first block: they belong there, unless it is
            the very first.
        numel: Elements in it.
    """

    path: str
    depth: int
    blocks: dict[str, int]
    edges: set[str] = field(default_factory=set)
    numel: int = 0

    def block_of(self, path: str) -> int | None:
        """Return the block number at a dotted name; None outside of the stack."""
        for ancestor in path_and_ancestors(path):
            if ancestor in self.blocks:
                return self.blocks[ancestor]
        return None

    def on_edge(self, path: str) -> bool:
        """Tell whether a dotted name lies in an edge."""
        return any(is_inside(path, edge) for edge in self.edges)


def stacks_of(model: nn.Module) -> list[Stack]:
    """Find the towers of a model, as `find_stacks`."""
    return find_stacks(tree_of(dict(model.named_parameters()), roles_of(model), model))


def find_stacks(root: Node) -> list[Stack]:
    """Find the towers of a model, in its order; none if it has no list of blocks."""
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
    """Find the outermost lists of blocks, in order, each with its parent node."""
    lists: list[tuple[Stack, Node]] = []
    for child in node.children.values():
        if child.numbered and _repeats(child):
            lists.append((_number_blocks(child), node))
        else:
            lists += _outermost_lists(child)
    return lists


def _repeats(node: Node) -> bool:
    """Tell whether a list has elements made of modules, most of them of a kind."""
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
    return node.kind or str([name for name, _ in node.signature()])


def _number_blocks(node: Node) -> Stack:
    """Number the blocks of a list, through its stages if it has some.

    What a stage has before its blocks counts with its first block, the rest of the stage with its
    last.
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
            out.edges.add(child.path)
    return out


def _stages(node: Node) -> list[Node | None] | None:
    """Find in each stage its list of blocks (None: the element is a block itself).

    None if these are no stages.

    Elements that are all built alike are blocks, whatever lists they hold.
    """
    elements = list(node.children.values())
    inners = [_inner_list(element) for element in elements]
    found_lists = [inner for inner in inners if inner is not None]
    if 2 * len(found_lists) < len(elements) or not found_lists:
        return None
    nested = all(inner is element for inner, element in zip(inners, elements, strict=True))
    same_structure = len({element.signature() for element in elements}) == 1
    if same_structure and not nested:
        return None
    kinds: Counter[str] = Counter()
    for inner in found_lists:
        kinds.update(_kind(block) for block in inner.children.values())
    blocks = sum(kinds.values())
    if blocks > len(kinds) or nested:
        return inners
    return None


def _inner_list(stage: Node) -> Node | None:
    """Find the list of modules with most of a stage's parameters.

    The stage itself if it is one.
    """
    for node in (stage, *stage.children.values()):
        if node.numbered and node.numel > STAGE_SHARE * stage.numel:
            blocks = list(node.children.values())
            one_kind = len({_kind(block) for block in blocks}) < max(len(blocks), 2)
            if one_kind and all(block.children for block in blocks):
                return node
    return None


def _merge_siblings(lists: list[tuple[Stack, Node]]) -> list[Stack]:
    """Join lists of one length beside each other: block i of the tower is element i of each."""
    out: list[Stack] = []
    parents: list[Node] = []
    for stack, parent in lists:
        for earlier, its_parent in zip(out, parents, strict=True):
            plain = not stack.edges and not earlier.edges and stack.depth > 1
            if its_parent is parent and earlier.depth == stack.depth and plain:
                earlier.blocks |= stack.blocks
                earlier.numel += stack.numel
                break
        else:
            out.append(stack)
            parents.append(parent)
    return out


def _take_companions(root: Node, stack: Stack, lists: set[str]) -> None:
    """Take in the lists of the same length beside a stack.

    They are no stacks themselves, such as the norms or patch embeddings of each layer.
    """
    above, _, holder = stack.path.rpartition(".")
    parent = root.at(above)
    element_count = len(parent.children[holder].children)
    if element_count < 2:
        return
    before = True
    for name, child in parent.children.items():
        if name == holder:
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
                    stack.edges.add(f"{child.path}.{number}")


def _made_of_blocks(root: Node, stack: Stack, *, strict: bool) -> bool:
    """Tell whether the typical element is a block.

    Strictly, three matrices and a norm (it may be frozen); else two.
    """
    per_block: dict[int, list[Node]] = {}
    for path, block in stack.blocks.items():
        if path not in stack.edges:
            per_block.setdefault(block, []).append(root.at(path))
    block_count = sum(_is_block(nodes, strict=strict) for nodes in per_block.values())
    return 2 * block_count >= len(per_block)


def _is_block(nodes: list[Node], *, strict: bool) -> bool:
    """Tell whether the nodes of one element make up a block, see `_made_of_blocks`."""
    matrices = sum(node.matrices for node in nodes)
    if not strict:
        return matrices >= 2
    normed = any(node.vectors for node in nodes) or not any(node.biases for node in nodes)
    return matrices >= 3 and normed


def _is_tower(root: Node, stack: Stack, largest: Stack) -> bool:
    """Tell whether a stack is a tower beside the largest: a model of its own, or large, or deep."""
    if stack.numel >= LARGE * largest.numel or stack.depth >= DEEP:
        return True
    return any(
        root.at(above).is_model
        for above in path_and_ancestors(stack.path)
        if not is_inside(largest.path, above)
    )
