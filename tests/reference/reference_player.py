"""A case that can be played, and what the readers of all systems share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.clip import Clip
from tests.reference.reference_format import FormatError, fields
from tests.reference.reference_schedules import Schedule, schedule

CASE = ("id", "dtype", "config", "params", "grads", "lr", "params_after", "state")
PARAM = ("name", "shape", "init")
FUNCTION, SCHEDULER = "function", "scheduler"
"""Who drives a rate that changes.

A function of the step given to the optimizer, or `build_scheduler`.
"""


@dataclass
class Player:
    """A case ready to be played.

    Attributes:
        case: Its fields, with the defaults filled in.
        optimizer: Built through the public API.
        params: By name, in the order of the file.
        clips: Each with the names it clips.
        keeps_zeros: A gradient that is cleared stays, as 0.
        rate: What the optimizer was built with.
        set_lrs: Step -> rates set by hand before it.
        scheduler: Drives the rate, where one does.
        order: Names in the order of the recorded optimizer.
        decays: By name, the weight decay in force at a step.
    """

    case: SimpleNamespace
    optimizer: Any
    params: dict[str, torch.nn.Parameter]
    rate: float | Schedule
    clips: list[tuple[Clip, list[str]]] = field(default_factory=list)
    keeps_zeros: bool = False
    set_lrs: dict[int, list[float]] = field(default_factory=dict)
    scheduler: Any = None
    order: list[str] = field(default_factory=list)
    decays: dict[str, Callable[[int], float]] = field(default_factory=dict)

    def step(self, index: int) -> None:
        """One step of the case; the schedule stays where it is until `advance`."""
        for value in self.set_lrs.get(index, ()):
            self.optimizer.set_lr(value)
        self.optimizer.zero_grad(set_to_none=not self.keeps_zeros)
        for param, grad in zip(self.params.values(), self.case.grads[index], strict=True):
            if grad is not None and param.requires_grad:
                param.grad = _gradient(grad, param)
        for clip, names in self.clips:
            clip.clip_params([self.params[name] for name in names])
        self.optimizer.step()

    def advance(self) -> None:
        """What the caller of a scheduler does after each step."""
        if self.scheduler is not None:
            self.scheduler.step()


def parameters(
    where: str, specs: list[Any], dtype: torch.dtype, **optional: Any
) -> dict[str, SimpleNamespace]:
    """The entries of `params` by name, each with its parameter under `tensor`."""
    found = {}
    for spec in specs:
        entry = fields(f"{where} params", spec, *PARAM, trainable=True, **optional)
        if entry.name in found:
            raise FormatError(f"{where}: two parameters are called {entry.name!r}.")
        values = torch.tensor(entry.init, dtype=dtype).reshape(entry.shape)
        entry.tensor = torch.nn.Parameter(values, requires_grad=entry.trainable)
        found[entry.name] = entry
    return found


def tensors(specs: dict[str, SimpleNamespace]) -> dict[str, torch.nn.Parameter]:
    return {name: spec.tensor for name, spec in specs.items()}


def named(
    params: dict[str, torch.nn.Parameter], names: list[str]
) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, params[name]) for name in names]


def patterns(names: list[str]) -> list[str] | None:
    return [f"^{re.escape(name)}$" for name in names] or None


def _gradient(grad: Any, param: Tensor) -> Tensor:
    if isinstance(grad, dict):
        sparse = fields("grads", grad, "rows", "values")
        values = torch.tensor(sparse.values, dtype=param.dtype).reshape(
            len(sparse.rows), *param.shape[1:]
        )
        return torch.sparse_coo_tensor(
            torch.tensor([sparse.rows]), values, param.shape, check_invariants=True
        )
    return torch.tensor(grad, dtype=param.dtype).reshape(param.shape)


def events_of(where: str, case: SimpleNamespace) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for spec in case.events:
        event = fields(f"{where} events", spec, "before_step", "op", "value")
        if event.op != "set_lr" or event.before_step not in range(len(case.grads)):
            raise FormatError(f"{where} events: unknown event {spec!r}.")
        found.setdefault(event.before_step, []).append(event.value)
    return found


def rate_of(where: str, spec: Any) -> float | Schedule:
    return schedule(where, spec) if isinstance(spec, dict) else spec


def lr_of(rate: float | Schedule, driver: str) -> Any:
    """What the optimizer is built with: under a scheduler the peak, otherwise the rate itself."""
    return rate.peak if isinstance(rate, Schedule) and driver == SCHEDULER else rate
