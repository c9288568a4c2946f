"""Load the optimizer state of the run that a fork branches from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from optrun.base.plain import PlainMapping
from optrun.optimizer.state import load_named_state


def inherit_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: PlainMapping) -> str:
    """Load the optimizer state of another run by parameter name, if it fits.

    If the class differs, or `load_named_state` refuses the state, the optimizer is not changed.

    Args:
        optimizer: Built with named parameters.
        tensors: As for `load_named_state`; on the meta device, to find out whether they would fit.
        meta: The dict that belongs to `tensors`, see `named_state`.

    Returns:
        A clause for a message on the state, where the trunk is the other run: "the trunk's, by
        parameter name (Lamb)" if it was loaded; else "anew: ..." with the reason.
    """
    saved_by = meta.get("optimizer")
    class_name = type(optimizer).__name__
    if saved_by != class_name:
        return f"anew: the trunk's is of {saved_by}, this one is {class_name}"
    try:
        load_named_state(optimizer, tensors, meta)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"anew: the trunk's does not fit: {error}"
    return f"the trunk's, by parameter name ({class_name})"
