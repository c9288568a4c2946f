"""Find the stacks of a model: the lists of blocks over which its depth is counted.

A stack is one list of blocks, such as the layers of an encoder; a model with a text and a vision
encoder has two. A block is a module made of modules, with several matrices and a norm. Special
cases:

- A list of stages, each with a list of blocks, is one stack: blocks are counted through all stages.
- Lists of equal length beside each other (attentions and feed-forwards kept apart) are one stack.
- Small lists beside a large one (feature extractors, heads, mergers) are no stacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from optrun.param_groups.roles import roles_of
from optrun.param_groups.tree import Node, is_inside, path_and_ancestors, tree_of

LARGE = 0.15
"""Share of the largest list's parameter elements from which another list of blocks is a stack."""

DEEP = 6
"""Number of blocks from which a list of blocks is a stack, however narrow it is."""

STAGE_SHARE = 0.5
"""Share of a stage's parameter elements above which a list in it is its list of blocks."""


@dataclass
class Stack:
    """A list of blocks with its own depth, such as the layers of an encoder.

    Attributes:
        path: Dotted name of its list of modules.
        depth: Number of blocks.
        blocks: Dotted name of a module -> block number from 0. A parameter belongs to the block of
            its innermost module in it.
        stems: Dotted names of modules of a stage before its first block, such as a patch embedding.
            They count with that block.
        numel: Elements of its parameters.
        scope: Dotted name of the topmost module that contains this stack and no other.
        name: Short name among the stacks of the model; empty for the only one.
    """

    path: str
    depth: int
    blocks: dict[str, int]
    stems: set[str] = field(default_factory=set)
    numel: int = 0
    scope: str = ""
    name: str = ""

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
    """List the stacks of a model, see `find_stacks`."""
    return find_stacks(tree_of(dict(model.named_parameters()), roles_of(model), model))


def block_paths(model: nn.Module) -> list[str]:
    """List the dotted names of a model's blocks, in its order; empty if it has none."""
    return [path for stack in stacks_of(model) for path in stack.blocks]


def find_stacks(root: Node) -> list[Stack]:
    """List the stacks of a module tree in its order, with the blocks of each numbered.

    Blocks must have three matrices and a norm; if no list has such blocks, two matrices. Of the
    lists of blocks the largest is a stack, and others if `_is_large` says so. Empty for a model
    without a list of blocks.
    """
    # 1. List the lists of possible blocks, and keep those that are made of blocks. Lists of one
    #    length in one module, such as `attentions` and `ffns`, are merged: a block has one of each.
    merged = _merge_siblings(_outermost_lists(root))
    candidates = [stack for stack in merged if _is_made_of_blocks(root, stack, strict=True)]
    if not candidates:
        candidates = [stack for stack in merged if _is_made_of_blocks(root, stack, strict=False)]
    if not candidates:
        return []
    # 2. Add the elements of lists beside them to their blocks, such as a norm for each block.
    list_paths = {stack.path for stack in candidates}
    for stack in candidates:
        _add_lists_beside(root, stack, list_paths)
    # 3. Leave out small ones.
    largest = max(candidates, key=lambda stack: stack.numel)
    return [stack for stack in candidates if stack is largest or _is_large(root, stack, largest)]


def _outermost_lists(node: Node) -> list[tuple[Stack, Node]]:
    """List the outermost lists of possible blocks, as stacks, each with its parent node.

    Lists inside of such a list are left out: they belong to its blocks.
    """
    lists: list[tuple[Stack, Node]] = []
    for child in node.children.values():
        if child.numbered and _may_hold_blocks(child):
            lists.append((_number_blocks(child), node))
        else:
            lists += _outermost_lists(child)
    return lists


def _may_hold_blocks(node: Node) -> bool:
    """Tell whether the elements of a list of modules may be blocks, or stages of blocks.

    At least half of them must have child modules. A single element must have three matrices. Of
    several elements two must be of one class, unless they are stages.
    """
    elements = list(node.children.values())
    with_children = [element for element in elements if element.children]
    if not with_children or 2 * len(with_children) < len(elements):
        return False
    if len(elements) == 1:
        return elements[0].matrices >= 3
    return _two_are_alike(elements) or _block_lists_of_stages(node) is not None


