"""The papers' functions by the compiled kernel; arguments as in the loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.kernels import rows
from optrun.optimizer.kernels.library import call


def adam(*lists: list[Tensor], **given: Any) -> None:
    """Step as `adam_update._single_tensor_adam`."""
    call("adam", lists, rows.of_adam(**given))


def adamax(*lists: list[Tensor], **given: Any) -> None:
    """Step as `adamax._single_tensor_adamax`."""
    call("adamax", lists, rows.of_adamax(**given))


def lamb(*lists: list[Tensor], **given: Any) -> Tensor:
    """Step as `lamb._single_tensor_lamb` if `lamb.ways` says that it can."""
    return torch.tensor(call("lamb", lists, rows.of_lamb(**given)), dtype=lists[0][0].dtype)
