"""Takes over the state of another run's optimizer of the same kind."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from optrun.base.plain import PlainMapping
from optrun.optimizer.state import load_named_state


def inherit_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: PlainMapping) -> str:
    """Load the state of another run by parameter name, if class and settings fit.

    Otherwise leave the optimizer as it was built.

    Args:
        optimizer: Built with named parameters.
        tensors: As for `load_named_state`; on the meta device, to learn whether they would fit.
        meta: What came with them.

    Returns:
        A clause that says whether the state was taken over, or why not.
    """
    before = meta.get("optimizer")
    now = type(optimizer).__name__
    if before != now:
        return f"anew: the trunk's is of {before}, this one is {now}"
    try:
        load_named_state(optimizer, tensors, meta)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"anew: the trunk's does not fit: {error}"
    return f"the trunk's, by parameter name ({now})"
