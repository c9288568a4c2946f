"""Configuration -> scheduler: the table of curves, and how warm-up, floor and groups come together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from torch.optim import Optimizer

from optrun.config.choice import choice
from optrun.config.schema import scheduler as configs
from optrun.config.schema.scheduler import SCHEMAS, FloorConfig, PlateauConfig, SchedulerConfig, WeightDecayCurve
from optrun.errors import ConfigError
from optrun.scheduler import curves
from optrun.scheduler.curves import Curve
from optrun.scheduler.plateau import Plateau
from optrun.scheduler.scheduler import GroupSchedule, Scheduler

DEFAULT_RATIO = 0.1
"""Share of the run where a curve needs a stretch (the climb of inverse_sqrt, the way down of wsd) and none is given."""


def build_scheduler(
    optimizer: Optimizer,
    config_or_name: SchedulerConfig | str | Curve,
    *,
    num_training_steps: int,
    **options: Any,
) -> Scheduler:
    """A scheduler that sets every group's learning rate from step to step.

    A group may carry `schedule`, the name of a choice or a mapping with `name` and its keys, and then follows that.

    Args:
        optimizer: Any torch optimizer; its groups keep the ratios of their lr.
        config_or_name: A configuration, the name of a choice, or a function `global_step -> multiplier` of your own.
        num_training_steps: Optimizer steps of the whole run.
        **options: Beside a name: keys of that choice, such as `num_warmup_steps=100`.

    Returns:
        The scheduler, with the lr for step 0 set; call `step()` after each optimizer step. It is a torch LRScheduler;
        with a function of your own it can be pickled if that can.

    Raises:
        ConfigError: Unknown choice or key, a value out of range, or one that does not fit the run.
        TypeError: Arguments of another kind, or options beside a configuration or a function.
        ValueError: `num_training_steps` below 1, or a group whose lr is a function of the step already.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = build_scheduler(optimizer, "linear", num_training_steps=4, num_warmup_steps=2)
        >>> lrs = []
        >>> for _ in range(4):
        ...     lrs.append(optimizer.param_groups[0]["lr"])
        ...     scheduler.step()
        >>> lrs
        [0.0, 0.05, 0.1, 0.05]
    """
    _check_arguments(optimizer, num_training_steps)
    if callable(config_or_name) and not isinstance(config_or_name, str):
        if options:
            raise TypeError(f"scheduler: {sorted(options)} stand beside a function of your own; put them into it.")
        name = getattr(config_or_name, "__name__", type(config_or_name).__name__)
        return Scheduler(optimizer, partial(_own_function, curve=config_or_name), name=name)
    config = choice("scheduler", SCHEMAS, config_or_name, options)
    base_lr = _base_lr(optimizer.param_groups)
    follow = partial(_schedule_of_group, config=config, num_training_steps=num_training_steps, base_lr=base_lr)
    return Scheduler(optimizer, follow, name=config.name)


def _own_function(_group: Mapping[str, Any], *, curve: Curve) -> GroupSchedule:
    return GroupSchedule(lr=curve)


def _schedule_of_group(
    group: Mapping[str, Any], *, config: SchedulerConfig, num_training_steps: int, base_lr: float
) -> GroupSchedule:
    """What a group follows, by its own key `schedule` or by the run's configuration."""
    own = config_of_group(group, config)
    return GroupSchedule(
        lr=build_curve(own, num_training_steps=num_training_steps, lr=base_lr),
        weight_decay=_weight_decay_curve(config, num_training_steps),
        plateau=_plateau(own, base_lr),
    )


def _check_arguments(optimizer: Any, num_training_steps: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r}: expected a torch optimizer, got {type(optimizer).__name__}. "
            "It comes first: build_scheduler(optimizer, name, num_training_steps=...)."
        )
    if isinstance(num_training_steps, bool) or not isinstance(num_training_steps, numbers.Integral):
        kind = type(num_training_steps).__name__
        raise TypeError(f"num_training_steps={num_training_steps!r}: expected a whole number, 1 or more, got {kind}.")
    if int(num_training_steps) < 1:
        raise ValueError(f"num_training_steps={num_training_steps}: expected a whole number, 1 or more.")


def build_curve(config: SchedulerConfig, *, num_training_steps: int, lr: float) -> Curve:
    """The multiplier of a configuration, warm-up and floor included.

    Args:
        config: Any scheduler configuration; the curve of `plateau` is its warm-up.
        num_training_steps: Optimizer steps of the whole run.
        lr: Peak, by which the absolute `min_lr` becomes a multiplier.

    Returns:
        `global_step -> multiplier`.

    Raises:
        ConfigError: A value that does not fit the run or the peak.

    Example:
        >>> config = choice("scheduler", SCHEMAS, "linear", {"num_warmup_steps": 2})
        >>> curve = build_curve(config, num_training_steps=4, lr=0.1)
        >>> [curve(global_step) for global_step in range(4)]
        [0.0, 0.5, 1.0, 0.5]
    """
    return _BUILDERS[type(config)](config, num_training_steps, _final(config, lr))


