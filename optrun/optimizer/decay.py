"""Decoupled weight decay: the share of a weight that is lost in a step, by whose definition."""

from __future__ import annotations

from collections.abc import Collection

from optrun.base.options import Group, ParamGroup


def decay_scale(group: Group) -> float:
    """Return the factor on a group's weight decay in a step, by its `weight_decay_mode`.

    | mode | factor | source |
    | --- | --- | --- |
    | "decoupled" | lr | torch, Keras, optax |
    | "fixed" | 1 | pytorch_optimizer's `fixed_decay` |
    | "scheduled" | lr / peak | Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2 |
    | "corrected" | lr^2 / base | timm's `corrected_weight_decay`, Defazio 2025, arXiv:2506.02285 |

    peak is the `initial_lr` of the group, its lr if no schedule has set one. base is the lr of the
    optimizer (`base_lr`), even for a group with another lr. If lr is 0, so is the factor in every
    mode: torch's distributed checkpoint creates state by such a step.

    Args:
        group: With `lr`, `weight_decay_mode`, and `initial_lr` and `base_lr` as above.

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
    reference_lr = float(group["base_lr"] if mode == "corrected" else group.get("initial_lr", lr))
    multiplier = lr / reference_lr if reference_lr else 1.0
    if mode == "scheduled":
        return multiplier
    return lr * multiplier


def keep_base_lr(group: ParamGroup, functions: Collection[str], base_lr: float) -> None:
    """Store the optimizer's lr in a group under `base_lr`, if its "corrected" decay needs it.

    Args:
        group: A parameter group; a `base_lr` from a loaded state stays.
        functions: Its options that are functions of the step.
        base_lr: The lr of the optimizer.

    Raises:
        ValueError: The mode is "scheduled" or "corrected" and lr is a function of the step, whose
            highest value is not known.
    """
    mode = group["weight_decay_mode"]
    if mode in ("scheduled", "corrected") and "lr" in functions:
        raise ValueError(
            f"weight_decay_mode={mode!r}: needs the peak lr, which is not known of a function of"
            " the step. Give lr as a number and drive it with build_scheduler."
        )
    if mode == "corrected":
        group.setdefault("base_lr", base_lr)
