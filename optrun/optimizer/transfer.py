"""muP: scale the lr, weight decay and eps of each parameter from the base to a larger model.

Every rule is one number per parameter, folded into its group, so that schedules, clipping and
checkpoints stay as they are. Sources: Yang et al. 2022, arXiv:2203.03466, Table 8; for LAMB and
Muon the spectral condition of Yang, Simon & Bernstein 2023, arXiv:2310.17813; for depth and eps Dey
et al. 2025, arXiv:2505.01618. The coordinate check (`optrun certify transfer`) holds all of them to
it.
"""

from __future__ import annotations

import math
from collections import Counter
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


def _adam_lr_factor(size: Growth, options: Options) -> float:
    """Return the factor on lr if the entries of an update have the size of lr, as Adam's.

    It is 1/fan_in: an output is a sum over fan_in entries, which the update changes all in the same
    direction. The matrix at the end of a residual branch has the factor of the branch, too
    (`carried`, 1 elsewhere). A hidden matrix four times as wide and high has 1/4.
    """
    del options
    return size.carried / size.fan_in


def _sgd_lr_factor(size: Growth, options: Options) -> float:
    """Return the factor on lr if an update is proportional to the gradient, as SGD's.

    Entries of a gradient scale with branch / (carried fan_out), see `_eps_factor`. The factor is
    Adam's, carried / fan_in, divided by that. A hidden matrix four times as wide and high has 1, a
    head that reads four times as many inputs 1/4.
    """
    del options
    # (carried / fan_in) / (branch / (carried fan_out))
    return size.fan_out / size.fan_in * size.carried**2 / size.branch


def _lamb_lr_factor(size: Growth, options: Options) -> float:
    """Return the factor on lr if an update has the norm of the weight times lr, as LAMB's.

    The norm of a matrix grows with width_init sqrt(fan_in fan_out), where width_init is the factor
    on its initial standard deviation, see `Growth.width_init`; and its update may grow with
    sqrt(fan_out / fan_in). The factor is the second over the first, 1 / (fan_in width_init). That
    is 1/sqrt(fan_in) for a hidden matrix, 1 for others. A parameter that is not adapted, which
    takes a step without the trust ratio, has Adam's factor.
    """
    if options["adapted"]:
        return 1 / (size.fan_in * size.width_init)
    return _adam_lr_factor(size, options)


def _muon_lr_factor(size: Growth, options: Options) -> float:
    """Return the factor on lr of Muon, for updates of spectral norm sqrt(fan_out / fan_in).

    torch's Muon scales the lr by shape itself (`adjust_lr_fn`), which is divided out. A vector,
    which a companion steps, has Adam's factor.
    """
    if len(size.shape) < 2:
        return _adam_lr_factor(size, options)
    spectral = math.sqrt(size.fan_out / size.fan_in) * size.carried
    if "adjust_lr_fn" not in options:  # a plugin's Muon, which steps all shapes alike
        return spectral
    factor_in_base = _muon_shape_factor(size.base_shape, options["adjust_lr_fn"])
    factor_in_model = _muon_shape_factor(size.shape, options["adjust_lr_fn"])
    return spectral * factor_in_base / factor_in_model


def _muon_shape_factor(shape: tuple[int, ...], form: str | None) -> float:
    """Return the factor of torch's Muon on lr for a shape; `form`: `adjust_lr_fn`."""
    rows, columns = shape[:2]
    if form == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


