"""The growth of each parameter over that of the base at which lr was tuned.

A dimension is infinite if it differs between the two (Yang et al. 2022, arXiv:2203.03466). So no
list of layers is needed, and both models may be shapes alone, on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from optrun.base.errors import ConfigError
from optrun.param_groups.branches import branch_ends
from optrun.param_groups.roles import BIAS, EMBEDDING, MATRIX, NORM, VECTOR, roles_of
from optrun.param_groups.stacks import stacks_of

KEY = "parametrization.base"


@dataclass(frozen=True)
class Growth:
    """One parameter beside that of the base.

    Attributes:
        counterpart: Name of the base's.
        shape: Of the model's.
        base_shape: Of the base's.
        fan_in: Its inputs over the base's; 1: not an infinite dimension.
        fan_out: Its outputs over the base's.
        branch: Blocks of the base over blocks of the model, for what lies in a block; else 1.
        ends_branch: Whether its output is added to the residual stream.
        logits: Factor on the logits of a tied head that it carries, see `carrier_of_logits`.
        is_head: Whether its output is the vocabulary or the classes, which no later module reads.
    """

    counterpart: str
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    fan_in: float = 1.0
    fan_out: float = 1.0
    branch: float = 1.0
    ends_branch: bool = False
    logits: float = 1.0
    is_head: bool = False

    @property
    def kind(self) -> str:
        """Name the parameter's kind in the table of Yang et al. 2022.

        It depends on the number of dimensions that grow with width.
        """
        if self.fan_in != 1:
            return "output matrix" if self.is_head else "hidden matrix"
        return "input matrix or vector" if self.fan_out != 1 else "of one size"

    @property
    def carried(self) -> float:
        """Factor of the logits or of a residual branch, carried by these weights.

        A branch's factor stands in its last weights; Dey et al. 2025, arXiv:2505.01618, alpha = 1.
        """
        return self.logits * (self.branch if self.ends_branch else 1.0)

    @property
    def width_init(self) -> float:
        """Factor of width on the standard deviation of the initial weights.

        A matrix within the model keeps the size of its outputs, also where their number stays, as
        that of key and value heads does. The logits of a head may shrink.
        """
        return 1 / self.fan_in if self.is_head else self.fan_in**-0.5

    @property
    def init(self) -> float:
        """Initial standard deviation of the weights over the base's."""
        return self.width_init * self.carried


def growth_of(model: nn.Module, base: nn.Module) -> dict[str, Growth]:
    """Compare every parameter of a model with its counterpart in the base.

    Args:
        model: On any device.
        base: Of the same architecture, narrower, of fewer blocks, or both.

    Raises:
        ConfigError: A parameter without a counterpart, of fewer elements, or one whose inputs
            cannot be told from its outputs; for another number of blocks, branches whose ends are
            not found.

    Example:
        >>> model, base = nn.Linear(8, 4), nn.Linear(2, 4)
        >>> [(name, size.fan_in, size.fan_out) for name, size in growth_of(model, base).items()]
        [('weight', 4.0, 1.0), ('bias', 1.0, 1.0)]
    """
    params = dict(model.named_parameters())
    base_params = dict(base.named_parameters())
    roles = roles_of(model)
    modules = dict(model.named_modules())
    counterparts, branch = _counterparts(model, base)
    unmatched = [name for name in base_params if name not in counterparts.values()]
    if unmatched:
        raise ConfigError(
            f"{KEY}: the base has {unmatched[0]}, and the model nothing that matches it by name."
            " Give a base of the same architecture, no deeper than the model."
        )
    ends = branch_ends(model, branch) if branch else set()
    heads = _heads(model, roles)
    growth = {}
    for name, param in params.items():
        shape = tuple(param.shape)
        base_shape = tuple(base_params[counterparts[name]].shape)
        if len(shape) != len(base_shape) or any(
            now < then for now, then in zip(shape, base_shape, strict=True)
        ):
            raise ConfigError(
                f"{KEY}: {name} has the shape {base_shape} in the base, and {shape} in the model: a"
                " dimension shrinks. Give a base that is no larger than the model in any key."
            )
        path, _, leaf = name.rpartition(".")
        fan_in, fan_out = _fans(name, leaf, modules[path], roles[name], shape, base_shape)
        growth[name] = Growth(
            counterparts[name],
            shape,
            base_shape,
            fan_in,
            fan_out,
            branch.get(name, 1.0),
            name in ends,
            is_head=name in heads and fan_in != 1 and fan_out == 1,
        )
    return growth