def warmup_note(config: SchedulerConfig, num_training_steps: int) -> str | None:
    """A sentence where the run ends on the climb: the lr that was asked for is never reached; else None.

    Example:
        >>> config = choice("scheduler", SCHEMAS, "cosine", {"num_warmup_steps": 10})
        >>> warmup_note(config, 100) is None
        True
        >>> warmup_note(config, 5).split(":")[1]
        ' scheduler.num_warmup_steps=10 and the run has 5 steps'
    """
    climb = config.num_warmup_steps
    if climb is None or climb < num_training_steps:
        return None
    return (
        f"warning: scheduler.num_warmup_steps={climb} and the run has {num_training_steps} steps: lr never reaches its "
        "peak. scheduler.warmup_ratio=0.1 fits any length"
    )


def num_warmup_steps_of(config: SchedulerConfig, num_training_steps: int) -> int:
    """Length of the climb in steps, whichever way it was given.

    Example:
        >>> num_warmup_steps_of(choice("scheduler", SCHEMAS, "cosine", {"warmup_ratio": 0.1}), 25)
        3
    """
    if config.num_warmup_steps is not None:
        return config.num_warmup_steps
    ratio = config.warmup_ratio
    if ratio is None:
        if not isinstance(config, configs.InverseSqrtConfig):
            return 0
        ratio = DEFAULT_RATIO
    return math.ceil(ratio * num_training_steps)


def _base_lr(groups: list[dict[str, Any]]) -> float:
    """Peak of a group of scale 1, as far as the groups tell."""
    peaks = [(float(group.get("initial_lr", group["lr"])), group.get("lr_scale")) for group in groups]
    scaled = [peak / float(scale) for peak, scale in peaks if scale]
    return max(scaled or [peak for peak, _ in peaks])


def _final(config: SchedulerConfig, lr: float) -> float:
    """`min_lr` as a multiplier."""
    if not isinstance(config, FloorConfig) or config.min_lr == 0:
        return 0.0
    if config.min_lr > lr:
        raise ConfigError(f"scheduler.min_lr={config.min_lr}: expected at most the peak, lr={lr}.")
    return config.min_lr / lr


def config_of_group(group: Mapping[str, Any], default: SchedulerConfig) -> SchedulerConfig:
    """What a group follows: a schedule of its own, or the run's.

    Raises:
        ConfigError: A schedule that is none.
    """
    own = group.get("schedule")
    if own is None:
        return default
    if isinstance(own, str):
        own = {"name": own}
    if not isinstance(own, Mapping) or not isinstance(own.get("name"), str):
        raise ConfigError(
            f"schedule={own}: expected the name of a schedule, or a mapping with `name` and its keys, "
            "such as {name: constant, num_warmup_steps: 100}."
        )
    options = {str(key): value for key, value in own.items() if key != "name"}
    config: SchedulerConfig = choice("scheduler", SCHEMAS, own["name"], options)
    if config.weight_decay_curve is not None:
        raise ConfigError("schedule.weight_decay_curve: weight decay has one curve for the run; set it in `scheduler`.")
    return config


def _plateau(config: SchedulerConfig, lr: float) -> Plateau | None:
    if not isinstance(config, PlateauConfig):
        return None
    return Plateau(
        mode=config.mode.value,
        factor=config.factor,
        patience=config.patience,
        threshold=config.threshold,
        threshold_mode=config.threshold_mode.value,
        cooldown=config.cooldown,
        final=_final(config, lr),
        metric=config.metric,
    )


def _weight_decay_curve(config: SchedulerConfig, num_training_steps: int) -> Curve | Literal["lr"] | None:
    if config.weight_decay_curve is None:
        return None
    if config.weight_decay_curve is WeightDecayCurve.lr:
        return "lr"
    shape = curves.linear if config.weight_decay_curve is WeightDecayCurve.linear else curves.cosine
    assert config.weight_decay_final_ratio is not None
    return partial(shape, decay_steps=num_training_steps, final=config.weight_decay_final_ratio)


Builder: TypeAlias = Callable[[Any, int, float], Curve]
"""(configuration, num_training_steps, final) -> curve."""


def _constant(config: SchedulerConfig, total: int, _unused: float) -> Curve:
    return curves.after_warmup(curves.constant, num_warmup_steps_of(config, total))


