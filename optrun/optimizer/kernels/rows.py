"""Convert the scalars of a formula to those that step.c and the Triton kernels read."""

from __future__ import annotations

import math

from optrun.base.options import Options, Scalars
from optrun.optimizer.lamb_rule import corrections
from optrun.optimizer.numerics import bias_correction

SCALARS: dict[str, float] = {
    "scale": 0.0,
    "keep": 1.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 0.0,
    "eps_gradient": 0.0,
    "eps_denominator": 0.0,
    "root": 1.0,
    "first": 1.0,
    "l1": 0.0,
    "l2": 0.0,
    "decay": 0.0,
    "unscale": 1.0,
    "adapt": 0.0,
    "nesterov": 0.0,
    "min_norm": 0.0,
    "max_norm": math.inf,
    "eps_ratio": 0.0,
    "min_ratio": 0.0,
    "max_ratio": math.inf,
    "beta3": 0.0,
    "alpha": 0.0,
    "rate": 0.0,
    "mix": 0.0,
    "strength": 0.0,
}
"""Fields of `Numbers` in step.c, which describes them, in its order -> value for a formula that has
no such field."""

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""`eps_form` of Adamax -> the field for its eps."""

Row = dict[str, float]
"""A value for each of `SCALARS`, for the tensors that share them."""


def adam_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `adam_update._single_tensor_adam`."""
    beta1, beta2 = o["betas"]
    scale = x["lr"] / bias_correction(beta1, x["step"])
    root = math.sqrt(bias_correction(beta2, x["step"]))
    adds_eps_to_raw = o.get("eps_form") == "mindspore"
    return {
        **SCALARS,
        "beta1": beta1,
        "beta2": beta2,
        "eps": o["eps"],
        "nesterov": float(o.get("nesterov", False)),
        "scale": scale * root if adds_eps_to_raw else scale,
        "root": 1.0 if adds_eps_to_raw else 1.0 / root,
        "keep": x["keep"],
        "l2": x.get("l2", 0.0),
        "unscale": 1.0 / x.get("loss_scale", 1.0),
    }


def adamax_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `adamax._single_tensor_adamax`."""
    beta1, beta2 = o["betas"]
    return {
        **SCALARS,
        "beta1": beta1,
        "beta2": beta2,
        EPS[o["eps_form"]]: o["eps"],
        "scale": x["lr"] / bias_correction(beta1, x["step"]),
        "keep": x["keep"],
        "l1": x["l1"],
        "l2": x["l2"],
    }


def lamb_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `lamb._single_tensor_lamb`."""
    beta1, beta2 = o["betas"]
    correction1, correction2, lr_factor = corrections(o, x["step"])
    return {
        **SCALARS,
        "beta1": beta1,
        "beta2": beta2,
        "eps": o["eps"],
        "l1": o["l1"],
        "l2": o["l2"],
        "max_norm": math.inf if o["max_param_norm"] is None else o["max_param_norm"],
        "eps_ratio": o["eps"] if o["eps_in_trust"] else 0.0,
        "min_ratio": o["min_trust"],
        "max_ratio": math.inf if o["max_trust"] is None else o["max_trust"],
        "scale": x["lr"] * lr_factor,
        "keep": x["keep"],
        "root": 1.0 / math.sqrt(correction2),
        "first": 1.0 / correction1,
        "decay": x["decay"],
        "adapt": float(x["adapt"]),
    }


def lion_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `lion._single_tensor_lion`."""
    beta1, beta2 = o["betas"]
    return {**SCALARS, "beta1": beta1, "beta2": beta2, "scale": x["lr"], "keep": x["keep"]}


def schedule_free_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `schedule_free._single_tensor_schedule_free`."""
    _, beta2 = o["betas"]
    return {
        **SCALARS,
        "beta2": beta2,
        "eps": o["eps"],
        "rate": x["lr"],
        "scale": x["scale"],
        "root": 1.0 / math.sqrt(bias_correction(beta2, x["step"])),
        "mix": x["mix"],
        "decay": x["decay"],
    }


def ademamix_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `ademamix._single_tensor_ademamix`."""
    beta1, beta2, _ = o["betas"]
    return {
        **SCALARS,
        "beta1": beta1,
        "beta2": beta2,
        "eps": o["eps"],
        "scale": x["lr"],
        "root": 1.0 / math.sqrt(bias_correction(beta2, x["step"])),
        "first": 1.0 / bias_correction(beta1, x["step"]),
        "keep": x["keep"],
        "alpha": x["alpha"],
        "beta3": x["beta3"],
    }


def mars_row(o: Options, x: Scalars) -> Row:
    """Make the row of a tensor stepped by `mars._single_tensor_mars`."""
    if not x["corrected"]:
        return adam_row({**o, "betas": o["betas_1d"]}, x)
    clipped = {"adapt": 1.0, "min_norm": 1.0, "max_norm": 1.0, "max_ratio": 1.0}
    return {**adam_row(o, x), **clipped, "strength": x["strength"]}


ROWS = {
    "adam": adam_row,
    "adamax": adamax_row,
    "lamb": lamb_row,
    "lion": lion_row,
    "schedule_free": schedule_free_row,
    "ademamix": ademamix_row,
    "mars": mars_row,
}
"""Name of a formula -> function from options and scalars to its row; ordered as in step.c."""
