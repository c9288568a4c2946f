"""muP: scale the lr, weight decay and eps of each parameter from the base to a larger model.

Every rule is one number per parameter, folded into its group, so that schedules, clipping and
checkpoints stay as they are. Sources: Yang et al. 2022, arXiv:2203.03466, Table 8; for LAMB and
Muon the spectral condition of Yang, Simon & Bernstein 2023, arXiv:2310.17813; for depth and eps Dey
et al. 2025, arXiv:2505.01618. The coordinate check (`optrun certify transfer`) holds all of them to
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Group, Options, ParamGroup
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.parametrization import MupConfig, ParametrizationConfig, TransferDecay
from optrun.config.schema.run import RunConfig
from optrun.optimizer.build import build_optimizer, choice_of
from optrun.param_groups import build_param_groups
from optrun.param_groups.growth import Growth


def _adam(size: Growth, options: Options) -> float:
    """Return the factor on lr of an optimizer whose updates have entries of the size of lr.

    1/fan_in, times the factor of a residual branch for the matrix at its end.
    """
    del options
    return size.carried / size.fan_in


def _sgd(size: Growth, options: Options) -> float:
    """Return the factor on lr of an optimizer whose updates are proportional to the gradient.

    Entries of a gradient scale with 1/fan_out and, within a residual branch, with its factor.
    """
    del options
    return size.fan_out / size.fan_in * size.carried**2 / size.branch


def _lamb(size: Growth, options: Options) -> float:
    """Return the factor on lr of an optimizer whose updates have the norm of the weight times lr.

    1/sqrt(fan_in) for a hidden matrix, 1 for the others: a matrix has the norm width_init
    sqrt(fan_in fan_out), and may move by sqrt(fan_out / fan_in). A parameter that is not adapted
    has Adam's factor.
    """
    if options["adapted"]:
        return 1 / (size.fan_in * size.width_init)
    return _adam(size, options)


def _muon(size: Growth, options: Options) -> float:
    """Return the factor on lr of Muon, for a spectral norm of sqrt(fan_out / fan_in).

    Muon's own adjustment by shape (`adjust_lr_fn`) is divided out. A vector has Adam's factor.
    """
    if len(size.shape) < 2:
        return _adam(size, options)
    spectral = math.sqrt(size.fan_out / size.fan_in) * size.carried
    if "adjust_lr_fn" not in options:  # a plugin's Muon, which steps all shapes alike
        return spectral
    of_base = _adjustment(size.base_shape, options["adjust_lr_fn"])
    of_model = _adjustment(size.shape, options["adjust_lr_fn"])
    return spectral * of_base / of_model


def _adjustment(shape: tuple[int, ...], form: str | None) -> float:
    """Return the factor on lr of torch's Muon for a shape; `form`: `adjust_lr_fn`."""
    rows, columns = shape[:2]
    if form == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


RULES: dict[str, Callable[[Growth, Options], float]] = {
    "adam": _adam,
    "sgd": _sgd,
    "lamb": _lamb,
    "muon": _muon,
}
"""Name in `transfer` of a schema -> function from a growth and options to the factor on lr.

`adam` is right for signs (Lion), too, and for all updates whose entries have the size of lr."""

_DECAYS_BY_LR = {"decoupled": 1, "fixed": 0, "scheduled": 0, "corrected": 2}
"""Form of decoupled decay -> the power of a group's lr in it; see `decay_scale`."""


def build_run_groups(
    config: RunConfig,
    model: nn.Module,
    sizes: Mapping[str, Growth],
    *,
    notes: list[str],
    started: Sequence[Group] = (),
) -> list[ParamGroup]:
    """Build the parameter groups of a run, scaled by muP if it is configured.

    Args:
        config: The whole configuration.
        model: The model; parameters that a rule freezes get `requires_grad=False`.
        sizes: As for `transfer_groups`.
        notes: Gets what the user should know about the groups.
        started: Groups of the checkpoint to resume from.
    """
    groups = build_param_groups(
        model,
        config.param_groups,
        lr=config.lr,
        weight_decay=getattr(config.optimizer, "weight_decay", None),
        loraplus_lr_ratio=getattr(config.adapter, "loraplus_lr_ratio", None),
        started=started,
        notes=notes,
    )
    return transfer_groups(
        groups, sizes, config.optimizer, config.parametrization, lr=config.lr, notes=notes
    )


