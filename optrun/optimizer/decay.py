"""Weight decay outside the update.

Which part of itself a weight loses in a step, by whose paper.
"""

from __future__ import annotations

from collections.abc import Collection

from optrun.base.options import Group, ParamGroup

_OF_PEAK = ("scheduled", "corrected")


def decay_scale(group: Group) -> float:
    """Return the factor of a group's weight decay in a step.

    Args:
        group: With `lr`, `weight_decay_mode`, `initial_lr` if a schedule drives it, and `base_lr`
            for "corrected".

    Returns:
        0 where lr is 0: torch's distributed checkpoint makes state by such a step. Else lr for
        "decoupled" (torch, Keras, optax), 1 for "fixed" (pytorch_optimizer's `fixed_decay`),
        lr / peak for "scheduled" (Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2: the
        schedule's multiplier, not the rate; the peak is the group's own, and without a schedule its
        rate), lr^2 / base for "corrected" (timm's
        `corrected_weight_decay`, after Defazio 2025, arXiv:2506.02285; the base is the optimizer's
        own rate, for groups with another rate too).

    Example:
        >>> group = {"lr": 0.1, "initial_lr": 0.4, "base_lr": 0.8}
        >>> modes = ("decoupled", "fixed", "scheduled", "corrected")
        >>> [decay_scale({**group, "weight_decay_mode": mode}) for mode in modes]
        [0.1, 1.0, 0.25, 0.0125]
    """
    mode = group["weight_decay_mode"]
    lr = float(group["lr"])
    if not lr:
        return 0.0
    if mode == "fixed":
        return 1.0
    if mode == "decoupled":
        return lr
    peak = float(group["base_lr"] if mode == "corrected" else group.get("initial_lr", lr))
    of_peak = lr / peak if peak else 1.0
    if mode == "scheduled":
        return of_peak
    return lr * of_peak


def keep_base_lr(group: ParamGroup, functions: Collection[str], base_lr: float) -> None:
    """Note the base rate in a group if its decay needs it; refuse a rate without a known peak.

    Args:
        group: A parameter group; a `base_lr` that it has, of a loaded state, stays.
        functions: Its options that are functions of the step.
        base_lr: The optimizer's own rate.

    Raises:
        ValueError: Naming the mode and what to do.
    """
    mode = group["weight_decay_mode"]
    if mode in _OF_PEAK and "lr" in functions:
        raise ValueError(
            f"weight_decay_mode={mode!r}: goes by the rate's peak, which a function of the step"
            " does not tell. Give lr as a number and drive it with build_scheduler."
        )
    if mode == "corrected":
        group.setdefault("base_lr", base_lr)
