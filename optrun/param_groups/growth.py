"""Compare the shape of each parameter with that of the base model at which lr was tuned.

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
from optrun.param_groups.stacks import block_paths, stacks_of

KEY = "parametrization.base"


@dataclass(frozen=True)
class Growth:
    """The sizes of one parameter, relative to the same parameter of the base model.

    All numbers are ratios, model over base or base over model; 1 means no difference.

    Attributes:
        base_name: Name of the parameter in the base.
        shape: Shape in the model.
        base_shape: Shape in the base.
        fan_in: Number of inputs over that in the base; 1: not an infinite dimension.
        fan_out: Number of outputs over that in the base.
        branch: Number of blocks of the base over that of the model, for a parameter in a block;
            else 1.
        ends_branch: Whether it is the last of its branch: its output is added to the residual
            stream.
        logits: Factor on the logits of a tied head that its weights contain, see
            `carrier_of_logits`; 1 for all other parameters.
        is_head: Whether its outputs are the vocabulary or the classes, which no later module reads.
    """

    base_name: str
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
        """Kind of parameter in the table of Yang et al. 2022, by which dimensions grow."""
        if self.fan_in != 1:
            return "output matrix" if self.is_head else "hidden matrix"
        return "input matrix or vector" if self.fan_out != 1 else "of one size"

    @property
    def carried(self) -> float:
        """Factor on logits or on a residual branch that its weights carry; 1 for most.

        Of a branch only the last weights carry the factor `branch`; Dey et al. 2025,
        arXiv:2505.01618, alpha = 1.
        """
        return self.logits * (self.branch if self.ends_branch else 1.0)

    @property
    def width_init(self) -> float:
        """Factor on the standard deviation of the initial weights, by the width.

        With `fan_in`, the growth of the number of inputs over the base: 1/sqrt(fan_in), which keeps
        the size of the outputs. For a head 1/fan_in: its logits may shrink. With four times the
        inputs of the base it is 1/2, for a head 1/4.
        """
        return 1 / self.fan_in if self.is_head else self.fan_in**-0.5

    @property
    def init(self) -> float:
        """Factor on the standard deviation of the initial weights, `carried` included."""
        return self.width_init * self.carried


def growth_of(model: nn.Module, base: nn.Module) -> dict[str, Growth]:
    """Map every parameter name of a model to its growth over its parameter in the base.

    Args:
        model: On any device.
        base: Of the same architecture, narrower, of fewer blocks, or both.

    Raises:
        ConfigError: A parameter has no match in the base, a dimension shrinks, or inputs cannot be
            told from outputs; if the number of blocks differs, also as `branch_ends`.

    Example:
        >>> model, base = nn.Linear(8, 4), nn.Linear(2, 4)
        >>> [(name, size.fan_in, size.fan_out) for name, size in growth_of(model, base).items()]
        [('weight', 4.0, 1.0), ('bias', 1.0, 1.0)]
    """
    # 1. Find the parameter of the base for each one of the model, and the other way round.
    params = dict(model.named_parameters())
    base_params = dict(base.named_parameters())
    roles = roles_of(model)
    modules = dict(model.named_modules())
    # Ratios of the depths only for parameters in stacks whose depths differ.
    base_names, depth_ratios = _match_base_names(model, base)
    unmatched = [name for name in base_params if name not in base_names.values()]
    if unmatched:
        raise ConfigError(
            f"{KEY}: the base has {unmatched[0]}, and the model nothing that matches it by name."
            " Give a base of the same architecture, no deeper than the model."
        )
    # 2. Compare their shapes. The ends of branches matter only if the number of blocks differs.
    ends = branch_ends(model, depth_ratios) if depth_ratios else set()
    heads = _find_heads(model, roles)
    growth = {}
    for name, param in params.items():
        shape = tuple(param.shape)
        base_shape = tuple(base_params[base_names[name]].shape)
        _refuse_smaller(name, shape, base_shape)
        path, _, leaf = name.rpartition(".")
        fan_in, fan_out = _growth_of_fans(name, leaf, modules[path], roles[name], shape, base_shape)
        growth[name] = Growth(
            base_names[name],
            shape,
            base_shape,
            fan_in,
            fan_out,
            branch=depth_ratios.get(name, 1.0),
            ends_branch=name in ends,
            # Only inputs of a head grow, since its outputs are the vocabulary or the classes.
            is_head=name in heads and fan_in != 1 and fan_out == 1,
        )
    return growth


def _refuse_smaller(name: str, shape: tuple[int, ...], base_shape: tuple[int, ...]) -> None:
    """Refuse a parameter if a dimension is smaller than in the base, or their number differs.

    Raises:
        ConfigError: Naming the parameter and both shapes.
    """
    if len(shape) != len(base_shape) or any(
        now < then for now, then in zip(shape, base_shape, strict=True)
    ):
        raise ConfigError(
            f"{KEY}: {name} has the shape {base_shape} in the base, and {shape} in the model: a"
            " dimension shrinks. Give a base that is no larger than the model in any key."
        )


def _find_heads(model: nn.Module, roles: Mapping[str, str]) -> set[str]:
    """Find the weights of the head: matrices not followed by another matrix.

    These are the output embeddings, and matrices outside of all blocks and of `base_model`. Of the
    matrices in one parent module, only the last counts: its order is taken for that of the forward
    pass. Direct children of the model all count, unless it is an `nn.Sequential`.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _find_heads(model, roles_of(model))
        {'2.weight'}
    """
    # 1. Matrices that no other matrix follows.
    paths = _modules_outside_blocks(model)  # in the order of registration
    heads: set[str] = set()
    for index, path in enumerate(paths):
        parent = path.rpartition(".")[0]
        prefix = f"{parent}." if parent else ""
        # Whether a later matrix in the same parent follows in the forward pass, too.
        order_counts = parent or isinstance(model, nn.Sequential)
        is_followed = any(later.startswith(prefix) for later in paths[index + 1 :])
        if order_counts and is_followed:
            continue
        params = model.get_submodule(path).named_parameters(path, recurse=False)
        heads |= {name for name, _ in params if roles.get(name) == MATRIX}
    # 2. The output embeddings, if the model has such a method and layer.
    get_logits_layer = getattr(model, "get_output_embeddings", None)
    logits_layer = get_logits_layer() if callable(get_logits_layer) else None
    if logits_layer is not None:
        weight = getattr(logits_layer, "weight", None)
        heads |= {name for name, param in model.named_parameters() if param is weight}
    return heads


def _modules_outside_blocks(model: nn.Module) -> list[str]:
    """List the paths of modules with a matrix of their own, outside of all blocks and `base_model`.

    `base_model` is the part of a transformers model without its head.
    """
    inside = block_paths(model)
    backbone = getattr(model, "base_model", model)
    if backbone is not model:
        inside += [path for path, module in model.named_modules() if module is backbone]
    prefixes = tuple(f"{path}." for path in inside)
    paths = []
    for path, module in model.named_modules():
        has_matrix = any(param.dim() > 1 for param in module.parameters(recurse=False))
        if has_matrix and not f"{path}.".startswith(prefixes):
            paths.append(path)
    return paths


def _match_base_names(model: nn.Module, base: nn.Module) -> tuple[dict[str, str], dict[str, float]]:
    """Map parameter names to their names in the base, and to base depth over depth.

    Block i of a stack with L blocks matches block floor(i L_base / L) of the base, so that the
    blocks of the base are spread evenly: with 4 blocks over 2, `h.0` and `h.1` match `h.0`, and
    `h.2` and `h.3` match `h.1`, and each of their parameters has the ratio 2 / 4.

    Returns:
        Name -> name in the base, for every parameter; and name -> base depth over depth, only for
        parameters in stacks whose depths differ.

    Raises:
        ConfigError: A stack is deeper in the base, or a parameter has no match in the base.
    """
    params = dict(model.named_parameters())
    base_params = dict(base.named_parameters())
    names = {name: name for name in params if name in base_params}
    depth_ratios: dict[str, float] = {}
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
            base_block = block * base_stack.depth // stack.depth
            base_path = f"{path.rpartition('.')[0]}.{base_block}"  # such as h.1 for h.3
            in_block = [name for name in params if name.startswith(f"{path}.")]
            names |= {name: base_path + name.removeprefix(path) for name in in_block}
            depth_ratios |= dict.fromkeys(in_block, base_stack.depth / stack.depth)
    missing = [name for name in params if names.get(name) not in base_params]
    if missing:
        raise ConfigError(
            f"{KEY}: {missing[0]} of the model matches no parameter of the base by name. Give a"
            " base of the same architecture, which differs in sizes alone."
        )
    return names, depth_ratios


def _growth_of_fans(
    name: str,
    leaf: str,
    module: nn.Module,
    role: str,
    shape: tuple[int, ...],
    base_shape: tuple[int, ...],
) -> tuple[float, float]:
    """Return the growth of a parameter's inputs (fan_in) and of its outputs (fan_out).

    Both are 1 if the parameter has the shape of the base. Vectors have outputs only, and so have
    embeddings, whose rows may not grow. The class of a linear layer or convolution says which
    dimension is which. Any other matrix must grow in exactly two dimensions by the same factor, so
    that it does not matter.

    Args:
        name: Name of the parameter, for the message.
        leaf: Its name in the module.
        module: The module that has it.
        role: Its role.
        shape: Shape in the model.
        base_shape: Shape in the base.

    Raises:
        ConfigError: An embedding has another number of rows, or nothing tells inputs from outputs.

    Example:
        >>> _growth_of_fans("weight", "weight", nn.Linear(8, 12), MATRIX, (12, 8), (4, 2))
        (4.0, 3.0)
    """
    ratios = [now / then if then else 1.0 for now, then in zip(shape, base_shape, strict=True)]
    grown = [ratio for ratio in ratios if ratio != 1]
    if not grown:
        return 1.0, 1.0
    if role in (BIAS, NORM, VECTOR):
        return 1.0, math.prod(ratios)  # all dimensions are outputs
    if role == EMBEDDING:
        if math.prod(ratios[:-1]) != 1:  # another dimension than the last one grows
            raise ConfigError(
                f"{KEY}: {name} has {base_shape[:-1]} rows in the base, and {shape[:-1]} in the"
                " model: a vocabulary or a number of positions is no width. Leave its key out."
            )
        return 1.0, ratios[-1]
    is_conv1d = type(module).__name__ == "Conv1D"  # of transformers
    has_known_order = is_conv1d or isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    if leaf == "weight" and has_known_order:
        # Inputs come first in transposed convolutions and Conv1D, else outputs.
        if is_conv1d or getattr(module, "transposed", False):
            return ratios[0], ratios[1]
        return ratios[1], ratios[0]
    if len(grown) == 2 and grown[0] == grown[1]:  # whichever of the two are the inputs
        return grown[0], grown[0]
    raise ConfigError(
        f"{KEY}: {name} of {type(module).__name__} grows from {base_shape} to {shape}, and nothing"
        " says which of its dimensions are inputs. Take parametrization=standard for this"
        " architecture."
    )
