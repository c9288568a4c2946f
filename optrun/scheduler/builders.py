"""Build the curve of each choice from its configuration, with warm-up and lower bound.

Each builder takes the configuration and a `Span`, the lengths of the run and of its warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from optrun.base.errors import ConfigError
from optrun.config.schema import scheduler as configs
from optrun.config.schema.scheduler import SchedulerConfig
from optrun.scheduler import curves
from optrun.scheduler.curves import Curve

DEFAULT_RATIO = 0.1
"""Share of the run for the warm-up of inverse_sqrt and the decay of wsd if no length is set."""


class Span(NamedTuple):
    """The numbers of optimizer steps that a curve is fitted to, and its lower bound."""

    total: int
    """Steps of the run."""
    warmup: int
    """Steps of the warm-up."""
    after_warmup: int
    """Steps after the warm-up; 1 in a run that ends within its warm-up."""
    final: float
    """`min_lr` as a multiplier of the peak."""


def count_warmup_steps(config: SchedulerConfig, num_training_steps: int) -> int:
    """Count the warm-up steps, from `num_warmup_steps` or else `warmup_ratio`, rounded up.

    With neither key there is no warm-up, but `inverse_sqrt`, which needs one, gets `DEFAULT_RATIO`.

    Example:
        >>> from optrun.config.choice import choice
        >>> config = choice("scheduler", configs.SCHEMAS, "cosine", {"warmup_ratio": 0.1})
        >>> count_warmup_steps(config, 25)
        3
    """
    if config.num_warmup_steps is not None:
        return config.num_warmup_steps
    ratio = config.warmup_ratio
    if ratio is None:
        ratio = DEFAULT_RATIO if isinstance(config, configs.InverseSqrtConfig) else 0.0
    return math.ceil(ratio * num_training_steps)


_TRIAL_INTERVALS = 100
"""Number of equal intervals of a run; a plugin's function is tried at their ends."""