def transfer_groups(
    groups: Sequence[Group],
    sizes: Mapping[str, Growth],
    config: OptimizerConfig,
    parametrization: ParametrizationConfig,
    *,
    lr: float,
    notes: list[str] | None = None,
) -> list[ParamGroup]:
    """Multiply lr, weight decay and eps of groups by the muP factors of their parameters.

    An `lr_scale` that a group has already, by layer or by rule, is multiplied.

    Args:
        groups: Groups from `build_param_groups`; not changed.
        sizes: How each parameter grew, see `growth_of`; empty: copies of the groups are returned.
        config: Configuration of the run's optimizer.
        parametrization: Configuration of the run; under `standard` copies are returned, too.
        lr: Base learning rate.
        notes: Gets one line for each kind of parameter, with its growth and its factors.

    Returns:
        Groups, divided if their parameters have different factors; the text of `rule` has the
        factors.

    Raises:
        ConfigError: An optimizer whose schema names no rule, or an option that no rule can scale.
    """
    if not sizes or not isinstance(parametrization, MupConfig):
        return [dict(group) for group in groups]
    keeps_decay = parametrization.weight_decay is TransferDecay.independent
    steppers = _rules_and_options(build_optimizer(config, groups, lr=lr), choice_of(config))
    scaled: list[ParamGroup] = []
    counts: dict[str, int] = {}
    for group in groups:
        by_factors: dict[str, ParamGroup] = {}
        for name, param in group["params"]:
            rule, options = steppers[name]
            size = sizes[name]
            if size.logits != 1 and options["adapted"] and name.endswith("bias"):
                raise ConfigError(
                    f"parametrization=mup: {name} scales the logits of a tied head and begins at"
                    " zero, where a trust ratio is 1 whatever its scale. Leave it unadapted:"
                    " optimizer.always_adapt=false param_groups=standard; or give"
                    " model.config.tie_word_embeddings=false."
                )
            factors = _factors(size, rule, options, keeps_decay=keeps_decay)
            text = _in_words(size, rule, factors)
            if text not in by_factors:
                by_factors[text] = _scaled_group(group, options, factors)
                reason = f"{group.get('rule', '')}; mup: {text}"
                by_factors[text]["rule"] = reason.removeprefix("; ")
            by_factors[text]["params"].append((name, param))
            counts[text] = counts.get(text, 0) + 1
        scaled += by_factors.values()
    if notes is not None:
        for text, count in counts.items():
            notes.append(f"parametrization={parametrization.name}: {count} x {text}")
    return scaled


class _Factors(NamedTuple):
    """Factors on options of a parameter's group."""

    lr: float
    decay: float = 1.0
    eps: float = 1.0


def _factors(size: Growth, rule: str, options: Options, *, keeps_decay: bool) -> _Factors:
    """Compute the factors of a parameter.

    Args:
        size: How it grew.
        rule: Key of `RULES`.
        options: Options in force for it, see `_rules_and_options`.
        keeps_decay: Whether a step is to take the same share of a weight as in the base.
    """
    lr = RULES[rule](size, options)
    factors = _Factors(lr)
    if keeps_decay and options.get("weight_decay"):
        factors = factors._replace(decay=_decay(size, options, rule, lr))
    if rule in ("adam", "lamb") and isinstance(options.get("eps"), float):
        factors = factors._replace(eps=_eps(size))
    return factors


def _scaled_group(group: Group, options: Options, factors: _Factors) -> ParamGroup:
    """Copy a group without its parameters, and multiply its options by factors.

    Args:
        group: The group. Its `lr` is scaled if it has one, `lr_scale` unless its lr is absolute.
        options: Options in force for it, which it may lack.
        factors: The factors; of decay and eps those that are not 1.
    """
    scaled: ParamGroup = {**group, "params": []}
    if "lr" in group:
        scaled["lr"] = group["lr"] * factors.lr
    if "lr_scale" in group or "lr" not in group:
        scaled["lr_scale"] = group.get("lr_scale", 1.0) * factors.lr
    if factors.decay != 1:
        scaled["weight_decay"] = options["weight_decay"] * factors.decay
    if factors.eps != 1:
        scaled["eps"] = options["eps"] * factors.eps
    return scaled


