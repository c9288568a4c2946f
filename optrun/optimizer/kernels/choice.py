"""Choose the kernel of a step: the loop, foreach, the compiled one or Triton's.

The loop, in the file of each paper, defines the result; the others equal it but for rounding.
`foreach=True` and `foreach=False` name a kernel themselves. Where `foreach` is None, accelerators
take Triton's or foreach, and a CPU the fastest that computes what the options ask for; the
environment variable `OPTRUN_KERNEL` names one instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Options
from optrun.optimizer.batches import Batch, is_plain
from optrun.optimizer.kernels import library
from optrun.optimizer.kernels.rows import ROWS
from optrun.optimizer.kernels.triton import launch
from optrun.optimizer.kernels.triton.availability import why_unavailable

VARIABLE = "OPTRUN_KERNEL"
NAMES = ("auto", "loop", "foreach", "compiled", "triton")

Update = Callable[[Batch], Tensor | None]
"""Changes a batch in place; returns nothing, or a tensor with an entry for each parameter."""


@dataclass(frozen=True)
class Formula:
    """The update of a paper: the loop, its foreach form, and the name of its faster kernels."""

    loop: Update
    foreach: Update | None = None
    """None: the loop is all there is."""
    name: str = ""
    """Among `ROWS`, which `step.c` and Triton's kernels compute; empty: only what is above."""
    norms: bool = False
    """Whether it takes the norm of a tensor. Then foreach steps shards: one collective for all."""

    def kernels(self, *, sharded: bool) -> tuple[str, ...]:
        """List the kernels to choose from if `foreach` is None, preferred first.

        | formula | kernels |
        | --- | --- |
        | with a `name`, unless it takes norms of shards | triton, compiled, loop |
        | any other, sharded | foreach, with one collective for all norms; loop |
        | any other | loop |

        Args:
            sharded: Whether a tensor has shards on other ranks.
        """
        if self.name and not (self.norms and sharded):
            return ("triton", "compiled", "loop")
        if sharded:
            return ("foreach", "loop")
        return ("loop",)

    def kernel(self, options: Options, device: str, *, sharded: bool = False) -> str:
        """Name the kernel of a step on a type of device; for the rules see `pick`.

        Args:
            options: The option `foreach` counts, as in a group.
            device: Type of the device that the tensors are on.
            sharded: Whether a tensor has shards on other ranks.

        Raises:
            ConfigError: `OPTRUN_KERNEL` names no kernel, or one that is not available.
        """
        if self.foreach is None:
            return "loop"
        return pick(options["foreach"], device, self.kernels(sharded=sharded))

    def step(self, batch: Batch) -> Tensor | None:
        """Step a batch in place by the kernel for its options and device.

        The compiled kernel and Triton's read tensors by address. In their place

        - the loop steps tensors that share memory;
        - if they cannot read some tensor (`is_plain`), foreach steps the batch in place of Triton's
          kernel, and the loop in place of the compiled one.

        Returns:
            LAMB's trust ratios, shape (n,); None for other formulas.
        """
        kernel = self.kernel(batch.options, batch.params[0].device.type, sharded=batch.is_sharded)
        if kernel in ("loop", "foreach"):
            return self.step_by(kernel, batch)
        # The kernel is `compiled` or `triton`. torch's operations count the versions of a tensor,
        # so that autograd refuses a backward pass over weights that have changed since the forward
        # pass; these kernels do not, so it is done here.
        increment_version(batch.params)
        if batch.grad_addresses:  # the plan of the batch has found all tensors readable
            return self.step_by(kernel, batch)
        if batch.shares_memory:
            # A kernel steps tensors in parallel: it must not read where it writes another.
            return self.step_by("loop", batch)
        are_readable = all(
            is_plain(param, grad, states) for param, grad, *states in zip(*batch.lists, strict=True)
        )
        if are_readable:
            return self.step_by(kernel, batch)
        return self.step_by("foreach" if kernel == "triton" else "loop", batch)

    def step_by(self, kernel: str, batch: Batch) -> Tensor | None:
        """Step a batch in place by a kernel, named as in `NAMES`; the loop if there is no foreach.

        The compiled kernel and Triton's are called through a table with the addresses of all
        tensors, which is made at the first call and kept in `batch.tables`.

        Returns:
            LAMB's trust ratios, shape (n,); None for other formulas.
        """
        if kernel == "loop" or self.foreach is None:
            return self.loop(batch)
        if kernel == "foreach":
            return self.foreach(batch)
        table: Any = batch.tables.get(kernel)  # from an earlier step
        if table is None:
            make_table = library.Table if kernel == "compiled" else launch.Table
            table = make_table(self.name, batch.lists)
            batch.tables[kernel] = table
        make_row = ROWS[self.name]  # from the scalars of the optimizer to those of the kernel
        rows = [make_row(batch.options, scalars) for scalars in batch.rows]
        addresses = batch.grad_addresses or [grad.data_ptr() for grad in batch.grads]
        # Only Triton's kernels take the flag.
        flag = {} if batch.found_inf is None else {"found_inf": batch.found_inf}
        ratios: Tensor | None = table.step(addresses, rows, batch.row_of, **flag)
        return ratios