def _heads(model: nn.Module, roles: Mapping[str, str]) -> set[str]:
    """Name the output matrices: no later matrix reads their output.

    They lie outside of all blocks and of `base_model`. Within a container of their own, or in an
    `nn.Sequential`, the last matrix is the head. Output embeddings always are.
    """
    blocks = [path for stack in stacks_of(model) for path in stack.blocks]
    backbone = getattr(model, "base_model", model)
    if backbone is not model:
        blocks += [path for path, module in model.named_modules() if module is backbone]
    block_prefixes = tuple(f"{block}." for block in blocks)
    matrices = []
    for path, module in model.named_modules():
        has_matrix = any(param.dim() > 1 for param in module.parameters(recurse=False))
        if has_matrix and not f"{path}.".startswith(block_prefixes):
            matrices.append(path)
    heads: set[str] = set()
    for index, path in enumerate(matrices):
        container = path.rpartition(".")[0]
        in_order = container or isinstance(model, nn.Sequential)
        beneath = f"{container}." if container else ""
        later_matrices = matrices[index + 1 :]
        if in_order and any(later.startswith(beneath) for later in later_matrices):
            continue
        params = model.get_submodule(path).named_parameters(path, recurse=False)
        heads |= {name for name, _ in params if roles.get(name) == MATRIX}
    find_logits = getattr(model, "get_output_embeddings", None)
    logits = find_logits() if callable(find_logits) else None
    if logits is not None:
        weight = getattr(logits, "weight", None)
        heads |= {name for name, param in model.named_parameters() if param is weight}
    return heads


def _counterparts(model: nn.Module, base: nn.Module) -> tuple[dict[str, str], dict[str, float]]:
    """Map parameter names to the base's, and to the ratio of depths.

    The ratio is base depth over depth, for parameters in stacks whose depths differ.
    Block i of L lies where block i L_base // L of the base does.
    """
    params = dict(model.named_parameters())
    base_params = dict(base.named_parameters())
    names: dict[str, str] = {name: name for name in params if name in base_params}
    depth: dict[str, float] = {}
    base_stacks = {stack.path: stack for stack in stacks_of(base)}
    for stack in stacks_of(model):
        base_stack = base_stacks.get(stack.path)
        if base_stack is None or base_stack.depth == stack.depth:
            continue
        if base_stack.depth > stack.depth:
            raise ConfigError(
                f"{KEY}: {stack.path} has {base_stack.depth} blocks in the base, and {stack.depth}"
                " in the model: it shrinks. Give a base of as many layers or fewer."
            )
        for path, block in stack.blocks.items():
            base_path = f"{path.rpartition('.')[0]}.{block * base_stack.depth // stack.depth}"
            in_block = [name for name in params if name.startswith(f"{path}.")]
            names |= {name: base_path + name[len(path) :] for name in in_block}
            depth |= dict.fromkeys(in_block, base_stack.depth / stack.depth)
    missing = [name for name in params if names.get(name) not in base_params]
    if missing:
        raise ConfigError(
            f"{KEY}: {missing[0]} of the model has no counterpart in the base by name. Give a base"
            " of the same architecture, which differs in sizes alone."
        )
    return names, depth


def _fans(
    name: str,
    leaf: str,
    module: nn.Module,
    role: str,
    shape: tuple[int, ...],
    base_shape: tuple[int, ...],
) -> tuple[float, float]:
    """Return the growth factors of a parameter's inputs and outputs."""
    ratios = [now / then if then else 1.0 for now, then in zip(shape, base_shape, strict=True)]
    grown = [ratio for ratio in ratios if ratio != 1]
    if not grown:
        return 1.0, 1.0
    if role in (BIAS, NORM, VECTOR):
        return 1.0, math.prod(ratios)
    if role == EMBEDDING:
        if math.prod(ratios[:-1]) != 1:
            raise ConfigError(
                f"{KEY}: {name} has {base_shape[:-1]} rows in the base, and {shape[:-1]} in the"
                " model: a vocabulary or a number of positions is no width. Leave its key out."
            )
        return 1.0, ratios[-1]
    if leaf == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        out, into = (1, 0) if getattr(module, "transposed", False) else (0, 1)
        return ratios[into], ratios[out]
    if leaf == "weight" and type(module).__name__ == "Conv1D":  # transformers': inputs come first
        return ratios[0], ratios[1]
    if len(grown) == 2 and grown[0] == grown[1]:
        return grown[0], grown[0]
    raise ConfigError(
        f"{KEY}: {name} of {type(module).__name__} grows from {base_shape} to {shape}, and nothing"
        " says which of its dimensions are inputs. Take parametrization=standard for this"
        " architecture."
    )