RULES: dict[str, Callable[[Growth, Options], float]] = {
    "adam": _adam_lr_factor,
    "sgd": _sgd_lr_factor,
    "lamb": _lamb_lr_factor,
    "muon": _muon_lr_factor,
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
    """Return groups with lr, weight decay and eps times the muP factors of their parameters.

    A group whose parameters have different factors is divided. An `lr_scale` that it has already,
    by layer or by rule, is multiplied with the factor.

    Args:
        groups: Groups from `build_param_groups`; not changed.
        sizes: How each parameter grew, see `growth_of`; empty: the groups are only copied.
        config: Configuration of the run's optimizer.
        parametrization: Configuration of the run; under `standard` the groups are only copied.
        lr: Base learning rate.
        notes: A list to append to: one line for each kind of parameter, with its count, growth and
            factors.

    Returns:
        The groups; their `rule` describes the factors.

    Raises:
        ConfigError: The schema of an optimizer names no rule; or an option cannot be scaled.
    """
    if not sizes or not isinstance(parametrization, MupConfig):
        return [dict(group) for group in groups]
    # Whether the share of a weight that a step decays stays as in the base, whatever the lr.
    keeps_decay = parametrization.weight_decay is TransferDecay.independent
    # Parameter name -> (rule, options in force). An optimizer is built only to know the options.
    rules_and_options = _rules_and_options(
        build_optimizer(config, groups, lr=lr), choice_of(config)
    )
    scaled: list[ParamGroup] = []
    counts = Counter[str]()
    for group in groups:
        # Divide the group by the descriptions of its parameters, such as "hidden matrix (in x4,
        # out x4), adam: init x0.5, lr x0.25": parameters with one description have equal factors.
        by_description: dict[str, ParamGroup] = {}
        for name, param in group["params"]:
            rule, options = rules_and_options[name]
            size = sizes[name]
            if size.logits != 1 and options["adapted"]:
                _refuse_adapted_bias(name)
            factors = _compute_factors(size, rule, options, keeps_decay=keeps_decay)
            description = _describe_factors(size, rule, factors)
            if description not in by_description:
                scaled_group = _scaled_group(group, options, factors)
                reason = f"{group.get('rule', '')}; mup: {description}"
                scaled_group["rule"] = reason.removeprefix("; ")  # of a group without a rule
                by_description[description] = scaled_group
            by_description[description]["params"].append((name, param))
            counts[description] += 1
        scaled += by_description.values()
    if notes is not None:
        for description, count in counts.items():
            notes.append(f"parametrization={parametrization.name}: {count} x {description}")
    return scaled


class _Factors(NamedTuple):
    """Factors on options of a parameter's group."""

    lr: float
    decay: float
    eps: float


def _compute_factors(size: Growth, rule: str, options: Options, *, keeps_decay: bool) -> _Factors:
    """Compute the factors on lr, weight decay and eps of a parameter.

    The factor on eps is 1 unless the rule is "adam" or "lamb" and eps is a number.

    Args:
        size: How the parameter grew.
        rule: Key of `RULES`.
        options: Options in force for it, see `_rules_and_options`.
        keeps_decay: Whether a step decays a weight by the same share as in the base; else the
            factor on decay is 1.
    """
    lr = RULES[rule](size, options)
    decay = 1.0
    if keeps_decay and options.get("weight_decay"):
        decay = _decay_factor(size, options, rule, lr)
    eps = 1.0
    if rule in ("adam", "lamb") and isinstance(options.get("eps"), float):
        eps = _eps_factor(size)
    return _Factors(lr, decay, eps)


def _refuse_adapted_bias(name: str) -> None:
    """Refuse an adapted bias that scales logits, since at zero its trust ratio is always 1.

    Does nothing for other parameters. To be called only for adapted parameters that scale logits.

    Raises:
        ConfigError: With the options that avoid it.
    """
    if name.endswith("bias"):
        raise ConfigError(
            f"parametrization=mup: {name} scales the logits of a tied head and begins at zero,"
            " where a trust ratio is 1 whatever its scale. Leave it unadapted:"
            " optimizer.always_adapt=false param_groups=standard; or give"
            " model.config.tie_word_embeddings=false."
        )


def _scaled_group(group: Group, options: Options, factors: _Factors) -> ParamGroup:
    """Copy a group without its parameters, and multiply its options by factors.

    `lr` and `lr_scale` are both scaled if the group has both: `lr` is its current lr, and
    `lr_scale` its ratio to the lr that `set_lr` sets later. A group with neither gets `lr_scale`.
    `weight_decay` and `eps` are set only if their factor is not 1.

    Args:
        group: The group, which may leave options to the optimizer.
        options: All options in force for it.
        factors: The factors.
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

    The options get an entry `adapted`: whether a trust ratio scales the parameter's update. The
    optimizer's method `adapted` decides. For an optimizer without that method, such as a plugin's,
    it is true under LAMB's rule and false under any other.

    Args:
        optimizer: Built over the groups of the run.
        choice: The optimizer of groups that name none.

    Raises:
        ConfigError: See `_rule_of` and `_refuse_options`.
    """
    by_name: dict[str, tuple[str, Options]] = {}
    for group in optimizer.param_groups:
        choice_of_group = str(group.get("optimizer", choice))
        member = getattr(optimizer, "members", {}).get(choice_of_group, optimizer)
        rule = _rule_of(choice_of_group)
        _refuse_options(choice_of_group, rule, group)
        for name in group["param_names"]:
            adapted = rule == "lamb"
            if hasattr(member, "adapted"):
                adapted = bool(member.adapted(name, group))
            by_name[name] = rule, {**group, "adapted": adapted}
    return by_name


def _rule_of(choice: str) -> str:
    """Return the muP rule of an optimizer, a key of `RULES`, from `transfer` of its schema.

    Raises:
        ConfigError: The schema names no rule, or an unknown one.
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
            f"optimizer={choice}: transfer={rule!r} is no rule. {did_you_mean(rule, RULES)}"
        )
    return rule


def _refuse_options(choice: str, rule: str, group: Options) -> None:
    """Refuse options with another best value at each width and no rule to scale them.

    For the rule "lamb" these are its bounds and its `l1` and `l2`; for "adam" a coupled weight
    decay.

    Raises:
        ConfigError: Naming the key and the value to give.
    """
    no_effect: dict[str, float | None] = {
        "max_param_norm": None,
        "min_trust": 0.0,
        "max_trust": None,
        "l1": 0.0,
        "l2": 0.0,
    }
    for key, value in no_effect.items():
        if rule == "lamb" and group.get(key, value) != value:
            text = "null" if value is None else str(value)
            raise ConfigError(
                f"parametrization=mup: the best optimizer.{key}={group[key]} depends on the width,"
                f" and no rule scales it. Give optimizer.{key}={text}."
            )
    coupled = SCHEMAS[choice].COUPLED_DECAY or group.get("weight_decay_mode") in ("l1", "l2")
    if rule == "adam" and group["weight_decay"] and coupled:
        raise ConfigError(
            f"parametrization=mup: the weight decay of optimizer={choice} is part of the gradient,"
            " and no rule scales it with the width. Give optimizer.weight_decay=0, or take"
            " optimizer=adamw."
        )


def _decay_factor(size: Growth, options: Options, rule: str, lr_factor: float) -> float:
    """Return the factor on weight decay, so that a step decays the same share of a weight.

    Decay is proportional to a power of lr that depends on its mode, so the factor is `lr_factor` to
    minus that power: where an lr_factor of 1/4 multiplies the decoupled decay lr * weight_decay,
    weight_decay takes the factor 4. Within LAMB's trust ratio the decay also grows with the
    weights, whose initial size is `Growth.init` times that in the base; this is divided out.

    Args:
        size: How the parameter grew.
        options: Options in force for it, see `_rules_and_options`.
        rule: Key of `RULES`.
        lr_factor: The factor on lr by that rule.
    """
    mode = options.get("weight_decay_mode", "decoupled")
    if rule == "lamb" and mode == "adapted":
        if options["adapted"]:
            return 1 / (lr_factor * size.init)
        return 1 / lr_factor
    return float(lr_factor ** -_DECAYS_BY_LR.get(mode, 1))  # other modes: proportional to lr


def _eps_factor(size: Growth) -> float:
    """Return the factor on eps to keep its size relative to the gradient.

    Entries of a gradient scale with 1/fan_out, and within a residual branch with its factor
    `branch`. At the end of a branch that factor is `carried` by the weight, and divided out.
    """
    return size.branch / size.carried / size.fan_out


def _describe_factors(size: Growth, rule: str, factors: _Factors) -> str:
    """Describe how a parameter grew, its rule, and its factors.

    Growths and factors of 1 are left out; "as in the base" if all factors are 1. Such as "hidden
    matrix (in x4, out x4), adam: init x0.5, lr x0.25, decay x4".
    """
    growths = []
    if size.fan_in != 1:
        growths.append(f"in x{size.fan_in:g}")
    if size.fan_out != 1:
        growths.append(f"out x{size.fan_out:g}")
    if size.branch != 1:
        growths.append(f"depth x{1 / size.branch:g}")
    if size.ends_branch:
        growths.append("ends a branch")
    if size.logits != 1:
        growths.append(f"carries logits x{size.logits:.4g}")
    factor_by_name = {"init": size.init, **factors._asdict()}
    changed = [f"{key} x{value:.4g}" for key, value in factor_by_name.items() if value != 1]
    growth = f" ({', '.join(growths)})" if growths else ""
    return f"{size.kind}{growth}, {rule}: {', '.join(changed) or 'as in the base'}"
