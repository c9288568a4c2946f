"""The numbers that kernels which go by addresses take: those of the loops, made ready."""

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
"""Fields of `Scalars` in step.c, which says what they are, in its order; and what they are where a
formula has none."""

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""Adamax's eps by the form that says where it is added."""

Row = dict[str, float]
"""All of `SCALARS` of one tensor, or of several that share them."""


def of_adam(o: Options, x: Scalars) -> Row:
    """Return the numbers of `adam_update._single_tensor_adam`."""
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


def of_adamax(o: Options, x: Scalars) -> Row:
    """Return the numbers of `adamax._single_tensor_adamax`."""
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


def of_lamb(o: Options, x: Scalars) -> Row:
    """Return the numbers of `lamb._single_tensor_lamb`."""
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


def of_lion(o: Options, x: Scalars) -> Row:
    """Return the numbers of `lion._single_tensor_lion`."""
    beta1, beta2 = o["betas"]
    return {**SCALARS, "beta1": beta1, "beta2": beta2, "scale": x["lr"], "keep": x["keep"]}


def of_schedule_free(o: Options, x: Scalars) -> Row:
    """Return the numbers of `schedule_free._single_tensor_schedule_free`."""
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


def of_ademamix(o: Options, x: Scalars) -> Row:
    """Return the numbers of `ademamix._single_tensor_ademamix`."""
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


def of_mars(o: Options, x: Scalars) -> Row:
    """Return the numbers of `mars._single_tensor_mars`."""
    if not x["corrected"]:
        return of_adam({**o, "betas": o["betas_1d"]}, x)
    clipped = {"adapt": 1.0, "min_norm": 1.0, "max_norm": 1.0, "max_ratio": 1.0}
    return {**of_adam(o, x), **clipped, "strength": x["strength"]}


ROWS = {
    "adam": of_adam,
    "adamax": of_adamax,
    "lamb": of_lamb,
    "lion": of_lion,
    "schedule_free": of_schedule_free,
    "ademamix": of_ademamix,
    "mars": of_mars,
}
"""By the names of the formulas, in the order of `updates` in step.c."""
