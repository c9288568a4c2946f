"""Convert the scalars of a formula to those that step.c and the Triton kernels read."""

from __future__ import annotations

import math

from optrun.base.options import Options, Scalars
from optrun.optimizer.lamb_rule import corrections
from optrun.optimizer.numerics import bias_correction

SCALARS: dict[str, float] = {
    "scale": 0.0,  # factor on the direction: lr, for Adam and Adamax over 1 - beta1^t
    "keep": 1.0,  # factor that decoupled decay leaves of a weight
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 0.0,
    "eps_gradient": 0.0,  # Adamax's, beside |g|
    "eps_denominator": 0.0,  # Adamax's, beside the maximum
    "root": 1.0,  # 1 / sqrt(1 - beta2^t)
    "first": 1.0,  # 1 / (1 - beta1^t) of LAMB and AdEMAMix
    "l1": 0.0,  # coupled decay, as is l2
    "l2": 0.0,
    "decay": 0.0,  # within the direction: of LAMB and Schedule-Free
    "unscale": 1.0,  # 1 / loss scale
    "adapt": 0.0,  # 1 if the trust ratio applies
    "nesterov": 0.0,  # 0 or 1
    "min_norm": 0.0,  # bounds of |w| in the trust ratio
    "max_norm": math.inf,
    "eps_ratio": 0.0,  # beside |r| in the trust ratio
    "min_ratio": 0.0,  # bounds of the trust ratio
    "max_ratio": math.inf,
    "beta3": 0.0,  # decay of AdEMAMix's slow moment
    "alpha": 0.0,  # its weight
    "rate": 0.0,  # Schedule-Free's lr of z
    "mix": 0.0,  # Schedule-Free's share of z in the weights
    "strength": 0.0,  # of MARS's correction
}
"""Fields of `Numbers` in step.c, in its order -> value for a formula that has no such field."""

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""`eps_form` of Adamax -> the field for its eps."""

Row = dict[str, float]
"""A value for each of `SCALARS`, for the tensors that share them."""


def _row_with_betas(options: Options, scalars: Scalars) -> Row:
    """Make a row with the first two betas and `keep`, which most formulas have.

    All other scalars have the value for a formula without them, see `SCALARS`.
    """
    beta1, beta2, *_ = options["betas"]
    return {**SCALARS, "beta1": beta1, "beta2": beta2, "keep": scalars["keep"]}


def adam_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `adam_update._single_tensor_adam`.

    The kernels take g = unscale g + l2 w, update m and v, and then

        w = keep w - scale m / (root sqrt(v) + eps)

    so `scale` has the bias correction of m, and `root` that of v. With `eps_form="mindspore"` eps
    is added to the uncorrected sqrt(v): `root` is 1, and `scale` has both corrections.

    Args:
        options: `betas`, `eps`, and for some classes `nesterov` and `eps_form`.
        scalars: As for that loop.
    """
    beta1, beta2 = options["betas"]
    scale = scalars["lr"] / bias_correction(beta1, scalars["step"])
    root = math.sqrt(bias_correction(beta2, scalars["step"]))  # the row has its inverse
    adds_eps_to_raw = options.get("eps_form") == "mindspore"
    return {
        **_row_with_betas(options, scalars),
        "eps": options["eps"],
        "nesterov": float(options.get("nesterov", False)),
        "scale": scale * root if adds_eps_to_raw else scale,
        "root": 1.0 if adds_eps_to_raw else 1.0 / root,
        "l2": scalars.get("l2", 0.0),
        "unscale": 1.0 / scalars.get("loss_scale", 1.0),
    }


