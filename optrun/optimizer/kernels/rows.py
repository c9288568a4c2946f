"""The numbers of each tensor that kernels which go by addresses take.

Those of the loops, made ready.
"""

from __future__ import annotations

import math
from dataclasses import replace

from optrun.optimizer.batches import Batch
from optrun.optimizer.lamb_rule import corrections
from optrun.optimizer.numerics import bias_correction

NUMBERS: dict[str, float] = {
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
"""Fields of `Numbers` in step.c, which says what they are, in its order; and what they are where a
formula has none."""

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""Adamax's eps by the form that says where it is added."""

Rows = list[dict[str, float]]
"""Of each tensor, all of `NUMBERS`."""


def of_adam(batch: Batch) -> Rows:
    """Collect the numbers of `adam_update._single_tensor_adam`."""
    o, (beta1, beta2) = batch.options, batch.options["betas"]
    raw = o.get("eps_form") == "mindspore"
    shared = {
        **NUMBERS,
        "beta1": beta1,
        "beta2": beta2,
        "eps": o["eps"],
        "nesterov": float(o.get("nesterov", False)),
    }
    rows = []
    for x in batch.numbers:
        scale, root = (
            x["lr"] / bias_correction(beta1, x["step"]),
            math.sqrt(bias_correction(beta2, x["step"])),
        )
        row = {
            **shared,
            "scale": scale * root if raw else scale,
            "root": 1.0 if raw else 1.0 / root,
            "keep": x["keep"],
        }
        rows.append({**row, "l2": x.get("l2", 0.0), "unscale": 1.0 / x.get("loss_scale", 1.0)})
    return rows


def of_adamax(batch: Batch) -> Rows:
    """Collect the numbers of `adamax._single_tensor_adamax`."""
    o, (beta1, beta2) = batch.options, batch.options["betas"]
    shared = {**NUMBERS, "beta1": beta1, "beta2": beta2, EPS[o["eps_form"]]: o["eps"]}
    return [
        {
            **shared,
            "scale": x["lr"] / bias_correction(beta1, x["step"]),
            "keep": x["keep"],
            "l1": x["l1"],
            "l2": x["l2"],
        }
        for x in batch.numbers
    ]


def of_lamb(batch: Batch) -> Rows:
    """Collect the numbers of `lamb._single_tensor_lamb` where the kernels compute its options."""
    o, (beta1, beta2) = batch.options, batch.options["betas"]
    shared = {
        **NUMBERS,
        "beta1": beta1,
        "beta2": beta2,
        "eps": o["eps"],
        "l1": o["l1"],
        "l2": o["l2"],
        "max_norm": math.inf if o["max_param_norm"] is None else o["max_param_norm"],
        "eps_ratio": o["eps"] if o["eps_in_trust"] else 0.0,
        "min_ratio": o["min_trust"],
        "max_ratio": math.inf if o["max_trust"] is None else o["max_trust"],
    }
    rows = []
    for x in batch.numbers:
        correction1, correction2, lr_factor = corrections(o, x["step"])
        row = {
            **shared,
            "scale": x["lr"] * lr_factor,
            "keep": x["keep"],
            "root": 1.0 / math.sqrt(correction2),
        }
        rows.append(
            {**row, "first": 1.0 / correction1, "decay": x["decay"], "adapt": float(x["adapt"])}
        )
    return rows


def of_lion(batch: Batch) -> Rows:
    """Collect the numbers of `lion._single_tensor_lion`."""
    beta1, beta2 = batch.options["betas"]
    return [
        {**NUMBERS, "beta1": beta1, "beta2": beta2, "scale": x["lr"], "keep": x["keep"]}
        for x in batch.numbers
    ]


def of_schedule_free(batch: Batch) -> Rows:
    """Collect the numbers of `schedule_free._single_tensor_schedule_free`."""
    (_, beta2), rows = batch.options["betas"], []
    for x in batch.numbers:
        row = {
            **NUMBERS,
            "beta2": beta2,
            "eps": batch.options["eps"],
            "rate": x["lr"],
            "scale": x["scale"],
        }
        root = 1.0 / math.sqrt(bias_correction(beta2, x["step"]))
        rows.append({**row, "root": root, "mix": x["mix"], "decay": x["decay"]})
    return rows


def of_ademamix(batch: Batch) -> Rows:
    """Collect the numbers of `ademamix._single_tensor_ademamix`."""
    (beta1, beta2, _), rows = batch.options["betas"], []
    for x in batch.numbers:
        first, root = (
            1.0 / bias_correction(beta1, x["step"]),
            1.0 / math.sqrt(bias_correction(beta2, x["step"])),
        )
        row = {
            **NUMBERS,
            "beta1": beta1,
            "beta2": beta2,
            "eps": batch.options["eps"],
            "scale": x["lr"],
            "root": root,
        }
        rows.append(
            {**row, "first": first, "keep": x["keep"], "alpha": x["alpha"], "beta3": x["beta3"]}
        )
    return rows


def of_mars(batch: Batch) -> Rows:
    """Collect the numbers of `mars._single_tensor_mars`."""
    plain = of_adam(replace(batch, options={**batch.options, "betas": batch.options["betas_1d"]}))
    clipped = {"adapt": 1.0, "min_norm": 1.0, "max_norm": 1.0, "max_ratio": 1.0}
    return [
        {**row, **clipped, "strength": x["strength"]} if x["corrected"] else other
        for row, other, x in zip(of_adam(batch), plain, batch.numbers, strict=True)
    ]


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