def _rules_and_options(optimizer: Optimizer, choice: str) -> dict[str, tuple[str, Options]]:
    """Map each parameter name to the muP rule of its optimizer and the options of its group.

    `adapted` is added to the options: whether LAMB's trust ratio scales the parameter's update.

    Args:
        optimizer: Built over the groups of the run.
        choice: The optimizer of groups that name none.

    Raises:
        ConfigError: See `_rule_of` and `_refuse_options`.
    """
    steppers: dict[str, tuple[str, Options]] = {}
    for group in optimizer.param_groups:
        choice_of_group = str(group.get("optimizer", choice))
        member = getattr(optimizer, "members", {}).get(choice_of_group, optimizer)
        rule = _rule_of(choice_of_group)
        _refuse_options(choice_of_group, rule, group)
        for name in group["param_names"]:
            adapted = rule == "lamb"
            if hasattr(member, "adapted"):
                adapted = bool(member.adapted(name, group))
            steppers[name] = rule, {**group, "adapted": adapted}
    return steppers


def _rule_of(choice: str) -> str:
    """Return the muP rule in `transfer` of an optimizer's schema.

    Raises:
        ConfigError: It names none, or one that is not in `RULES`.
    """
    rule = SCHEMAS[choice].transfer
    if rule is None:
        with_rule = [name for name, schema in SCHEMAS.items() if schema.transfer is not None]
        raise ConfigError(
            f"parametrization=mup: optimizer={choice} has no rule that scales its lr with the"
            f" width. Take one of {', '.join(with_rule)}; an optimizer of your own names its rule"
            " in its schema (transfer)."
        )
    if rule not in RULES:
        raise ConfigError(
            f"optimizer={choice}: transfer={rule!r}: no such rule. {did_you_mean(rule, RULES)}"
        )
    return rule


def _refuse_options(choice: str, rule: str, group: Options) -> None:
    """Refuse options with a best value for one width only, and no rule to scale them.

    These are LAMB's bounds and its L1 and L2, and a coupled weight decay of Adam.

    Raises:
        ConfigError: Naming the key and the value to give.
    """
    bounds = {"max_param_norm": None, "min_trust": 0.0, "max_trust": None}
    neutral = {**bounds, "l1": 0.0, "l2": 0.0} if rule == "lamb" else {}
    for key, value in neutral.items():
        if group.get(key, value) != value:
            text = "null" if value is None else str(value)
            raise ConfigError(
                f"parametrization=mup: optimizer.{key}={group[key]} is a size that holds at one"
                f" width alone. Give optimizer.{key}={text}."
            )
    coupled = SCHEMAS[choice].COUPLED_DECAY or group.get("weight_decay_mode") in ("l1", "l2")
    if rule == "adam" and group["weight_decay"] and coupled:
        raise ConfigError(
            f"parametrization=mup: the weight decay of optimizer={choice} is part of the gradient,"
            " and no rule carries it to another width. Give optimizer.weight_decay=0, or take"
            " adamw."
        )


def _decay(size: Growth, options: Options, rule: str, scale: float) -> float:
    """Return the factor on weight decay with which a step takes the same share of a weight.

    It is the inverse of `scale`, the factor on lr, to the power of lr in the decay.
    """
    mode = options.get("weight_decay_mode", "decoupled")
    if rule == "lamb" and mode == "adapted":
        # Within the trust ratio it counts by the size of the weight.
        if options["adapted"]:
            return 1 / (scale * size.init)
        return 1 / scale
    return float(scale ** -_DECAYS_BY_LR.get(mode, 1))


def _eps(size: Growth) -> float:
    """Return the factor on eps with which it keeps its size relative to the gradient.

    Entries of a gradient scale with 1/fan_out and, within a residual branch, with its factor.
    """
    return size.branch / size.carried / size.fan_out


def _in_words(size: Growth, rule: str, factors: _Factors) -> str:
    """Describe how a parameter grew, its rule, and those of its factors that are not 1."""
    grown = []
    if size.fan_in != 1:
        grown.append(f"in x{size.fan_in:g}")
    if size.fan_out != 1:
        grown.append(f"out x{size.fan_out:g}")
    if size.branch != 1:
        grown.append(f"depth x{1 / size.branch:g}")
    if size.ends_branch:
        grown.append("ends a branch")
    if size.logits != 1:
        grown.append(f"carries logits x{size.logits:.4g}")
    named = {"init": size.init, **factors._asdict()}
    changed = [f"{key} x{value:.4g}" for key, value in named.items() if value != 1]
    growth = f" ({', '.join(grown)})" if grown else ""
    return f"{size.kind}{growth}, {rule}: {', '.join(changed) or 'as in the base'}"
