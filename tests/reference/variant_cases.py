"""What the variants are made of.

Schedules by the formulas of the packages, and a case that fills itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 7
SHAPES = {"out.bias": [3], "enc.weight": [2, 3], "scale": [], "zero": [4]}
LAYERS = {
    "classifier.weight": [2],
    "encoder.layers.1.weight": [2, 2],
    "encoder.layers.0.bias": [3],
    "embeddings.word.weight": [4],
}


def rate(kind: str, **a: Any) -> Callable[[int], float]:
    """A schedule by the formulas of the packages, with their defaults."""
    first = a.get("learning_rate", a.get("initial_learning_rate", 1.0))
    n = a.get("decay_steps", 1)

    def falling(i: int) -> float:
        turns = i / n
        return math.floor(turns) if a.get("staircase") or a.get("is_stair") else turns

    def polynomial(i: int) -> float:
        end, power = a.get("end_learning_rate", 1e-4), a.get("power", 1.0)
        whole = n * max(1, math.ceil(i / n)) if a.get("cycle") else n
        return (first - end) * (1 - min(i, whole) / whole) ** power + end

    def inverse_sqrt(i: int) -> float:
        e, w = i + a.get("last_epoch", -1) + 1, a["warmup_steps"]
        return e * first / w if e < w else first * math.sqrt(w) / math.sqrt(e)

    def noam(i: int) -> float:
        return (
            first * a["d_model"] ** -0.5 * min(i**-0.5, i * a["warmup_steps"] ** -1.5) if i else 0.0
        )

    def between(i: int, low: float, high: float) -> float:
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * min(i, n) / n))

    formulas: dict[str, Callable[[int], float]] = {
        "StepDecay": lambda i: first * a.get("gamma", 0.1) ** (i // a["step_size"]),
        "NoamDecay": noam,
        "InverseSquareRootSchedule": inverse_sqrt,
        "PiecewiseDecay": lambda i: a["values"][sum(i >= at for at in a["boundaries"])],
        "PiecewiseConstantDecay": lambda i: a["values"][sum(i > at for at in a["boundaries"])],
        "ExponentialDecay": lambda i: first * a["decay_rate"] ** falling(i),
        "ExponentialDecayLR": lambda i: first * a["decay_rate"] ** falling(i),
        "InverseTimeDecay": lambda i: first / (1 + a["decay_rate"] * falling(i)),
        "PolynomialDecay": polynomial,
        "PolynomialDecayLR": polynomial,
        "CosineDecay": lambda i: between(i, a.get("alpha", 0.0) * first, first),
        "CosineDecayLR": lambda i: between(i, a["min_lr"], a["max_lr"]),
        "WarmUpLR": lambda i: first * min(i, a["warmup_steps"]) / a["warmup_steps"],
        "list": lambda i: a["values"][i],
    }
    return formulas[kind]


def rate_of(spec: Any, default: float = 0.001) -> Callable[[int], float]:
    """A number, a schedule, or nothing."""
    if isinstance(spec, dict):
        return rate(**spec)
    return lambda _: default if spec is None else spec


class Case:
    """A case in the making: parameters, gradients, and what each step gives."""

    def __init__(self, name: str, shapes: dict[str, list[int]], dtype: str, **entries: Any) -> None:
        """Draw parameters and gradients by the name of the case."""
        draw = np.random.default_rng(sum(map(ord, name)))
        self.w = {
            n: np.zeros(s) if n == "zero" else np.asarray(draw.normal(0, 0.5, s).round(3))
            for n, s in shapes.items()
        }
        self.grads = [
            {n: np.asarray(draw.normal(0, 0.3, s)).round(3) for n, s in shapes.items()}
            for _ in range(STEPS)
        ]
        self.first = {n: np.zeros_like(w) for n, w in self.w.items()}
        self.second = {n: np.zeros_like(w) for n, w in self.w.items()}
        self.t = dict.fromkeys(shapes, 0)
        params = [
            {"name": n, "shape": s, "init": self.w[n].ravel().tolist()} for n, s in shapes.items()
        ]
        self.entry: dict[str, Any] = {
            "id": name,
            "dtype": dtype,
            "config": {},
            "params": params,
            **entries,
        }
        self.entry |= {"grads": [], "lr": [], "params_after": [], "state": {}}

    def moments(self, name: str, g: Any, b1: float = 0.9, b2: float = 0.999) -> tuple[Any, Any]:
        """Both moments of Adam after a gradient, corrected."""
        self.t[name] += 1
        self.first[name] = b1 * self.first[name] + (1 - b1) * g
        self.second[name] = b2 * self.second[name] + (1 - b2) * g * g
        return self.first[name] / (1 - b1 ** self.t[name]), self.second[name] / (
            1 - b2 ** self.t[name]
        )

    def record(self, lr: Any, grads: list[Any] | None = None) -> None:
        """Write down what a step was given and what it left."""
        step = len(self.entry["lr"])
        given = (
            grads
            if grads is not None
            else [self.grads[step][name].ravel().tolist() for name in self.w]
        )
        self.entry["grads"].append(given)
        self.entry["lr"].append(lr)
        self.entry["params_after"].append([w.ravel().tolist() for w in self.w.values()])


def file_of(system: str, *cases: Case, **tables: Any) -> dict[str, Any]:
    return {
        "schema": "golden-1",
        "system": system,
        "source": "formulas",
        "cases": [c.entry for c in cases],
        **tables,
    }


def table_of(kind: str, **args: Any) -> dict[str, Any]:
    return {"kind": kind, "args": args, "values": [rate(kind, **args)(i) for i in range(10)]}
