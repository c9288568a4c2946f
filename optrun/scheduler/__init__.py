"""How the learning rate moves: pure curves, and the object that carries them to an optimizer."""

from optrun.scheduler.build import build_curve, build_scheduler
from optrun.scheduler.curves import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    inverse_time,
    linear,
    multistep,
    noam,
    piecewise,
    polynomial,
    product,
    step,
    warmup,
    wsd,
)
from optrun.scheduler.scheduler import Scheduler

__all__ = [
    "Scheduler",
    "build_curve",
    "build_scheduler",
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "inverse_time",
    "linear",
    "multistep",
    "noam",
    "piecewise",
    "polynomial",
    "product",
    "step",
    "warmup",
    "wsd",
]