def _two_are_alike(nodes: list[Node]) -> bool:
    """Tell whether any two of some modules are of one class.

    Without class names, whether two have parameters of the same names.
    """
    kinds = {node.kind or str([name for name, _ in node.signature()]) for node in nodes}
    return len(kinds) < len(nodes)


def _number_blocks(node: Node) -> Stack:
    """Make the stack of a list of modules, with the blocks numbered through all stages.

    In a stage, modules registered before its list of blocks count with its first block, as `stems`;
    all other modules count with its last block. Two stages, each with an `embed`, two `blocks` and
    a `norm`, have the block numbers

        stages.0  1                   stages.1  3                     all else in the stage
        stages.0.embed  0             stages.1.embed  2               a stem
        stages.0.blocks.0  0, .1  1   stages.1.blocks.0  2, .1  3
    """
    elements = list(node.children.values())
    block_lists = _block_lists_of_stages(node)
    if block_lists is None:
        blocks = {element.path: index for index, element in enumerate(elements)}
        return Stack(node.path, len(blocks), blocks, numel=node.numel)
    stack = Stack(node.path, 0, {}, numel=node.numel)
    for stage, block_list in zip(elements, block_lists, strict=True):
        first_block = stack.depth
        if block_list is None:  # this element is a block, not a stage
            stack.blocks[stage.path] = first_block
            stack.depth += 1
            continue
        for block in block_list.children.values():
            stack.blocks[block.path] = stack.depth
            stack.depth += 1
        if block_list is stage:
            continue
        # Other modules of the stage: by default the last block, before the list the first one.
        stack.blocks[stage.path] = stack.depth - 1
        for child in stage.children.values():
            if child is block_list:
                break
            stack.blocks[child.path] = first_block
            stack.stems.add(child.path)
    return stack


def _block_lists_of_stages(node: Node) -> list[Node | None] | None:
    """Find the list of blocks in each element of a list of modules; None if these are no stages.

    They are stages if at least half of them have a list of blocks, see `_find_block_list`, and

    - each element is itself such a list, as in [[block, block], [block, block]]; or
    - the elements differ in structure, such as in width, and two of all inner blocks are of one
      class. (Elements of the same structure are blocks, whatever lists they contain.)

    For `stages.0` and `stages.1` of different widths, each with a list `blocks`, the result is the
    nodes `stages.0.blocks` and `stages.1.blocks`. For `h.0` and `h.1` of equal sizes, each with a
    list `experts`, it is None.

    Returns:
        For each element its list of blocks, or None for an element that is a block itself.
    """
    elements = list(node.children.values())
    list_by_element = [_find_block_list(element) for element in elements]
    block_lists = [block_list for block_list in list_by_element if block_list is not None]
    if not block_lists or 2 * len(block_lists) < len(elements):
        return None
    if list_by_element == elements:  # each element is itself a list of blocks
        return list_by_element
    have_same_structure = len({element.signature() for element in elements}) == 1
    if have_same_structure:
        return None
    inner_blocks: list[Node] = []
    for block_list in block_lists:
        inner_blocks += block_list.children.values()
    if _two_are_alike(inner_blocks):
        return list_by_element
    return None


def _find_block_list(stage: Node) -> Node | None:
    """Find the list of blocks in a stage: the stage itself, or a child; None if there is none.

    It must have more than half of the stage's parameter elements. Its own modules must all have
    child modules, and two of them the same class, unless there is only one.
    """
    for node in (stage, *stage.children.values()):
        if not node.numbered or node.numel <= STAGE_SHARE * stage.numel:
            continue
        blocks = list(node.children.values())
        have_children = all(block.children for block in blocks)
        if have_children and (len(blocks) == 1 or _two_are_alike(blocks)):
            return node
    return None


