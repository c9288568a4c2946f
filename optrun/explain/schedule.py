"""Sample the learning-rate schedule of a configuration, and choose a length if none is known."""

import numpy as np

from optrun.config.schema.scheduler import PiecewiseConfig, SchedulerConfig
from optrun.explain.facts import CurveFacts
from optrun.scheduler.builders import count_warmup_steps
from optrun.scheduler.curves import Curve

ASSUMED_STEPS = 1000
"""Optimizer steps of a run of unknown length, if its schedule names no step beyond half of it."""

SAMPLES = 481
"""Evenly spread points of a curve; the steps that its schedule names and its peak come on top."""

_LENGTHS = ("num_warmup_steps", "decay_steps", "num_decay_steps", "step_size")


def _list_milestones(config: SchedulerConfig) -> list[int]:
    """List the milestones or boundaries of a schedule; empty if it has none."""
    return getattr(config, "milestones", None) or getattr(config, "boundaries", None) or []


def _count_listed_multipliers(config: SchedulerConfig) -> int:
    """Count the multipliers of a schedule with one per step; 0 for other schedules."""
    if isinstance(config, PiecewiseConfig) and config.boundaries is None:
        return len(config.values)
    return 0


def named_steps(config: SchedulerConfig) -> list[int]:
    """List the numbers of steps in the options of a schedule; null and 0 are left out.

    Example:
        >>> from optrun.config.choice import choice
        >>> from optrun.config.schema.scheduler import SCHEMAS
        >>> options = {"milestones": [30, 80], "warmup_ratio": 0.1}
        >>> named_steps(choice("scheduler", SCHEMAS, "multistep", options))
        [30, 80]
    """
    candidates = [
        *(getattr(config, key, None) for key in _LENGTHS),
        *_list_milestones(config),
        _count_listed_multipliers(config),
    ]
    return [steps for steps in candidates if steps]


def assumed_steps(config: SchedulerConfig) -> int:
    """Choose a number of steps for a run of unknown length.

    At least `ASSUMED_STEPS`, and twice each step that the schedule names. Fewer if the schedule
    lists a multiplier for each step, or if a warm-up by ratio would end after the first milestone.
    """
    steps = max(ASSUMED_STEPS, *(2 * step for step in named_steps(config)), 0)
    if _count_listed_multipliers(config):
        steps = min(steps, _count_listed_multipliers(config))
    milestones = _list_milestones(config)
    if milestones and config.warmup_ratio:
        steps = min(steps, int(milestones[0] / config.warmup_ratio))
        while steps > 1 and count_warmup_steps(config, steps) >= milestones[0]:
            steps -= 1  # the warm-up has to end before the first milestone
    return max(steps, 1)


def sample_curve(curve: Curve, config: SchedulerConfig, steps: int) -> CurveFacts:
    """Sample a schedule at some steps of the run, the one of its peak among them.

    Args:
        curve: The multiplier of the lr at a step.
        config: Configuration of the schedule; the steps that it names are sampled, too, with their
            neighbours.
        steps: Length of the run in optimizer steps.
    """
    sampled = set(np.linspace(0, steps - 1, min(SAMPLES, steps)).round().astype(int).tolist())
    for step in (count_warmup_steps(config, steps), *named_steps(config)):
        sampled |= {step - 1, step, step + 1}
    sampled = {step for step in sampled if 0 <= step < steps}
    # With one multiplier for each step, any may be the highest.
    peak = max(range(steps) if _count_listed_multipliers(config) else sorted(sampled), key=curve)
    points = sorted(sampled | {peak})
    return CurveFacts(points, [curve(step) for step in points], curve(peak))
