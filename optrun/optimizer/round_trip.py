"""Check that the state of a plugin's or another library's optimizer survives a checkpoint.

Done once, over small copies of the parameters, before the optimizer trains a model.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.base.errors import ConfigError, first_line
from optrun.base.options import Group, ParamGroup
from optrun.optimizer.evaluation_weights import evaluation_weights
from optrun.optimizer.state import load_named_state, named_state

Build = Callable[[list[ParamGroup]], Optimizer]

_SAVED_AT = 11
"""Step after which the state is saved. Some optimizers move nothing before the tenth."""
_LAST = 24
"""Step after which the two copies are compared."""

_LONGEST_SIDE = 12
"""Longest side of a small copy of a parameter."""


class SmallCopy:
    """An optimizer over small copies of parameters, stepped on gradients of a fixed seed.

    Seeds the generators of torch, Python and NumPy.

    Args:
        build: Builds the optimizer over groups.
        groups: Groups of the run; each parameter is replaced by a small random one.
    """

    def __init__(self, build: Build, groups: Sequence[Group]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.optimizer = build([_small_group(group, index) for index, group in enumerate(groups)])
        self.params: dict[str, Tensor] = {}
        for group in self.optimizer.param_groups:
            self.params |= zip(group["param_names"], group["params"], strict=True)

    def steps(self, first: int, last: int) -> None:
        """Take the steps with the numbers `first` to `last - 1`.

        Each gradient is the weights plus noise, drawn from the number of the step.

        Raises:
            ConfigError: The optimizer changed the lr of a group.
        """
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for param in self.params.values():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad = noise.to(param.dtype) + param.detach()
            before = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.optimizer.step()
            if [float(group["lr"]) for group in self.optimizer.param_groups] != before:
                raise ConfigError(
                    "it sets the learning rate itself: lr and the schedule of this run would be"
                    " ignored"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and state tensors by name; references, not copies."""
        return {**self.params, **named_state(self.optimizer)[0]}


def build_checked(
    build: Build, groups: Sequence[Group], *, key: str, owner: str, hint: str
) -> Optimizer:
    """Build an optimizer, and check on a small copy that its state survives a checkpoint.

    Args:
        build: Builds the optimizer over groups of (name, parameter) pairs.
        groups: Groups of the run; the small copies have their keys and kinds of parameters.
        key: The override that chose the optimizer, such as `optimizer=mine`; begins a message.
        owner: Name of its class in messages.
        hint: Last sentence of a message: what to do.

    Raises:
        ConfigError: Building or stepping it raises any error, it sets lr itself, or it differs
            after its state was saved and loaded.
    """
    try:
        optimizer = build([dict(group) for group in groups])
        check_round_trip(build, groups)
    except Exception as error:  # code of others may raise anything
        message = f"{key}: {owner} cannot be used here: {_reason(error)}. {hint}"
        raise ConfigError(message) from error
    return optimizer


def check_round_trip(build: Build, groups: Sequence[Group]) -> None:
    """Save the state of a small copy after 11 steps, load it into a second one, and compare.

    Both take 13 more steps, from the same random states, and have to be equal bit by bit. Global
    random generators are restored. Optimizers of one class behave alike, so of groups and
    parameters of one kind one is tried, see `one_group_per_kind`.

    Raises:
        ConfigError: Weights, state or counters differ; the message names the first tensor.
    """
    kinds = one_group_per_kind(groups)
    with preserved_random_states():
        first = SmallCopy(build, kinds)
        first.steps(0, _SAVED_AT)
        second = _resume_in_second_copy(first, build, kinds)
        # An optimizer may draw random numbers: both copies draw the same ones.
        restore = _remember_random_states()
        first.steps(_SAVED_AT, _LAST)
        restore()
        second.steps(_SAVED_AT, _LAST)
        difference = _first_difference(first, second)
    if difference is not None:
        raise ConfigError(
            f"its state does not survive a checkpoint: {difference} differs after a resume"
        )


