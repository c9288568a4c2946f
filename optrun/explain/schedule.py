"""Sample the schedule of a configuration, its length and its peak."""

from __future__ import annotations

from optrun.config.schema.scheduler import PiecewiseConfig, SchedulerConfig
from optrun.explain.facts import CurveFacts
from optrun.scheduler.builders import num_warmup_steps_of
from optrun.scheduler.curves import Curve

ASSUMED_STEPS = 1000
"""Length of a run where only the data knows it, and no schedule names a step."""

SAMPLES = 481
"""Points of a curve that are kept, besides the steps its schedule names and its peak."""

_LENGTHS = ("num_warmup_steps", "decay_steps", "num_decay_steps", "step_size")


def _listed(config: SchedulerConfig) -> list[int]:
    """List the milestones or boundaries of a schedule."""
    return [
        step for key in ("milestones", "boundaries") for step in getattr(config, key, None) or []
    ]


def _values(config: SchedulerConfig) -> int:
    """Count the multipliers of a schedule that lists one per step; else 0."""
    if isinstance(config, PiecewiseConfig) and config.boundaries is None:
        return len(config.values)
    return 0


def named_steps(config: SchedulerConfig) -> list[int]:
    """List the lengths and positions of a schedule in steps.

    Example:
        >>> from optrun.config.choice import choice
        >>> from optrun.config.schema.scheduler import SCHEMAS
        >>> options = {"milestones": [30, 80], "warmup_ratio": 0.1}
        >>> named_steps(choice("scheduler", SCHEMAS, "multistep", options))
        [30, 80]
    """
    candidates = [
        *(getattr(config, key, None) for key in _LENGTHS),
        *_listed(config),
        _values(config),
    ]
    return [steps for steps in candidates if steps]


def assumed_steps(config: SchedulerConfig) -> int:
    """Choose a length for a run of unknown length.

    It covers the steps that the schedule names, and is one that the schedule accepts.
    """
    steps = max(ASSUMED_STEPS, *(2 * step for step in named_steps(config)), 0)
    if _values(config):
        steps = min(steps, _values(config))
    milestones = _listed(config)
    if milestones and config.warmup_ratio:
        steps = min(steps, int(milestones[0] / config.warmup_ratio))
        while steps > 1 and num_warmup_steps_of(config, steps) >= milestones[0]:
            steps -= 1  # so that the climb has its peak
    return max(steps, 1)


def sample_curve(curve: Curve, config: SchedulerConfig, steps: int) -> CurveFacts:
    """Sample a schedule at some steps of the run, the one of its peak among them.

    Args:
        curve: The multiplier of the lr.
        config: Configuration of the schedule; the steps that it names are sampled, too.
        steps: Length of the run.
    """
    at = set(_spread(0, steps - 1))
    turns = [num_warmup_steps_of(config, steps), *named_steps(config)]
    at |= {near for turn in turns for near in (turn - 1, turn, turn + 1) if 0 <= near < steps}
    # With one multiplier for each step, any may be the highest.
    peak = max(range(steps) if _values(config) else sorted(at), key=curve)
    points = sorted(at | {peak})
    return CurveFacts(points, [curve(step) for step in points], curve(peak))


def _spread(first: int, last: int) -> list[int]:
    """Spread at most `SAMPLES` steps from the first to the last, both among them."""
    count = min(SAMPLES, last - first + 1)
    return sorted(
        {first + round(index * (last - first) / max(count - 1, 1)) for index in range(count)}
    )
