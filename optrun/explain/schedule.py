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

    Lengths of its phases, milestones or boundaries, and how many multipliers it lists.

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

    Example:
        >>> from optrun.config.choice import choice
        >>> from optrun.config.schema.scheduler import SCHEMAS
        >>> options = {"milestones": [30, 800], "warmup_ratio": 0.0}
        >>> assumed_steps(choice("scheduler", SCHEMAS, "multistep", options))
        1600
        >>> options["warmup_ratio"] = 0.1
        >>> assumed_steps(choice("scheduler", SCHEMAS, "multistep", options))
        290
    """
    # 1. Long enough to show what happens at each named step: twice the largest. (The 0 is for a
    # schedule that names none, since `max` needs two values.)
    steps = max(ASSUMED_STEPS, *(2 * step for step in named_steps(config)), 0)

    # 2. Not longer than a list with a multiplier for each step.
    if _count_listed_multipliers(config):
        steps = min(steps, _count_listed_multipliers(config))

    # 3. Short enough for a warm-up, which is a share of the steps, to end before the first
    # milestone: less than milestone / ratio steps. The loop takes off what rounding adds.
    milestones = _list_milestones(config)
    if milestones and config.warmup_ratio:
        steps = min(steps, int(milestones[0] / config.warmup_ratio))
        while steps > 1 and count_warmup_steps(config, steps) >= milestones[0]:
            steps -= 1
    return max(steps, 1)


def sample_curve(curve: Curve, config: SchedulerConfig, steps: int) -> CurveFacts:
    """Sample a schedule at some steps of the run, the one of its peak among them.

    Args:
        curve: The multiplier of the lr at a step.
        config: Configuration of the schedule; the steps that it names are sampled, too, with their
            neighbours.
        steps: Length of the run in optimizer steps.
    """
    # 1. Evenly spread steps, the steps at which something happens, and their neighbours.
    sampled = set(np.linspace(0, steps - 1, min(SAMPLES, steps)).round().astype(int).tolist())
    for step in (count_warmup_steps(config, steps), *named_steps(config)):
        sampled |= {step - 1, step, step + 1}
    sampled = {step for step in sampled if 0 <= step < steps}

    # 2. The step of the highest multiplier, the first of equal ones. If the schedule lists one for
    # each step, any may be the highest.
    candidates = range(steps) if _count_listed_multipliers(config) else sorted(sampled)
    peak_step = max(candidates, key=curve)
    points = sorted(sampled | {peak_step})
    return CurveFacts(points, [curve(step) for step in points], curve(peak_step))