def one_group_per_kind(groups: Sequence[Group]) -> list[Group]:
    """Select one group of each kind, and in it one parameter of each number of dimensions.

    Groups of a kind have the same keys, the same `optimizer`, a weight decay in all or none of
    them, and parameters of the same numbers of dimensions. The first of a kind is selected.

    Example:
        >>> matrices = [("a", torch.zeros(2, 2)), ("b", torch.zeros(2, 2))]
        >>> groups = [{"params": matrices}, {"params": matrices}, {"params": matrices, "lr": 0.1}]
        >>> [[name for name, _ in group["params"]] for group in one_group_per_kind(groups)]
        [['a'], ['a']]
    """
    selected: dict[object, Group] = {}
    for group in groups:
        pair_by_dims: dict[int, tuple[str, Tensor]] = {}
        # Reversed, so that the first parameter of each number of dimensions is the one to stay.
        for name, param in reversed(list(group["params"])):
            pair_by_dims[param.dim()] = (name, param)
        kind = (
            frozenset(group),
            bool(group.get("weight_decay")),
            frozenset(pair_by_dims),
            group.get("optimizer"),
        )
        selected.setdefault(kind, {**group, "params": list(pair_by_dims.values())})
    return list(selected.values())


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Run a block with gradients and without warnings, then restore the random generators.

    Those are of torch on the CPU, of Python and of NumPy; generators of GPUs are not restored.
    """
    restore = _remember_random_states()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        restore()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal bit by bit, in dtype and in shape; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one_bytes, other_bytes = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)
    )
    return torch.equal(one_bytes, other_bytes)


def _small_group(group: Group, index: int) -> ParamGroup:
    """Copy a group, with a small random parameter on the CPU in place of each parameter.

    Side `dim` is cut to 12 - dim, so that sides differ and a transposed state is noticed. Names get
    the index of the group in front.
    """
    pairs = []
    for name, param in group["params"]:
        shape = [min(side, _LONGEST_SIDE - dim) for dim, side in enumerate(param.shape)]
        pairs.append((f"{index}.{name}", Parameter(0.02 * torch.randn(shape, dtype=param.dtype))))
    return {**group, "params": pairs}


def _resume_in_second_copy(first: SmallCopy, build: Build, groups: Sequence[Group]) -> SmallCopy:
    """Build a second copy with the weights and the state of the first, as a resumed run does.

    What is no tensor goes through JSON. Random generators are restored.
    """
    restore = _remember_random_states()
    with evaluation_weights(first.optimizer):  # which a checkpoint of the model holds
        weights = {name: param.detach().clone() for name, param in first.params.items()}
    tensors, meta = named_state(first.optimizer)
    saved = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    second = SmallCopy(build, groups)  # seeds the generators
    with torch.no_grad():
        for name, param in second.params.items():
            param.copy_(weights[name])
    load_named_state(second.optimizer, saved, json.loads(json.dumps(meta)))
    restore()
    return second


def _remember_random_states() -> Callable[[], None]:
    """Return a function to restore the current states of the random generators.

    Those of torch on the CPU, of Python and of NumPy; not those of GPUs.
    """
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    of_numpy = np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return restore


def _first_difference(first: SmallCopy, second: SmallCopy) -> str | None:
    """Name the first tensor that differs, else "what it counts"; None if all is equal.

    The latter stands for any other state, such as counters.
    """
    first_tensors = first.tensors()
    second_tensors = second.tensors()
    for name in sorted(first_tensors.keys() | second_tensors.keys()):
        if name not in first_tensors or name not in second_tensors:
            return name
        if not same_bits(first_tensors[name], second_tensors[name]):
            return name
    # The dict beside the tensors, with all else of the state.
    counters_agree = named_state(first.optimizer)[1] == named_state(second.optimizer)[1]
    if counters_agree:
        return None
    return "what it counts"


def _reason(error: Exception) -> str:
    """Describe an error in one line without a period; a ConfigError by its message alone."""
    if isinstance(error, ConfigError):
        return str(error).rstrip(".")
    parts = ("it fails", type(error).__name__, first_line(error))
    return ": ".join(filter(None, parts))
