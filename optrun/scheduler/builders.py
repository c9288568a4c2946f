"""The curve of each choice from its configuration: body, warm-up and floor put together.

Every builder takes the configuration, the optimizer steps of the whole run, and `min_lr` as a multiplier of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from optrun.base.errors import ConfigError
from optrun.config.schema import scheduler as configs
from optrun.config.schema.scheduler import SchedulerConfig
from optrun.scheduler import curves
from optrun.scheduler.curves import Curve

DEFAULT_RATIO = 0.1
"""Share of the run where a curve needs a stretch (the climb of inverse_sqrt, the way down of wsd) and none is given."""


def num_warmup_steps_of(config: SchedulerConfig, num_training_steps: int) -> int:
    """Count the steps of the climb, whichever way it was given.

    Example:
        >>> from optrun.config.choice import choice
        >>> num_warmup_steps_of(choice("scheduler", configs.SCHEMAS, "cosine", {"warmup_ratio": 0.1}), 25)
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


_TRIED = 100
"""Steps at which a registered function is tried."""


def constant(config: SchedulerConfig, total: int, _unused: float) -> Curve:
    """Build the curve of `scheduler=constant`."""
    return curves.after_warmup(curves.constant, num_warmup_steps_of(config, total))


def linear(config: configs.LinearConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=linear`."""
    climb = num_warmup_steps_of(config, total)
    return curves.after_warmup(partial(curves.linear, decay_steps=_rest(total, climb), final=final), climb)


def cosine(config: configs.CosineConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=cosine`."""
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


def polynomial(config: configs.PolynomialConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=polynomial`."""
    climb = num_warmup_steps_of(config, total)
    body = partial(
        curves.polynomial,
        decay_steps=config.decay_steps or _rest(total, climb),
        final=final,
        power=config.power,
        cycle=config.cycle,
    )
    return curves.after_warmup(body, climb)


def inverse_sqrt(config: configs.InverseSqrtConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=inverse_sqrt`."""
    climb = num_warmup_steps_of(config, total)
    return curves.floored(partial(curves.inverse_sqrt, num_warmup_steps=climb), final, since=climb)


def noam(config: configs.NoamConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=noam`."""
    climb = num_warmup_steps_of(config, total)
    return curves.floored(partial(curves.noam, num_warmup_steps=climb, d_model=config.d_model), final, since=climb)


def wsd(config: configs.WsdConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=wsd`."""
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


def step(config: configs.StepConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=step`."""
    body = partial(curves.step, step_size=config.step_size, gamma=config.gamma)
    return curves.after_warmup(curves.floored(body, final), num_warmup_steps_of(config, total))


def multistep(config: configs.MultistepConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=multistep`."""
    climb = num_warmup_steps_of(config, total)
    milestones = config.milestones
    if milestones is None:
        milestones = [climb + math.ceil(share * _rest(total, climb)) for share in (0.5, 0.75)]
    _not_in_warmup("scheduler.milestones", milestones, climb)
    body = partial(curves.multistep, milestones=milestones, gamma=config.gamma, boundary=config.boundary.value)
    return curves.during_warmup(curves.floored(body, final), climb)


def piecewise(config: configs.PiecewiseConfig, total: int, _unused: float) -> Curve:
    """Build the curve of `scheduler=piecewise`."""
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


def exponential(config: configs.ExponentialConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=exponential`."""
    return _over_decay_steps(curves.exponential, config, total, final)


def inverse_time(config: configs.InverseTimeConfig, total: int, final: float) -> Curve:
    """Build the curve of `scheduler=inverse_time`."""
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
    """Count the steps behind the warm-up; 1 in a run that ends within it, so that the climb has its peak."""
    return max(total - climb, 1)


def _not_in_warmup(key: str, steps: list[int], climb: int) -> None:
    early = [at for at in steps if at < climb]
    if early:
        raise ConfigError(f"{key}={steps}: {early[0]} lies in the warm-up, which lasts until step {climb}.")


def registered(function: Callable[..., float], config: SchedulerConfig, total: int, final: float) -> Curve:
    """Build the curve of a function that was registered, between the warm-up and `min_lr`.

    Args:
        function: (step, config=..., decay_steps=...) -> multiplier of the peak; steps from the end of the warm-up.
        config: With the fields of its schema.
        total: As for every builder.
        final: As for every builder.

    Raises:
        ConfigError: It fails, or returns what is no finite number of 0 or more.
    """
    climb = num_warmup_steps_of(config, total)
    rest = _rest(total, climb)
    body = partial(function, config=config, decay_steps=rest)
    for at in sorted({round(index * (rest - 1) / _TRIED) for index in range(_TRIED + 1)}):
        said = f"scheduler={config.name}: {getattr(function, '__qualname__', function)} at step {at}"
        try:
            value: Any = body(at)
        except Exception as error:
            raise ConfigError(f"{said}: {type(error).__name__}: {error}") from error
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ConfigError(f"{said} returned {value!r}: expected a finite number of 0 or more.")
    return curves.after_warmup(curves.floored(body, final), climb)