def adamax_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `adamax._single_tensor_adamax`.

    The kernels take g = g + l2 w + l1 sign(w), and then

        u = max(beta2 u + eps, |g| + eps_gradient)
        w = keep w - scale m / (u + eps_denominator)

    One of the three eps is that of the options, by `eps_form`; the others are 0.
    """
    beta1, _ = options["betas"]
    return {
        **_row_with_betas(options, scalars),
        EPS[options["eps_form"]]: options["eps"],
        "scale": scalars["lr"] / bias_correction(beta1, scalars["step"]),
        "l1": scalars["l1"],
        "l2": scalars["l2"],
    }


def lamb_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `lamb._single_tensor_lamb`.

    The kernels take g = g + l2 w + l1 sign(w), update m and v, and then

        r = first m / (root sqrt(v) + eps) + decay w
        w = keep w - scale ratio r

    The ratio is |keep w|, at most `max_norm`, over |r| + `eps_ratio`, within `min_ratio` and
    `max_ratio`; 1 if `adapt` is 0. `first` and `root` are the bias corrections of m and v.
    """
    correction1, correction2, lr_factor = corrections(options, scalars["step"])
    return {
        **_row_with_betas(options, scalars),
        "eps": options["eps"],
        "l1": options["l1"],
        "l2": options["l2"],
        "max_norm": math.inf if options["max_param_norm"] is None else options["max_param_norm"],
        "eps_ratio": options["eps"] if options["eps_in_trust"] else 0.0,
        "min_ratio": options["min_trust"],
        "max_ratio": math.inf if options["max_trust"] is None else options["max_trust"],
        "scale": scalars["lr"] * lr_factor,
        "root": 1.0 / math.sqrt(correction2),
        "first": 1.0 / correction1,
        "decay": scalars["decay"],
        "adapt": float(scalars["adapt"]),
    }


def lion_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `lion._single_tensor_lion`.

    The kernels take w = keep w - scale sign(beta1 m + (1 - beta1) g), and then update m by beta2.
    """
    return {**_row_with_betas(options, scalars), "scale": scalars["lr"]}


def schedule_free_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `_single_tensor_schedule_free`.

    The kernels update v, and then

        d = g / (root sqrt(v) + eps) + decay w
        w = (1 - mix) w + mix z - scale d
        z = z - rate d
    """
    _, beta2 = options["betas"]
    return {
        **SCALARS,
        "beta2": beta2,
        "eps": options["eps"],
        "rate": scalars["lr"],
        "scale": scalars["scale"],
        "root": 1.0 / math.sqrt(bias_correction(beta2, scalars["step"])),
        "mix": scalars["mix"],
        "decay": scalars["decay"],
    }


def ademamix_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `ademamix._single_tensor_ademamix`.

    The kernels update the fast moment m1 by beta1, the slow one m2 by beta3, and v; then

        w = keep w - scale (first m1 + alpha m2) / (root sqrt(v) + eps)
    """
    beta1, beta2, _ = options["betas"]
    return {
        **_row_with_betas(options, scalars),
        "eps": options["eps"],
        "scale": scalars["lr"],
        "root": 1.0 / math.sqrt(bias_correction(beta2, scalars["step"])),
        "first": 1.0 / bias_correction(beta1, scalars["step"]),
        "alpha": scalars["alpha"],
        "beta3": scalars["beta3"],
    }


def mars_row(options: Options, scalars: Scalars) -> Row:
    """Compute the scalars for the kernels of `mars._single_tensor_mars`.

    The kernels take Adam's step on c = ratio (g + strength (g - g')). The ratio is computed as
    LAMB's, |w| over the norm of the direction, within bounds; the direction is here what follows
    `ratio`. With both bounds of |w| at 1, and a largest ratio of 1, c is at most 1 long.

    A tensor that is not `corrected` gets Adam's row, by `betas_1d`; its `adapt` of 0 means c = g.
    """
    if not scalars["corrected"]:
        return adam_row({**options, "betas": options["betas_1d"]}, scalars)
    at_most_1_long = {"adapt": 1.0, "min_norm": 1.0, "max_norm": 1.0, "max_ratio": 1.0}
    return {**adam_row(options, scalars), **at_most_1_long, "strength": scalars["strength"]}


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
