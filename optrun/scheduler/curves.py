"""Every schedule as a function of the step: `global_step -> multiplier` of the peak learning rate.

Steps are optimizer steps and count from 0; the step that is about to be made asks for its own
value. Nothing here knows an optimizer or a tensor. `final` is where a curve ends, as a share of the
peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

Curve: TypeAlias = Callable[[int], float]
"""`global_step -> multiplier`."""


def constant(global_step: int) -> float:
    """Return 1.0, the peak, at every step.

    Example:
        >>> constant(1000)
        1.0
    """
    del global_step
    return 1.0


def warmup(global_step: int, num_warmup_steps: int) -> float:
    """Climb linearly: 0 at step 0, 1 from step `num_warmup_steps` on. MindSpore's WarmUpLR.

    Example:
        >>> [warmup(step, 4) for step in range(6)]
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if global_step >= num_warmup_steps:
        return 1.0
    return global_step / num_warmup_steps


def linear(global_step: int, *, decay_steps: int, final: float = 0.0) -> float:
    """Decay linearly from 1 to `final`.

    Args:
        global_step: Step, from 0.
        decay_steps: Steps until the end; `final` after that.
        final: Multiplier at the end.

    Example:
        >>> [linear(step, decay_steps=4) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return polynomial(global_step, decay_steps=decay_steps, final=final)


def polynomial(
    global_step: int,
    *,
    decay_steps: int,
    final: float = 0.0,
    power: float = 1.0,
    cycle: bool = False,
) -> float:
    """Compute (1 - final) * (1 - step / decay_steps) ** power + final.

    As Keras and MindSpore PolynomialDecay.

    Args:
        global_step: Step, from 0.
        decay_steps: Steps until the end; `final` after that.
        final: Multiplier at the end.
        power: 1 is a straight line; larger comes down earlier.
        cycle: At the end take the next multiple of `decay_steps` as the end.

    Example:
        >>> [polynomial(step, decay_steps=4, power=2.0) for step in range(5)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    end = decay_steps
    if cycle:
        end = decay_steps * max(1, math.ceil(global_step / decay_steps))
    remaining = 1.0 - _finished_share(global_step, end)
    return float((1.0 - final) * remaining**power + final)


def cosine(
    global_step: int,
    *,
    decay_steps: int,
    final: float = 0.0,
    num_cycles: int = 1,
    restarts: bool = True,
    cycle_mult: float = 1.0,
    cycle_decay: float = 1.0,
) -> float:
    """Compute final + (1 - final) * (1 + cos(pi * progress)) / 2, once or several times.

    Args:
        global_step: Step, from 0.
        decay_steps: Steps until the end, all cycles together; `final` after that.
        final: Multiplier at the end.
        num_cycles: How often the curve comes down.
        restarts: Between two descents jump back to the peak, or climb back along the cosine.
        cycle_mult: Length of a cycle by the length of the one before; with restarts.
        cycle_decay: Peak of a cycle by the peak of the one before; with restarts.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5; Keras CosineDecay, MindSpore
        CosineDecayLR.

    Example:
        >>> [round(cosine(step, decay_steps=4), 4) for step in range(5)]
        [1.0, 0.8536, 0.5, 0.1464, 0.0]
        >>> [round(cosine(step, decay_steps=8, num_cycles=2), 4) for step in (0, 2, 4, 6, 8)]
        [1.0, 0.5, 1.0, 0.5, 0.0]
        >>> options = {"decay_steps": 6, "num_cycles": 2, "restarts": False}
        >>> [round(cosine(step, **options), 4) for step in (0, 2, 4, 6)]
        [1.0, 0.0, 1.0, 0.0]
    """
    progress = _finished_share(global_step, decay_steps)
    peak = 1.0
    if not restarts:
        # Without jumps n descents have n - 1 ascents between them: 2n - 1 half periods of cos.
        progress *= 2 * num_cycles - 1
    elif num_cycles > 1 and progress < 1.0:
        # `progress` becomes that within the present cycle.
        cycle, progress = _locate_cycle(progress, num_cycles, cycle_mult)
        peak = max(cycle_decay**cycle, final)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _locate_cycle(progress: float, num_cycles: int, cycle_mult: float) -> tuple[int, float]:
    """Return the number of the present cycle, from 0, and its finished share.

    Each cycle is `cycle_mult` times as long as the one before.

    Args:
        progress: Finished share of all cycles together, below 1.
        num_cycles: Number of cycles.
        cycle_mult: Length of a cycle by the length of the one before.

    Example:
        >>> _locate_cycle(0.75, num_cycles=2, cycle_mult=1.0)
        (1, 0.5)
    """
    lengths = [1.0]  # in units of the first cycle
    for _ in range(num_cycles - 1):
        lengths.append(lengths[-1] * cycle_mult)
    position = progress * sum(lengths)
    cycle = 0
    # The last cycle is not left, whatever the rounding.
    while cycle < num_cycles - 1 and position >= lengths[cycle]:
        position -= lengths[cycle]
        cycle += 1
    return cycle, position / lengths[cycle]


def inverse_sqrt(global_step: int, num_warmup_steps: float) -> float:
    """Climb linearly to 1 at `num_warmup_steps`, then follow sqrt(num_warmup_steps) / sqrt(step).

    The value at step 0 is exactly 0: the first optimizer step moves moments and no weights.

    Args:
        global_step: Step, from 0.
        num_warmup_steps: Steps of the climb, above 0.

    Raises:
        ValueError: `num_warmup_steps` is 0 or less.

    Source: PaddleNLP 2.8, InverseSquareRootSchedule.

    Example:
        >>> [round(inverse_sqrt(step, 4), 4) for step in (0, 1, 4, 16)]
        [0.0, 0.25, 1.0, 0.5]
    """
    if num_warmup_steps <= 0:
        raise ValueError(
            f"num_warmup_steps={num_warmup_steps}: expected a number above 0; the curve needs a"
            " warm-up."
        )
    if global_step < num_warmup_steps:
        return global_step / num_warmup_steps
    return math.sqrt(num_warmup_steps) / math.sqrt(global_step)


def noam(global_step: int, *, num_warmup_steps: float, d_model: int | None = None) -> float:
    """Compute d_model ** -0.5 * min(step ** -0.5, step * num_warmup_steps ** -1.5); 0 at step 0.

    Args:
        global_step: Step, from 0.
        num_warmup_steps: Steps of the climb, above 0.
        d_model: Width of the model; None scales the curve so that its peak is 1.

    Raises:
        ValueError: `num_warmup_steps` is 0 or less.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3; Paddle's NoamDecay.

    Example:
        >>> [round(noam(step, num_warmup_steps=4, d_model=64), 6) for step in (0, 1, 4, 16)]
        [0.0, 0.015625, 0.0625, 0.03125]
    """
    relative = inverse_sqrt(global_step, num_warmup_steps)  # refuses a warm-up of 0 steps
    if d_model is None:
        return relative
    if global_step == 0:
        return 0.0
    return float(d_model**-0.5 * min(global_step**-0.5, global_step * num_warmup_steps**-1.5))


def wsd(
    global_step: int,
    *,
    num_stable_steps: int,
    num_decay_steps: int,
    final: float = 0.0,
    shape: str = "one_minus_sqrt",
) -> float:
    """Keep the peak for `num_stable_steps`, then go down to `final` within `num_decay_steps`.

    With x from 0 to 1 over the decay, the curve goes along `1 - x` (linear), `(1 + cos(pi x)) / 2`
    (cosine), `1 - sqrt(x)` (one_minus_sqrt), `1 - x**2` (square), or in equal factors, `final ** x`
    (exponential).

    Args:
        global_step: Step, from 0; the warm-up lies before it.
        num_stable_steps: Steps at the peak.
        num_decay_steps: Steps of the way down; `final` after that.
        final: Multiplier at the end; above 0 for `exponential`.
        shape: One of the five words above.

    Raises:
        ValueError: Another word, or `exponential` to 0.

    Source: Hu et al. 2024, arXiv:2404.06395; shapes: Hägele et al. 2024, arXiv:2405.18392.

    Example:
        >>> [wsd(step, num_stable_steps=2, num_decay_steps=4, shape="linear") for step in range(7)]
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    x = 0.0
    if global_step > num_stable_steps:
        x = _finished_share(global_step - num_stable_steps, num_decay_steps)
    if shape == "exponential":
        if final <= 0:
            raise ValueError(f"final={final}: expected a number above 0 for equal factors.")
        return float(final**x)
    if shape == "linear":
        remaining = 1.0 - x
    elif shape == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * x))
    elif shape == "one_minus_sqrt":
        remaining = 1.0 - math.sqrt(x)
    elif shape == "square":
        remaining = 1.0 - x * x
    else:
        raise ValueError(
            f"shape={shape}: expected one of cosine, exponential, linear, one_minus_sqrt, square."
        )
    return final + (1.0 - final) * remaining


def step(global_step: int, *, step_size: int, gamma: float = 0.1) -> float:
    """Multiply by gamma every `step_size` steps, as Paddle's StepDecay.

    Example:
        >>> [step(at, step_size=2, gamma=0.5) for at in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    return float(gamma ** (global_step // step_size))


def multistep(
    global_step: int, *, milestones: Sequence[int], gamma: float = 0.1, boundary: str = "paddle"
) -> float:
    """Raise gamma to the power of the milestones passed.

    Args:
        global_step: Step, from 0.
        milestones: Rising steps.
        gamma: Factor at each.
        boundary: `paddle` (and torch): a milestone itself has the new value; `keras`: still the old
            one.

    Raises:
        ValueError: Another word for `boundary`.

    Example:
        >>> [multistep(at, milestones=[2, 3], gamma=0.5) for at in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    return float(gamma ** _count_passed(global_step, milestones, boundary))


def piecewise(
    global_step: int,
    *,
    values: Sequence[float],
    boundaries: Sequence[int] | None = None,
    boundary: str = "paddle",
) -> float:
    """Choose from a list of multipliers: one per stretch between boundaries, or one per step.

    Args:
        global_step: Step, from 0.
        values: Multipliers; one more than boundaries.
        boundaries: Rising steps. None: `values` are indexed by the step, and the last one stays.
        boundary: `paddle` (and MindSpore): a boundary itself has the new value; `keras`: still the
            old one.

    Raises:
        ValueError: Another word for `boundary`.

    Example:
        >>> [piecewise(at, values=[1.0, 0.5, 0.1], boundaries=[2, 3]) for at in range(5)]
        [1.0, 1.0, 0.5, 0.1, 0.1]
        >>> options = {"values": [1.0, 0.5, 0.1], "boundaries": [2, 3]}
        >>> [piecewise(step, **options, boundary="keras") for step in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.1]
        >>> [piecewise(at, values=[1.0, 0.5, 0.1]) for at in range(5)]
        [1.0, 0.5, 0.1, 0.1, 0.1]
    """
    if boundaries is None:
        return float(values[min(global_step, len(values) - 1)])
    return float(values[_count_passed(global_step, boundaries, boundary)])


def exponential(
    global_step: int, *, decay_rate: float, decay_steps: int, staircase: bool = False
) -> float:
    """Compute decay_rate ** (step / decay_steps).

    As Keras ExponentialDecay and MindSpore ExponentialDecayLR.

    Args:
        global_step: Step, from 0.
        decay_rate: Factor over `decay_steps`.
        decay_steps: Steps of one factor.
        staircase: Round the exponent down.

    Example:
        >>> [exponential(at, decay_rate=0.25, decay_steps=2) for at in range(4)]
        [1.0, 0.5, 0.25, 0.125]
    """
    return float(decay_rate ** _decay_exponent(global_step, decay_steps, staircase))


def inverse_time(
    global_step: int, *, decay_rate: float, decay_steps: int, staircase: bool = False
) -> float:
    """Compute 1 / (1 + decay_rate * step / decay_steps).

    As Keras InverseTimeDecay and the `decay` of its optimizers.

    Args:
        global_step: Step, from 0.
        decay_rate: Growth of the denominator over `decay_steps`.
        decay_steps: Steps of one growth.
        staircase: Round step / decay_steps down.

    Example:
        >>> [inverse_time(at, decay_rate=1.0, decay_steps=1) for at in (0, 1, 3)]
        [1.0, 0.5, 0.25]
    """
    return 1.0 / (1.0 + decay_rate * _decay_exponent(global_step, decay_steps, staircase))


def product(*curves: Curve) -> Curve:
    """Multiply curves.

    Example:
        >>> product(lambda step: 0.5, lambda step: step)(4)
        2.0
    """
    return partial(_product, curves=curves)


def floored(curve: Curve, final: float, *, since: int = 0) -> Curve:
    """Bound the curve by `final` from below, from step `since` on.

    Example:
        >>> floored(lambda step: 1 / (1 + step), 0.25)(100)
        0.25
    """
    return partial(_floored, curve=curve, final=final, since=since)


def after_warmup(curve: Curve, num_warmup_steps: int) -> Curve:
    """Put a linear warm-up before a curve, up to the curve's first value.

    The curve starts at its own step 0 when the warm-up ends.

    Example:
        >>> late = after_warmup(lambda step: 1 / (1 + step), 2)
        >>> [late(step) for step in range(4)]
        [0.0, 0.5, 1.0, 0.5]
    """
    return partial(_after_warmup, curve=curve, num_warmup_steps=num_warmup_steps)


def during_warmup(curve: Curve, num_warmup_steps: int) -> Curve:
    """Multiply a curve by a linear warm-up; steps count from the start of the run.

    Example:
        >>> early = during_warmup(lambda step: 0.5, 2)
        >>> [early(step) for step in range(4)]
        [0.0, 0.25, 0.5, 0.5]
    """
    return product(partial(warmup, num_warmup_steps=num_warmup_steps), curve)


# What the combinators return is a partial of these: a closure could not be pickled with its
# scheduler.


def _product(global_step: int, *, curves: Sequence[Curve]) -> float:
    """Return the product of curves at a step, see `product`."""
    return math.prod(curve(global_step) for curve in curves)


def _floored(global_step: int, *, curve: Curve, final: float, since: int) -> float:
    """Return the bounded curve at a step, see `floored`."""
    if global_step >= since:
        return max(curve(global_step), final)
    return curve(global_step)


def _after_warmup(global_step: int, *, curve: Curve, num_warmup_steps: int) -> float:
    """Return the curve with a warm-up before it at a step, see `after_warmup`."""
    if global_step >= num_warmup_steps:
        return curve(global_step - num_warmup_steps)
    return warmup(global_step, num_warmup_steps) * curve(0)


def _finished_share(global_step: int, decay_steps: int) -> float:
    """Return the finished share of `decay_steps`, at most 1; 1 without decay steps."""
    if decay_steps > 0:
        return min(global_step, decay_steps) / decay_steps
    return 1.0


def _decay_exponent(global_step: int, decay_steps: int, staircase: bool) -> float:
    """Return step / decay_steps, rounded down if `staircase`."""
    if staircase:
        return global_step // decay_steps
    return global_step / decay_steps


def _count_passed(global_step: int, boundaries: Sequence[int], boundary: str) -> int:
    """Count the boundaries before a step; `paddle` counts one at the step itself, `keras` not.

    Raises:
        ValueError: Another word for `boundary`.

    Example:
        >>> _count_passed(3, [1, 3, 5], "paddle"), _count_passed(3, [1, 3, 5], "keras")
        (2, 1)
    """
    if boundary not in ("paddle", "keras"):
        raise ValueError(f"boundary={boundary}: expected paddle or keras.")
    if boundary == "paddle":
        return sum(global_step >= at for at in boundaries)
    return sum(global_step > at for at in boundaries)