def pick(foreach: bool | None, device: str, kernels: Sequence[str]) -> str:
    """Pick the kernel of a step.

    The first line that applies decides. `OPTRUN_KERNEL` is "auto" if it is not set.

    | `foreach` | `OPTRUN_KERNEL` | on a CPU | on an accelerator |
    | --- | --- | --- | --- |
    | True | any | foreach | foreach |
    | False | any | loop | loop |
    | None | loop or foreach | as it says | as it says |
    | None | auto | fastest | Triton's if it is in `kernels` and works, else foreach |
    | None | triton in `kernels` | triton | triton |
    | None | compiled in `kernels` | compiled | foreach |
    | None | not in `kernels` | foreach if it is preferred, else loop | foreach |

    fastest: the first of `kernels` that is built, but never Triton's.

    Args:
        foreach: The option of that name.
        device: Type of the device that the tensors are on.
        kernels: Kernels that compute the formula, preferred first; foreach computes it in any case.

    Raises:
        ConfigError: `OPTRUN_KERNEL` names no kernel, or one that is not available.

    Example:
        >>> pick(False, "cpu", ("compiled", "loop")), pick(None, "cuda", ("compiled", "loop"))
        ('loop', 'foreach')
    """
    if foreach is not None:
        return "foreach" if foreach else "loop"
    choice = _choice_of_environment(device)
    if choice in ("loop", "foreach"):
        return choice
    if device != "cpu":
        may_be_triton = choice in ("auto", "triton") and "triton" in kernels
        uses_triton = may_be_triton and not why_unavailable(device)  # empty if it works
        return "triton" if uses_triton else "foreach"
    if choice in kernels:
        return choice
    if choice != "auto":
        # `OPTRUN_KERNEL` names a kernel that does not compute this formula.
        return "foreach" if kernels[0] == "foreach" else "loop"
    skipped = {"triton"}  # on a CPU it would be Triton's interpreter, which is slow
    if library.library().loaded is None:
        skipped.add("compiled")
    return next(kernel for kernel in kernels if kernel not in skipped)


def _choice_of_environment(device: str) -> str:
    """Read the kernel in `OPTRUN_KERNEL`; `auto` if it is unset or empty.

    Raises:
        ConfigError: It is no kernel, or one that cannot step tensors on this type of device.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in NAMES:
        raise ConfigError(
            f"{VARIABLE}={choice!r}: expected the name of a kernel. {did_you_mean(choice, NAMES)}"
        )
    if choice == "compiled" and library.library().loaded is None:
        raise ConfigError(
            f"{VARIABLE}=compiled: there is no compiled kernel: {library.library().missing}."
        )
    if choice == "triton" and why_unavailable(device):
        raise ConfigError(
            f"{VARIABLE}=triton: the Triton kernels cannot step tensors on {device}:"
            f" {why_unavailable(device)}."
        )
    return choice
