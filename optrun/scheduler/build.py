"""Build the scheduler of a configuration."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.base.options import ParamGroup
from optrun.config import registry
from optrun.config.choice import choice
from optrun.config.kind import kind_of
from optrun.config.schema.ranges import at_least
from optrun.config.schema.scheduler import (
    SCHEMAS,
    FloorConfig,
    PlateauConfig,
    SchedulerConfig,
)
from optrun.scheduler import builders
from optrun.scheduler.curves import Curve
from optrun.scheduler.plateau import Plateau
from optrun.scheduler.scheduler import Scheduler


def build_scheduler(
    optimizer: Optimizer,
    config_or_name: SchedulerConfig | str | Curve,
    *,
    num_training_steps: int,
    **options: object,
) -> Scheduler:
    """Build a scheduler of every group's learning rate.

    Args:
        optimizer: Any torch optimizer; its groups keep the ratios of their lr.
        config_or_name: A configuration, the name of a choice, or a function `global_step ->
            multiplier` of your own.
        num_training_steps: Optimizer steps of the whole run.
        **options: With a name: keys of that choice, such as `num_warmup_steps=100`.

    Returns:
        The scheduler, with the lr for step 0 set; call `step()` after each optimizer step. It is a
        torch LRScheduler; with a function of your own it can be pickled if that can.

    Raises:
        ConfigError: Unknown choice or key, a value out of range, or one that does not fit the run
            or the optimizer.
        TypeError: An argument has another type, or options are passed with a configuration or a
            function.
        ValueError: `num_training_steps` below 1, or a group whose lr is a function of the step
            already. The latter is a ConfigError, unless you pass a function.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> steps = {"num_training_steps": 4, "num_warmup_steps": 2}
        >>> scheduler = build_scheduler(optimizer, "linear", **steps)
        >>> lrs = []
        >>> for _ in range(4):
        ...     lrs.append(optimizer.param_groups[0]["lr"])
        ...     scheduler.step()
        >>> lrs
        [0.0, 0.05, 0.1, 0.05]
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={optimizer!r}: expected a torch optimizer, got {type(optimizer).__name__}. "
            "It comes first: build_scheduler(optimizer, name, num_training_steps=...)."
        )
    at_least(1)("num_training_steps", num_training_steps)  # raises TypeError or ValueError
    if callable(config_or_name) and not isinstance(config_or_name, str):
        if options:
            raise TypeError(
                f"scheduler: options {sorted(options)} cannot be used with a function of your own;"
                " put their values into the function."
            )
        name = getattr(config_or_name, "__name__", type(config_or_name).__name__)
        return Scheduler(optimizer, config_or_name, name=name)
    config = choice("scheduler", SCHEMAS, config_or_name, options)
    lr = _peak_lr_at_scale_1(optimizer.param_groups)  # by which `min_lr` becomes a multiplier
    # A run passes a configuration, and its loop calls `observe` at every evaluation. Someone who
    # passes a name writes the loop himself, and may forget that call.
    has_own_loop = isinstance(config_or_name, str)
    curve = build_curve(config, num_training_steps=num_training_steps, lr=lr)
    plateau = _build_plateau(config, lr)
    try:
        return Scheduler(
            optimizer,
            curve,
            name=config.name,
            plateau=plateau,
            warn_without_metric_at=max(num_training_steps // 2, 1) if has_own_loop else None,
        )
    except ValueError as error:  # of the curve at step 0, or of a group's own lr function
        raise ConfigError(str(error)) from error


def build_curve(config: SchedulerConfig, *, num_training_steps: int, lr: float) -> Curve:
    """Build the multiplier of a configuration, warm-up and floor included.

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
    # The entry of the choice in the registry; `load` imports its function.
    row = registry.choices("scheduler")[kind_of("scheduler", SCHEMAS, config)]
    builder = row.load()
    if row.origin is not None:  # a plugin registers a function of the step, not a builder
        builder = partial(builders.plugin_curve, builder)
    warmup_steps = builders.count_warmup_steps(config, num_training_steps)
    span = builders.Span(
        total=num_training_steps,
        warmup=warmup_steps,
        after_warmup=max(num_training_steps - warmup_steps, 1),
        final=_min_lr_multiplier(config, lr),
    )
    curve: Curve = builder(config, span)
    return curve


def warmup_note(config: SchedulerConfig, num_training_steps: int) -> str | None:
    """Write a warning if the warm-up takes all steps, so that lr never peaks; else None.

    Example:
        >>> config = choice("scheduler", SCHEMAS, "cosine", {"num_warmup_steps": 10})
        >>> warmup_note(config, 100) is None
        True
        >>> warmup_note(config, 5).split(":")[1]
        ' scheduler.num_warmup_steps=10 and the run has 5 steps'
    """
    warmup_steps = config.num_warmup_steps
    if warmup_steps is None or warmup_steps < num_training_steps:
        return None
    return (
        f"warning: scheduler.num_warmup_steps={warmup_steps} and the run has {num_training_steps}"
        " steps: lr never reaches its peak. scheduler.warmup_ratio=0.1 fits any length"
    )


def describe_fork_schedule(name: str, schedule_start: int, fork_step: int, total: int) -> str:
    """Describe whether the schedule of a fork goes on or starts anew, and at which step.

    Args:
        name: Name of the schedule.
        schedule_start: Step of the run at which the schedule has its step 0. The schedule starts
            anew if this is `fork_step`.
        fork_step: Step of the checkpoint that the fork starts from.
        total: Last step of the fork, counted from the start of its trunk.

    Example:
        >>> describe_fork_schedule("wsd", 0, 100, 150)
        'wsd continues at step 100 of 150 (branch_schedule=continue)'
        >>> describe_fork_schedule("cosine", 100, 100, 150)
        'cosine starts anew at the branch, over 50 steps (branch_schedule=restart)'
    """
    length = total - schedule_start
    if schedule_start == fork_step:
        return f"{name} starts anew at the branch, over {length:,} steps (branch_schedule=restart)"
    return (
        f"{name} continues at step {fork_step - schedule_start:,} of {length:,}"
        " (branch_schedule=continue)"
    )


def _peak_lr_at_scale_1(groups: list[ParamGroup]) -> float:
    """Compute the peak lr that a group with scale 1 has or would have.

    The peak of a group is its `initial_lr`, or its `lr` if no scheduler was built yet. Its scale is
    `lr_ratio`, else `lr_scale`. Groups with a scale above 0 decide, by the largest peak / scale; if
    there is none, the largest peak is taken.

    Example:
        >>> _peak_lr_at_scale_1([{"lr": 0.05, "lr_scale": 0.5}, {"lr": 0.3}])
        0.1
    """
    peaks = []
    peaks_at_scale_1 = []
    for group in groups:
        peak = float(group["initial_lr"] if "initial_lr" in group else group["lr"])
        # NamedOptimizer has renamed `lr_scale` to `lr_ratio`; torch's optimizers keep it.
        scale = group.get("lr_ratio", group.get("lr_scale"))
        peaks.append(peak)
        if scale:
            peaks_at_scale_1.append(peak / scale)
    return max(peaks_at_scale_1 or peaks)


def _min_lr_multiplier(config: SchedulerConfig, lr: float) -> float:
    """Convert `min_lr` to a multiplier of the peak lr; 0 for a schedule without `min_lr`.

    A min_lr of 1e-5 is 0.01 of a peak of 1e-3.

    Args:
        config: Any scheduler configuration.
        lr: The peak.

    Raises:
        ConfigError: `min_lr` is above the peak.
    """
    if not isinstance(config, FloorConfig) or config.min_lr == 0:
        return 0.0
    if config.min_lr > lr:
        raise ConfigError(f"scheduler.min_lr={config.min_lr}: expected at most the peak, lr={lr}.")
    return config.min_lr / lr


def _build_plateau(config: SchedulerConfig, lr: float) -> Plateau | None:
    """Build the plateau rule of `scheduler=plateau`; None for other schedulers.

    Args:
        config: Any scheduler configuration.
        lr: The peak, by which `min_lr` becomes the lower bound of the multiplier.
    """
    if not isinstance(config, PlateauConfig):
        return None
    return Plateau(
        mode=config.mode.value,
        factor=config.factor,
        patience=config.patience,
        threshold=config.threshold,
        threshold_mode=config.threshold_mode.value,
        cooldown=config.cooldown,
        final=_min_lr_multiplier(config, lr),
        metric=config.metric,
    )
