"""The module tree of a model: names, order, classes and sizes, without the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from optrun.param_groups.roles import BIAS, EMBEDDING, LORA, MATRIX, NORM, VECTOR


def split_path(path: str) -> list[str]:
    """Split a dotted name at its dots; an empty list for the model itself."""
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
    """Tell whether a dotted name is a module's own, or lies inside of the module.

    Args:
        path: Dotted name of a parameter or module.
        above: Dotted name of the module; empty for the model itself, which contains everything.

    Example:
        >>> is_inside("h.1.fc", "h.1"), is_inside("h.10.fc", "h.1")
        (True, False)
    """
    return not above or path == above or path.startswith(f"{above}.")


@dataclass
class Node:
    """One module that has parameters, directly or below it.

    Attributes:
        path: Dotted name; empty for the model itself.
        kind: Class name; empty if only parameter names are known.
        is_model: Whether it is a transformers model, perhaps inside of a larger one.
        children: Child modules by name, in the order of registration.
        param_shapes: Shapes of its direct parameters by name.
        numel: Elements of all parameters in it, those of its children included.
        matrices: Matrices, embeddings and LoRA factors in it.
        vectors: Norm weights and other vectors in it, without biases.
        biases: Biases in it.
    """

    path: str
    kind: str = ""
    is_model: bool = False
    children: dict[str, Node] = field(default_factory=dict)
    param_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    numel: int = 0
    matrices: int = 0
    vectors: int = 0
    biases: int = 0

    @property
    def numbered(self) -> bool:
        """Whether it is a list of modules: children named by numbers, no direct parameters."""
        return (
            bool(self.children)
            and not self.param_shapes
            and all(name.isdigit() for name in self.children)
        )

    def walk(self) -> Iterator[Node]:
        """Yield the node itself and all nodes below it, depth first."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def at(self, path: str) -> Node:
        """Return the node at a dotted name relative to this one; KeyError if there is none."""
        node = self
        for part in split_path(path):
            node = node.children[part]
        return node

    def signature(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (name relative to the node, shape) of all parameters in it.

        Modules of the same structure and sizes have equal signatures, such as the blocks `h.0` and
        `h.1`: both have (("fc.weight", (4, 4)), ("fc.bias", (4,))), for example.
        """
        prefix = f"{self.path}." if self.path else ""
        signature = []
        for node in self.walk():
            for leaf, shape in node.param_shapes.items():
                name = f"{node.path}.{leaf}" if node.path else leaf
                signature.append((name.removeprefix(prefix), shape))
        return tuple(signature)


def tree_of(
    params: Mapping[str, Tensor], roles: Mapping[str, str], model: nn.Module | None
) -> Node:
    """Build the module tree of a model, or of parameter names alone.

    Modules without parameters are left out. A tied parameter counts once, where `params` names it.

    Args:
        params: Every parameter by name, in the order of the model.
        roles: Role of each parameter.
        model: Gives classes and the order of modules; None if only names are known.

    Returns:
        The root of the tree, the model itself.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> roles = {"0.weight": MATRIX, "0.bias": BIAS}
        >>> root = tree_of(dict(model.named_parameters()), roles, model)
        >>> [(node.path, node.kind, node.numel) for node in root.walk()]
        [('', 'Sequential', 9), ('0', 'Linear', 9)]
    """
    root = Node("")
    # 1. Add the modules, with the parameters that are left out, too.
    if model is not None:
        root.kind = type(model).__name__
        root.is_model = _is_model(model)
        for path, module in model.named_modules():
            if path and any(True for _ in module.parameters()):
                node = _add_path(root, path)
                node.kind = type(module).__name__
                node.is_model = _is_model(module)
    # 2. Add the parameters, and count them in all modules around them.
    for name, param in params.items():
        path, _, leaf = name.rpartition(".")
        _add_path(root, path).param_shapes[leaf] = tuple(param.shape)
        for node in map(root.at, path_and_ancestors(path)):
            node.numel += param.numel()
            # A comparison counts as 0 or 1.
            node.matrices += roles[name] in (MATRIX, EMBEDDING, LORA)
            node.vectors += roles[name] in (NORM, VECTOR)
            node.biases += roles[name] == BIAS
    _prune(root)
    return root


def _add_path(root: Node, path: str) -> Node:
    """Add the missing nodes of a dotted path to a tree, and return the node at its end.

    For "h.0" these are a child `h` of the root and its child `0`, which is returned; the root
    itself for an empty path.
    """
    node = root
    for part in split_path(path):
        if part not in node.children:
            node.children[part] = Node(f"{node.path}.{part}" if node.path else part)
        node = node.children[part]
    return node


def _prune(node: Node) -> None:
    """Remove the modules without a parameter from a node, in place."""
    for name, child in list(node.children.items()):
        if any(below.param_shapes for below in child.walk()):
            _prune(child)
        else:
            del node.children[name]


def _is_model(module: nn.Module) -> bool:
    """Tell whether a module is a model of transformers, without importing it."""
    return hasattr(type(module), "base_model_prefix")
