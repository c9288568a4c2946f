"""Every schedule of the five packages.

As a function of the step, and as a choice of `build_scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.optim import Optimizer

from optrun.scheduler import build_scheduler, curves
from tests.reference.reference_format import FormatError, fields

Rate = Callable[[int], float]
"""From the step, counted from 0, to a learning rate."""


@dataclass(frozen=True)
class Schedule:
    """A rate that changes from step to step.

    Attributes:
        peak: What the curve is a multiple of.
        curve: Multiplier of the peak by the step.
        choice: Name in `build_scheduler`; None where no choice has these values: then the curve
            itself is given.
        options: Its keys.
        final: Multiplier at the end, for choices with `min_lr`.
        start: Step that counts as the first.
        length: Steps it is defined for; None: any number.
    """

    peak: float
    curve: Callable[[int], float]
    choice: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    final: float | None = None
    start: int = 0
    length: int | None = None

    def __call__(self, step: int) -> float:
        """The rate of a step."""
        return self.peak * self.multiplier(step)

    def multiplier(self, step: int) -> float:
        """The rate of a step by the peak."""
        return self.curve(self.start + step)

    def attach(self, optimizer: Optimizer, steps: int) -> Any:
        """A scheduler over an optimizer that was built with the peak, at its first step."""
        total = self.start + steps
        if self.choice is None:
            scheduler = build_scheduler(optimizer, self.curve, num_training_steps=total)
        else:
            floor = {} if self.final is None else {"min_lr": self.final * self.peak}
            scheduler = build_scheduler(
                optimizer, self.choice, num_training_steps=total, **self.options, **floor
            )
        for _ in range(self.start):
            optimizer.step()
            scheduler.step()
        return scheduler


def constant(rate: float) -> Schedule:
    """A rate that stays."""
    return Schedule(rate, curves.constant, "constant")


def of_function(rate: Rate) -> Schedule:
    """A rate of which only the function is known."""
    return Schedule(1.0, rate)


def schedule(where: str, spec: Any) -> Schedule:
    """A schedule of a case or a table, `{kind, ...arguments}`.

    Raises:
        FormatError: An unknown kind or argument, or one that has no default and is not there.
    """
    if not isinstance(spec, dict) or spec.get("kind") not in KINDS:
        raise FormatError(
            f"{where}: unknown schedule {spec!r}; known kinds are {', '.join(sorted(KINDS))}."
        )
    args = {key: value for key, value in spec.items() if key != "kind"}
    return KINDS[spec["kind"]](f"{where}.{spec['kind']}", args)


def _steps(*values: Any) -> bool:
    """Whether these are whole steps, as the choices of `build_scheduler` take them.

    The packages take any number.
    """
    return all(isinstance(value, int) and value > 0 for value in values)


def _step_decay(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "learning_rate", "step_size", gamma=0.1)
    options = {"step_size": a.step_size, "gamma": a.gamma}
    return Schedule(a.learning_rate, partial(curves.step, **options), "step", options)


def _noam(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "d_model", "warmup_steps", learning_rate=1.0)
    options = {"d_model": a.d_model, "num_warmup_steps": a.warmup_steps}
    choice = "noam" if _steps(a.d_model, a.warmup_steps) else None
    return Schedule(a.learning_rate, partial(curves.noam, **options), choice, options)


def _inverse_sqrt(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "warmup_steps", learning_rate=1.0, last_epoch=-1)
    options = {"num_warmup_steps": a.warmup_steps}
    choice = "inverse_sqrt" if _steps(a.warmup_steps) else None
    curve = partial(curves.inverse_sqrt, **options)
    return Schedule(a.learning_rate, curve, choice, options, start=a.last_epoch + 1)


def _piecewise(where: str, args: dict[str, Any], *, boundary: str) -> Schedule:
    a = fields(where, args, "boundaries", "values")
    if len(a.values) != len(a.boundaries) + 1:
        raise FormatError(f"{where}: {len(a.values)} values for {len(a.boundaries)} boundaries.")
    options = {
        "values": [float(value) for value in a.values],
        "boundaries": a.boundaries,
        "boundary": boundary,
    }
    return Schedule(1.0, partial(curves.piecewise, **options), "piecewise", options)


def _list(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "values")
    options = {"values": [float(value) for value in a.values], "boundaries": None}
    return Schedule(
        1.0, partial(curves.piecewise, **options), "piecewise", options, length=len(a.values)
    )


def _over_steps(
    curve: Callable[..., float], choice: str, peak: str, stairs: str
) -> Callable[..., Schedule]:
    """Keras and MindSpore name the peak and the stairs differently."""

    def read(where: str, args: dict[str, Any]) -> Schedule:
        a = vars(fields(where, args, peak, "decay_steps", "decay_rate", **{stairs: False}))
        options = {
            "decay_rate": a["decay_rate"],
            "decay_steps": a["decay_steps"],
            "staircase": a[stairs],
        }
        return Schedule(
            a[peak],
            partial(curve, **options),
            choice if _steps(a["decay_steps"]) else None,
            options,
        )

    return read


def _descent(
    curve: Callable[..., float], choice: str, peak: float, end: float, options: dict[str, Any]
) -> Schedule:
    """From the peak to an end, which a choice takes as `min_lr`.

    Where it lies between 0 and the peak.
    """
    if 0 <= end <= peak and peak > 0 and _steps(options["decay_steps"]):
        final = end / peak
        return Schedule(peak, partial(curve, final=final, **options), choice, options, final=final)
    return of_function(lambda step: end + (peak - end) * curve(step, **options))


def _polynomial(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(
        where,
        args,
        "initial_learning_rate",
        "decay_steps",
        end_learning_rate=1e-4,
        power=1.0,
        cycle=False,
    )
    options = {"decay_steps": a.decay_steps, "power": a.power, "cycle": a.cycle}
    return _descent(
        curves.polynomial, "polynomial", a.initial_learning_rate, a.end_learning_rate, options
    )


def _polynomial_lr(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "learning_rate", "end_learning_rate", "decay_steps", "power")
    options = {"decay_steps": a.decay_steps, "power": a.power}
    return _descent(curves.polynomial, "polynomial", a.learning_rate, a.end_learning_rate, options)


def _cosine(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "initial_learning_rate", "decay_steps", alpha=0.0)
    peak = a.initial_learning_rate
    return _descent(curves.cosine, "cosine", peak, a.alpha * peak, {"decay_steps": a.decay_steps})


def _cosine_lr(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "min_lr", "max_lr", "decay_steps")
    return _descent(curves.cosine, "cosine", a.max_lr, a.min_lr, {"decay_steps": a.decay_steps})


def _warmup(where: str, args: dict[str, Any]) -> Schedule:
    a = fields(where, args, "learning_rate", "warmup_steps")
    options = {"num_warmup_steps": a.warmup_steps}
    choice = "constant" if _steps(a.warmup_steps) else None
    return Schedule(a.learning_rate, partial(curves.warmup, **options), choice, options)


KINDS: dict[str, Callable[[str, dict[str, Any]], Schedule]] = {
    "StepDecay": _step_decay,
    "NoamDecay": _noam,
    "InverseSquareRootSchedule": _inverse_sqrt,
    "PiecewiseDecay": partial(_piecewise, boundary="paddle"),
    "PiecewiseConstantDecay": partial(_piecewise, boundary="keras"),
    "ExponentialDecay": _over_steps(
        curves.exponential, "exponential", "initial_learning_rate", "staircase"
    ),
    "InverseTimeDecay": _over_steps(
        curves.inverse_time, "inverse_time", "initial_learning_rate", "staircase"
    ),
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "ExponentialDecayLR": _over_steps(
        curves.exponential, "exponential", "learning_rate", "is_stair"
    ),
    "PolynomialDecayLR": _polynomial_lr,
    "CosineDecayLR": _cosine_lr,
    "WarmUpLR": _warmup,
    "list": _list,
}
"""Every kind of the three packages."""