def _linear(config: configs.LinearConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    return curves.after_warmup(partial(curves.linear, decay_steps=_rest(total, climb), final=final), climb)


def _cosine(config: configs.CosineConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    body = partial(
        curves.cosine,
        decay_steps=config.decay_steps or _rest(total, climb),
        final=final,
        num_cycles=config.num_cycles,
        restarts=config.restarts,
        cycle_mult=config.cycle_mult,
        cycle_decay=config.cycle_decay,
    )
    return curves.after_warmup(body, climb)


def _polynomial(config: configs.PolynomialConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    body = partial(
        curves.polynomial,
        decay_steps=config.decay_steps or _rest(total, climb),
        final=final,
        power=config.power,
        cycle=config.cycle,
    )
    return curves.after_warmup(body, climb)


def _inverse_sqrt(config: configs.InverseSqrtConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    return curves.floored(partial(curves.inverse_sqrt, num_warmup_steps=climb), final, since=climb)


def _noam(config: configs.NoamConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    return curves.floored(partial(curves.noam, num_warmup_steps=climb, d_model=config.d_model), final, since=climb)


def _wsd(config: configs.WsdConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    decay = config.num_decay_steps
    if decay is None:
        decay = math.ceil((config.decay_ratio if config.decay_ratio is not None else DEFAULT_RATIO) * total)
    body = partial(
        curves.wsd,
        num_stable_steps=max(total - climb - decay, 0),
        num_decay_steps=min(decay, _rest(total, climb)),
        final=final,
        shape=config.decay_shape.value,
    )
    return curves.after_warmup(body, climb)


def _step(config: configs.StepConfig, total: int, final: float) -> Curve:
    body = partial(curves.step, step_size=config.step_size, gamma=config.gamma)
    return curves.after_warmup(curves.floored(body, final), num_warmup_steps_of(config, total))


def _multistep(config: configs.MultistepConfig, total: int, final: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    milestones = config.milestones
    if milestones is None:
        milestones = [climb + math.ceil(share * _rest(total, climb)) for share in (0.5, 0.75)]
    _not_in_warmup("scheduler.milestones", milestones, climb)
    body = partial(curves.multistep, milestones=milestones, gamma=config.gamma, boundary=config.boundary.value)
    return curves.during_warmup(curves.floored(body, final), climb)


def _piecewise(config: configs.PiecewiseConfig, total: int, _unused: float) -> Curve:
    climb = num_warmup_steps_of(config, total)
    if config.boundaries is not None:
        _not_in_warmup("scheduler.boundaries", config.boundaries, climb)
    elif len(config.values) < total:
        raise ConfigError(
            f"scheduler.values: {len(config.values)} values for a run of {total} steps. "
            "Give one per step, or scheduler.boundaries."
        )
    body = partial(curves.piecewise, values=config.values, boundaries=config.boundaries, boundary=config.boundary.value)
    return curves.during_warmup(body, climb)


def _exponential(config: configs.ExponentialConfig, total: int, final: float) -> Curve:
    return _over_decay_steps(curves.exponential, config, total, final)


def _inverse_time(config: configs.InverseTimeConfig, total: int, final: float) -> Curve:
    return _over_decay_steps(curves.inverse_time, config, total, final)


def _over_decay_steps(
    function: Callable[..., float], config: configs.ExponentialConfig, total: int, final: float
) -> Curve:
    climb = num_warmup_steps_of(config, total)
    body = partial(
        function,
        decay_rate=config.decay_rate,
        decay_steps=config.decay_steps or _rest(total, climb),
        staircase=config.staircase,
    )
    return curves.after_warmup(curves.floored(body, final), climb)


def _rest(total: int, climb: int) -> int:
    """Steps of the run that lie behind the warm-up; 1 in a run that ends within it, so that the climb has its peak."""
    return max(total - climb, 1)


def _not_in_warmup(key: str, steps: list[int], climb: int) -> None:
    early = [at for at in steps if at < climb]
    if early:
        raise ConfigError(f"{key}={steps}: {early[0]} lies in the warm-up, which lasts until step {climb}.")


_BUILDERS: dict[type[SchedulerConfig], Builder] = {
    configs.ConstantConfig: _constant,
    configs.LinearConfig: _linear,
    configs.CosineConfig: _cosine,
    configs.PolynomialConfig: _polynomial,
    configs.InverseSqrtConfig: _inverse_sqrt,
    configs.WsdConfig: _wsd,
    configs.NoamConfig: _noam,
    configs.StepConfig: _step,
    configs.MultistepConfig: _multistep,
    configs.PiecewiseConfig: _piecewise,
    configs.ExponentialConfig: _exponential,
    configs.InverseTimeConfig: _inverse_time,
    configs.PlateauConfig: _constant,
}