def constant(_config: SchedulerConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=constant`: the peak after a warm-up."""
    return curves.after_warmup(curves.constant, span.warmup)


def linear(_config: configs.LinearConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=linear`: a straight line from the peak to `min_lr`."""
    return curves.after_warmup(
        partial(curves.linear, decay_steps=span.after_warmup, final=span.final), span.warmup
    )


def cosine(config: configs.CosineConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=cosine`: one or more cosines down to `min_lr`.

    They take `decay_steps`, or else all steps after the warm-up.
    """
    body = partial(
        curves.cosine,
        decay_steps=config.decay_steps or span.after_warmup,
        final=span.final,
        num_cycles=config.num_cycles,
        restarts=config.restarts,
        cycle_mult=config.cycle_mult,
        cycle_decay=config.cycle_decay,
    )
    return curves.after_warmup(body, span.warmup)


def polynomial(config: configs.PolynomialConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=polynomial`: a power of the remaining share of the run.

    It reaches `min_lr` after `decay_steps`, or else at the end of the run.
    """
    body = partial(
        curves.polynomial,
        decay_steps=config.decay_steps or span.after_warmup,
        final=span.final,
        power=config.power,
        cycle=config.cycle,
    )
    return curves.after_warmup(body, span.warmup)


def inverse_sqrt(_config: configs.InverseSqrtConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=inverse_sqrt`: 1/sqrt(step) after its warm-up."""
    return curves.floored(
        partial(curves.inverse_sqrt, num_warmup_steps=span.warmup), span.final, since=span.warmup
    )


def noam(config: configs.NoamConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=noam`: the schedule of the Transformer.

    It climbs during its own warm-up, then falls with 1/sqrt(step), but not below `min_lr`.
    """
    return curves.floored(
        partial(curves.noam, num_warmup_steps=span.warmup, d_model=config.d_model),
        span.final,
        since=span.warmup,
    )


def wsd(config: configs.WsdConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=wsd`: warm-up, the peak, then a decay to `min_lr`.

    The decay takes `num_decay_steps`, else `decay_ratio` of the run, else a tenth of it.
    """
    decay_steps = config.num_decay_steps
    if decay_steps is None:
        ratio = DEFAULT_RATIO if config.decay_ratio is None else config.decay_ratio
        decay_steps = math.ceil(ratio * span.total)
    body = partial(
        curves.wsd,
        num_stable_steps=max(span.total - span.warmup - decay_steps, 0),
        num_decay_steps=min(decay_steps, span.after_warmup),
        final=span.final,
        shape=config.decay_shape.value,
    )
    return curves.after_warmup(body, span.warmup)


def step(config: configs.StepConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=step`: a factor every `step_size` steps."""
    body = partial(curves.step, step_size=config.step_size, gamma=config.gamma)
    return curves.after_warmup(curves.floored(body, span.final), span.warmup)


def multistep(config: configs.MultistepConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=multistep`: a factor at each milestone.

    Milestones count from the start of the run. None: after half and three quarters of the steps
    that follow the warm-up.

    Raises:
        ConfigError: A milestone is within the warm-up.
    """
    milestones = config.milestones
    if milestones is None:
        milestones = [span.warmup + math.ceil(share * span.after_warmup) for share in (0.5, 0.75)]
    _refuse_steps_in_warmup("scheduler.milestones", milestones, span.warmup)
    body = partial(
        curves.multistep, milestones=milestones, gamma=config.gamma, boundary=config.boundary.value
    )
    return curves.during_warmup(curves.floored(body, span.final), span.warmup)


def piecewise(config: configs.PiecewiseConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=piecewise`: a list of multipliers.

    Raises:
        ConfigError: A boundary is within the warm-up; or there are no boundaries, and fewer values
            than steps.
    """
    if config.boundaries is not None:
        _refuse_steps_in_warmup("scheduler.boundaries", config.boundaries, span.warmup)
    elif len(config.values) < span.total:
        raise ConfigError(
            f"scheduler.values: {len(config.values)} values for a run of {span.total} steps. "
            "Give one per step, or scheduler.boundaries."
        )
    body = partial(
        curves.piecewise,
        values=config.values,
        boundaries=config.boundaries,
        boundary=config.boundary.value,
    )
    return curves.during_warmup(body, span.warmup)


def exponential(config: configs.ExponentialConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=exponential`: a constant factor per step."""
    return _over_decay_steps(curves.exponential, config, span)


def inverse_time(config: configs.InverseTimeConfig, span: Span) -> Curve:
    """Build the curve of `scheduler=inverse_time`: 1 / (1 + rate * step)."""
    return _over_decay_steps(curves.inverse_time, config, span)


def _over_decay_steps(
    function: Callable[..., float], config: configs.ExponentialConfig, span: Span
) -> Curve:
    """Build a decay curve after the warm-up, never below the final value.

    Without `decay_steps` it decays over all steps after the warm-up.

    Args:
        function: `curves.exponential` or `curves.inverse_time`.
        config: Its configuration.
        span: As for every builder.
    """
    body = partial(
        function,
        decay_rate=config.decay_rate,
        decay_steps=config.decay_steps or span.after_warmup,
        staircase=config.staircase,
    )
    return curves.after_warmup(curves.floored(body, span.final), span.warmup)


def _refuse_steps_in_warmup(key: str, steps: list[int], num_warmup_steps: int) -> None:
    """Refuse steps within the warm-up.

    Args:
        key: Key of the list in the configuration, for the message.
        steps: The list.
        num_warmup_steps: Length of the warm-up; a step of this number is allowed.

    Raises:
        ConfigError: Naming the first such step.
    """
    for at in steps:
        if at < num_warmup_steps:
            raise ConfigError(
                f"{key}={steps}: {at} lies in the warm-up, which lasts until step"
                f" {num_warmup_steps}."
            )


def plugin_curve(function: Callable[..., float], config: SchedulerConfig, span: Span) -> Curve:
    """Build the curve of a plugin's function, after a warm-up and bounded by `min_lr`.

    First the function is called for 101 steps spread evenly over the run, or for every step of a
    shorter run, so that its errors are found before training.

    Args:
        function: (step, config=..., decay_steps=...) -> multiplier of the peak; steps count from
            the end of the warm-up.
        config: Configuration of the plugin's schema.
        span: As for every builder.

    Raises:
        ConfigError: A trial fails, or does not return a finite number of 0 or more.
    """
    body = partial(function, config=config, decay_steps=span.after_warmup)
    last = span.after_warmup - 1
    # A set, since in a run of fewer than 101 steps some are rounded to the same one.
    trial_steps = {round(i * last / _TRIAL_INTERVALS) for i in range(_TRIAL_INTERVALS + 1)}
    for at in sorted(trial_steps):
        call = (
            f"scheduler={config.name}: {getattr(function, '__qualname__', function)} at step {at}"
        )
        try:
            value: Any = body(at)
        except Exception as error:
            raise ConfigError(f"{call}: {type(error).__name__}: {error}") from error
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ConfigError(f"{call} returned {value!r}: expected a finite number of 0 or more.")
    return curves.after_warmup(curves.floored(body, span.final), span.warmup)