def _merge_siblings(lists: list[tuple[Stack, Node]]) -> list[Stack]:
    """Merge stacks of equal depth with the same parent, such as attentions and feed-forwards.

    Block i of the merged stack has element i of each. Stacks with stems, or of one block, are not
    merged. Changes the first stack of those that it merges: `attentions` of 6 elements and `ffns`
    of 6 elements in one module become the stack `attentions` of 6 blocks.

    Args:
        lists: Each stack with its parent.

    Returns:
        The stacks that are left, in their order.
    """
    merged: list[tuple[Stack, Node]] = []
    for stack, parent in lists:
        can_merge = not stack.stems and stack.depth > 1
        partner = None
        for earlier, earlier_parent in merged:
            is_partner = earlier_parent is parent and earlier.depth == stack.depth
            if can_merge and is_partner and not earlier.stems:
                partner = earlier
                break
        if partner is None:
            merged.append((stack, parent))
        else:
            partner.blocks |= stack.blocks
            partner.numel += stack.numel
    return [stack for stack, _ in merged]


def _add_lists_beside(root: Node, stack: Stack, list_paths: set[str]) -> None:
    """Add lists beside a stack to its blocks, if they have one element for each of its elements.

    Such a list holds the norm or patch embedding of each block or stage, for instance. Element i of
    it belongs to element i of the stack, a block or a stage. Of a list registered before the stack
    it counts with the first block of its stage, as a stem; of a list after it, with the last block.
    Changes `stack`.

    With the blocks `layers.0` and `layers.1`, and then a list `norms` of two, `norms.1` counts with
    block 1. With two stages of three blocks in place of the two blocks, it counts with block 5.

    Args:
        root: The module tree.
        stack: One of its stacks.
        list_paths: Paths of all stacks; these are not added.
    """
    parent_path, _, list_name = stack.path.rpartition(".")
    siblings = root.at(parent_path).children
    element_count = len(siblings[list_name].children)
    if element_count < 2:
        return
    is_before = True  # until the loop, in the order of registration, comes to the stack
    for name, sibling in siblings.items():
        if name == list_name:
            is_before = False
            continue
        if sibling.path in list_paths or not sibling.numbered:
            continue
        elements = {number: f"{sibling.path}.{number}" for number in sibling.children}
        is_counted = stack.blocks.keys() & set(elements.values())  # see `_merge_siblings`
        if len(elements) != element_count or is_counted:
            continue
        for number, element in elements.items():
            stage = f"{stack.path}.{number}"  # a stage, or a single block
            blocks = [block for path, block in stack.blocks.items() if is_inside(path, stage)]
            # Empty if the two lists are numbered differently: the element is left out.
            if blocks and is_before:
                stack.blocks[element] = min(blocks)
                stack.stems.add(element)
            elif blocks:
                stack.blocks[element] = max(blocks)


def _is_made_of_blocks(root: Node, stack: Stack, *, strict: bool) -> bool:
    """Tell whether at least half of the block numbers of a stack are blocks, see `_is_block`.

    A block number may have several modules, which are counted together; stems are left out.
    """
    modules_of_block: dict[int, list[Node]] = {}
    for path, block in stack.blocks.items():
        if path not in stack.stems:
            modules_of_block.setdefault(block, []).append(root.at(path))
    block_count = sum(_is_block(nodes, strict=strict) for nodes in modules_of_block.values())
    return 2 * block_count >= len(modules_of_block)


def _is_block(nodes: list[Node], *, strict: bool) -> bool:
    """Tell whether the modules of one block number together have the parameters of a block.

    They need two matrices. If `strict`, they need three, and a norm or another vector; but no
    vector if they have no biases either, since their norms may have no parameters.
    """
    matrices = sum(node.matrices for node in nodes)
    if not strict:
        return matrices >= 2
    has_vector = any(node.vectors for node in nodes)
    has_bias = any(node.biases for node in nodes)
    return matrices >= 3 and (has_vector or not has_bias)


def _is_large(root: Node, stack: Stack, largest: Stack) -> bool:
    """Tell whether a list of blocks counts as a stack beside the largest one.

    It does if it has 15 % of the largest one's parameter elements, or six blocks; or if it lies in
    a transformers model that does not contain the largest one, such as a small vision encoder.
    """
    if stack.numel >= LARGE * largest.numel or stack.depth >= DEEP:
        return True
    return any(
        root.at(above).is_model
        for above in path_and_ancestors(stack.path)
        if not is_inside(largest.path, above)  # not around the largest one, too
    )
