"""Find the last weights of each residual branch, whose output is added to the residual stream.

They are found in one forward pass over shapes, operation by operation, so no architecture is
listed. Between them and the sum there may be factors and reshapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optrun.base.errors import ConfigError
from optrun.param_groups.order import Watch, first_watch

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution"}
_SHAPE_OPERATIONS = {
    "view",
    "_unsafe_view",
    "reshape",
    "t",
    "transpose",
    "permute",
    "expand",
    "clone",
    "detach",
    "alias",
}
_SHAPE_OPERATIONS |= {"_to_copy", "native_dropout", "unsqueeze", "squeeze", "contiguous", "flatten"}
_FACTORS = {"mul", "div"}


def branch_ends(model: nn.Module, blocks: Mapping[str, float]) -> set[str]:
    """Name the last weight of each residual branch in the blocks, and the bias beside it.

    Args:
        model: On any device.
        blocks: Names of the parameters in blocks; the values do not matter.

    Raises:
        ConfigError: The model cannot run on shapes; no branch is found; or a norm stands between a
            branch and the stream, or on the stream itself, which undoes any factor on the branch.
    """
    key = "parametrization.base"
    kind = type(model).__name__
    watch, why = first_watch(model, None, _Branches, "it is no model of transformers")
    if watch is None:
        raise ConfigError(
            f"{key}: the residual branches of {kind} are not found, since no forward pass over"
            f" shapes can be made ({why}). Keep the base's number of layers."
        )
    ends = watch.ends & blocks.keys()
    reason = ""
    if watch.normed is not None:
        reason = (
            "a norm, or a choice of experts, stands between a branch and the residual stream"
            f" ({watch.normed})"
        )
    elif not ends:
        reason = "no residual branches are found"
    if reason:
        raise ConfigError(
            f"{key}: {kind}: {reason}, so its blocks cannot be scaled with depth. Keep the base's"
            " number of layers, and vary widths alone."
        )
    biases = {f"{name.rpartition('.')[0]}.bias" for name in ends}
    return ends | (biases & blocks.keys())


class _Branches(Watch):
    """Follow the output of each matrix through a forward pass, until it is added to the stream.

    Attributes:
        ends: Names of the weights whose output was added to the residual stream.
        normed: Name of a weight whose branch is normed before or after the sum; None if none is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.ends: set[str] = set()
        self.normed: str | None = None
        # All keys are ids of tensors.
        # Output of a matrix -> the names of its weights, and when the branch began.
        self._made_by: dict[int, tuple[frozenset[str], int]] = {}
        # Sum of stream and branch -> the last weight of the branch.
        self._stream: dict[int, str] = {}
        # Weight, or a view of it -> its name.
        self._weights = {id(param): name for name, param in model.named_parameters()}
        # Names of towers, without block numbers, in which a branch was added to a stream.
        self._towers: set[str] = set()
        # Result -> its number in the order of operations.
        self._order: dict[int, int] = {}
        self._results: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation on shapes, and note the origin of its first result."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor):
            self._results.append(first)  # so that no other tensor gets its id
            self._order.setdefault(id(first), len(self._results))
            tensors = [leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf)]
            self._note(func.__name__.partition(".")[0], tensors, first)
        return out

    def _note(self, operation: str, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Note whether the first result of an operation is a weight, a branch or the stream.

        Args:
            operation: Name of the aten operation, without the overload.
            tensors: Its tensor arguments.
            out: Its first result.
        """
        activations = [tensor for tensor in tensors if id(tensor) not in self._weights]
        names = [self._weights[id(tensor)] for tensor in tensors if id(tensor) in self._weights]
        if operation in _SHAPE_OPERATIONS and len(tensors) == 1 and names:
            self._weights[id(out)] = names[0]
        elif operation in _PRODUCTS and names:
            self._made_by[id(out)] = frozenset(names[-1:]), len(self._results)
        elif activations and (
            operation in _SHAPE_OPERATIONS or (operation in _FACTORS and len(tensors) == 1)
        ):
            self._pass_on(activations[0], out)
        elif operation in ("add", "add_") and len(tensors) == 2:
            self._sum(activations, out)

    def _pass_on(self, before: Tensor, out: Tensor) -> None:
        """Note that a result is the same branch or stream as an argument."""
        if id(before) in self._made_by:
            self._made_by[id(out)] = self._made_by[id(before)]
        if id(before) in self._stream:
            self._stream[id(out)] = self._stream[id(before)]

    def _sum(self, summands: Sequence[Tensor], out: Tensor) -> None:
        """Note the kind of a sum: output plus bias, two branches, or branch plus stream.

        The stream was computed before the branch began. A branch whose stream is unknown begins
        one; if its tower has a stream already, a norm has hidden that.

        Args:
            summands: The summands that are no weights.
            out: The sum.
        """
        sources = [self._made_by.get(id(tensor)) for tensor in summands]
        branches = [source for source in sources if source is not None]
        streams = [self._stream[id(tensor)] for tensor in summands if id(tensor) in self._stream]
        if len(summands) == 1:
            self._pass_on(summands[0], out)
        elif len(branches) == 2:
            first, second = branches
            self._made_by[id(out)] = first[0] | second[0], min(first[1], second[1])
        elif branches and (streams or self._is_older(sources, summands, branches[0][1])):
            last = max(branches[0][0])
            tower = re.split(r"\.\d+\.", last)[0]
            if not streams and tower in self._towers:
                self.normed = self.normed or last
            self._towers.add(tower)
            self.ends |= branches[0][0]
            self._stream[id(out)] = last
        elif streams and not branches:
            self.normed = self.normed or streams[0]

    def _is_older(
        self, sources: Sequence[object], summands: Sequence[Tensor], branch_begin: int
    ) -> bool:
        """Tell whether the summand beside a branch was computed before the branch began."""
        beside = summands[1] if sources[0] is not None else summands[0]
        return self._order.get(id(beside), 0) < branch_begin
