"""Find the last weights of each residual branch, whose output is added to the residual stream.

They are found in one forward pass on the meta device, operation by operation, so no architecture is
listed. Between them and the sum there may be factors and reshapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optrun.base.errors import ConfigError
from optrun.param_groups.order import UseRecorder, record_forward

# Names of aten operations, without the overload.
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
    """Find the last weight of each residual branch in the blocks, and the bias of its module.

    In x + W2 f(W1 x), W2 is the last weight of the branch and x is the residual stream.

    Args:
        model: On any device.
        blocks: Names of the parameters in blocks; the values do not matter.

    Raises:
        ConfigError: The model cannot run on the meta device; no branch is found; or a norm follows
            a branch or the stream itself, which undoes any factor on the branch.
    """
    key = "parametrization.base"
    kind = type(model).__name__
    recorder, reason = record_forward(model, None, _BranchRecorder, "it is no transformers model")
    if recorder is None:
        raise ConfigError(
            f"{key}: optrun cannot find the residual branches of {kind}, because it cannot run a"
            f" forward pass on the meta device ({reason}). Keep the base's number of layers."
        )
    # `ends` are the weights whose output was added to the residual stream. `normed_weight` is one
    # that a norm separates from the stream; None: there is none.
    ends = recorder.ends & blocks.keys()
    problem = ""
    if recorder.normed_weight is not None:
        problem = (
            "a norm, or a choice of experts, lies between a residual branch and the stream"
            f" ({recorder.normed_weight})"
        )
    elif not ends:
        problem = "no residual branch was found"
    if problem:
        raise ConfigError(
            f"{key}: {kind}: {problem}, so its blocks cannot be scaled with depth. Keep the base's"
            " number of layers, and vary widths only."
        )
    biases = {f"{name.rpartition('.')[0]}.bias" for name in ends}
    return ends | (biases & blocks.keys())


@dataclass(frozen=True)
class _Branch:
    """A residual branch, as far as the forward pass has come."""

    last_weights: frozenset[str]
    begin: int
    """Number of the operation that began it."""


class _BranchRecorder(UseRecorder):
    """Follow the output of each matrix through a forward pass, until it is added to the stream.

    In y = x + W2 relu(W1 x) the product with W1 is a branch that ends with W1 so far. relu gives
    neither a branch nor the stream, so W1 is forgotten. The product with W2 is a branch that ends
    with W2. Its sum with x, which is older, is the stream, and W2 is one of `ends`.

    Attributes:
        ends: Names of the weights whose output was added to the residual stream.
        normed_weight: Name of a weight whose branch is normed before or after the sum; None if none
            is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.ends: set[str] = set()
        self.normed_weight: str | None = None
        # All keys are ids of tensors.
        # Output of a matrix -> the branch that ends with it so far.
        self._branch_of: dict[int, _Branch] = {}
        # Sum of stream and branch -> the last weight of the branch.
        self._stream: dict[int, str] = {}
        # Weight, or a view of it -> its name.
        self._weights = {id(param): name for name, param in model.named_parameters()}
        # Paths of the lists of blocks in which a branch was added to a stream.
        self._stacks_with_stream: set[str] = set()
        # Result -> number of the operation that made it, from 1.
        self._order: dict[int, int] = {}
        self._results: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation on shapes, and classify its first result by `_record`."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor):
            # Kept alive, so that no other tensor gets its id; the length numbers the operation.
            self._results.append(first)
            self._order.setdefault(id(first), len(self._results))
            tensors = [leaf for leaf in tree_leaves(args) if torch.is_tensor(leaf)]
            self._record(func.__name__.partition(".")[0], tensors, first)
        return out

    def _record(self, operation: str, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Classify the result of an operation: a weight, a branch, the stream, or none.

        It is recorded in `_weights`, `_branch_of` or `_stream`, by the id of the result. The first
        case that applies decides:

        - A view of a weight, such as its transpose: that weight.
        - A product with a weight: a new branch, whose last weight is this one.
        - A view of an activation, or its product with a number: what the activation is.
        - A sum of two tensors: see `_record_sum`.
        - Any other, such as relu: none, so a branch before it is forgotten.

        Args:
            operation: Name of the aten operation, without the overload.
            tensors: Its tensor arguments.
            out: Its first result.
        """
        activations = [tensor for tensor in tensors if id(tensor) not in self._weights]
        weights = [tensor for tensor in tensors if id(tensor) in self._weights]
        # So that `names[-1]` is the matrix: it has more dimensions than the bias, which precedes it
        # in `addmm` and follows it in `convolution`. Of two matrices it is the right factor.
        weights.sort(key=Tensor.dim)
        names = [self._weights[id(tensor)] for tensor in weights]
        is_single = len(tensors) == 1
        is_view = operation in _SHAPE_OPERATIONS
        is_scaled = operation in _FACTORS and is_single  # the other factor is no tensor
        if is_view and is_single and names:
            self._weights[id(out)] = names[0]
        elif operation in _PRODUCTS and names:
            number = len(self._results)  # of this operation
            self._branch_of[id(out)] = _Branch(frozenset(names[-1:]), begin=number)
        elif activations and (is_view or is_scaled):
            self._record_like(activations[0], out)
        elif operation in ("add", "add_") and len(tensors) == 2:
            self._record_sum(activations, out)

    def _record_like(self, argument: Tensor, out: Tensor) -> None:
        """Record a result as what an argument is: the same branch, the stream, or none."""
        if id(argument) in self._branch_of:
            self._branch_of[id(out)] = self._branch_of[id(argument)]
        if id(argument) in self._stream:
            self._stream[id(out)] = self._stream[id(argument)]

    def _record_sum(self, summands: Sequence[Tensor], out: Tensor) -> None:
        """Classify a sum of two tensors: a branch, the stream, or none.

        - A weight, such as a bias, and another tensor: what the other one is.
        - Two branches: one branch, with the last weights of both.
        - A branch, and the stream or a tensor older than the branch: the stream, see `_record_end`.
        - A branch, and a younger tensor that is not the stream: none. A residual stream is older
          than its branches.
        - The stream, and a tensor that is no branch: none. A norm has hidden the branch, so
          `normed_weight` is set.
        - Any other two: none.

        Args:
            summands: The summands that are no weights.
            out: The sum.
        """
        if len(summands) == 1:  # the other one is a weight
            self._record_like(summands[0], out)
            return
        branches = [self._branch_of[id(term)] for term in summands if id(term) in self._branch_of]
        streams = [self._stream[id(term)] for term in summands if id(term) in self._stream]
        if len(branches) == 2:  # the joined branch began with the earlier one
            first, second = branches
            begin = min(first.begin, second.begin)
            self._branch_of[id(out)] = _Branch(first.last_weights | second.last_weights, begin)
        elif branches:
            (branch,) = branches
            (other,) = (term for term in summands if id(term) not in self._branch_of)
            # 0 for an input of the model, which no operation made.
            is_older = self._order.get(id(other), 0) < branch.begin
            if streams or is_older:
                self._record_end(branch, out, has_stream=bool(streams))
        elif streams:
            self.normed_weight = self.normed_weight or streams[0]  # the first one found stays

    def _record_end(self, branch: _Branch, out: Tensor, *, has_stream: bool) -> None:
        """Record that a branch ends: its sum with the residual stream is the stream, too.

        Its last weights become `ends`. If the other summand is not known as the stream, it begins
        the stream of this list of blocks; but if the list has one already, a norm has hidden it,
        and the branch's weight is the `normed_weight`.

        Args:
            branch: The branch.
            out: The sum.
            has_stream: Whether the other summand is known as the stream.
        """
        last_weight = max(branch.last_weights)  # any one, the same in every process
        stack = re.split(r"\.\d+\.", last_weight)[0]  # the path before the block number
        if not has_stream and stack in self._stacks_with_stream:
            self.normed_weight = self.normed_weight or last_weight
        self._stacks_with_stream.add(stack)
        self.ends |= branch.last_weights
        self._stream[id(out)] = last_weight
