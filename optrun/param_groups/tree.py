"""The module tree as far as layers are told from it: names, order, classes, sizes.

No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from optrun.param_groups.roles import BIAS, EMBEDDING, LORA, MATRIX, NORM, VECTOR


def split_path(path: str) -> list[str]:
    """Split a dotted name; nothing for the model itself."""
    if path:
        return path.split(".")
    return []


def path_and_ancestors(path: str) -> Iterator[str]:
    """Yield a dotted name and its ancestors, up to the model itself.

    Example:
        >>> list(path_and_ancestors("encoder.layer"))
        ['encoder.layer', 'encoder', '']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield path


def is_inside(path: str, above: str) -> bool:
    """Tell whether a dotted name is a module's own, or lies inside of it."""
    return not above or path == above or path.startswith(f"{above}.")


@dataclass
class Node:
    """One module.

    Attributes:
        path: Dotted name; empty for the model itself.
        kind: Class name; empty where only parameter names are known.
        is_model: The module is a model of its own (a tower of a larger one).
        children: By their own names, in the order of registration; only those that hold parameters.
        own: Its direct parameters: leaf name -> shape.
        numel: Elements below it, itself included.
        matrices: Matrices and embeddings below it.
        vectors: Norm weights and other vectors below it; a block has some.
        biases: Biases below it.
    """

    path: str
    kind: str = ""
    is_model: bool = False
    children: dict[str, Node] = field(default_factory=dict)
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numel: int = 0
    matrices: int = 0
    vectors: int = 0
    biases: int = 0

    @property
    def numbered(self) -> bool:
        """Whether this is a list of modules: every child is a number and nothing else lies here."""
        return (
            bool(self.children) and not self.own and all(name.isdigit() for name in self.children)
        )

    def walk(self) -> Iterator[Node]:
        """Yield the node itself, then everything below, in order."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def at(self, path: str) -> Node:
        """Return the node at a dotted name below this one."""
        node = self
        for piece in split_path(path):
            node = node.children[piece]
        return node

    def signature(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return names and shapes below it, relative to it.

        Equal for layers that are built alike.
        """
        cut = len(self.path) + 1 if self.path else 0
        return tuple(
            (f"{node.path}.{leaf}"[cut:] if node.path else leaf, shape)
            for node in self.walk()
            for leaf, shape in node.own.items()
        )


def tree_of(
    params: Mapping[str, Tensor], roles: Mapping[str, str], model: nn.Module | None
) -> Node:
    """Build the tree of a model, or of parameter names alone.

    Args:
        params: Every parameter by name, in the order of the model.
        roles: Role of each.
        model: Gives classes and the order of modules; None where only names are known.
    """
    root = Node("")
    if model is not None:
        root.kind = type(model).__name__
        root.is_model = _is_model(model)
        for path, module in model.named_modules():
            if path and any(True for _ in module.parameters()):
                node = _add_path(root, path)
                node.kind = type(module).__name__
                node.is_model = _is_model(module)
    for name, param in params.items():
        path, _, leaf = name.rpartition(".")
        _add_path(root, path).own[leaf] = tuple(param.shape)
        for node in map(root.at, path_and_ancestors(path)):
            node.numel += param.numel()
            node.matrices += roles[name] in (MATRIX, EMBEDDING, LORA)
            node.vectors += roles[name] in (NORM, VECTOR)
            node.biases += roles[name] == BIAS
    _prune(root)
    return root


def _add_path(root: Node, path: str) -> Node:
    """Add the nodes of a dotted path that are missing, and return the last one."""
    node = root
    for piece in split_path(path):
        if piece not in node.children:
            node.children[piece] = Node(f"{node.path}.{piece}" if node.path else piece)
        node = node.children[piece]
    return node


def _prune(node: Node) -> None:
    """Remove modules with no parameter below them (a tied tensor counts once)."""
    for name, child in list(node.children.items()):
        if any(below.own for below in child.walk()):
            _prune(child)
        else:
            del node.children[name]


def _is_model(module: nn.Module) -> bool:
    """Tell a transformers model, without importing transformers."""
    return hasattr(type(module), "base_model_prefix")
