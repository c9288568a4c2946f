"""Cases of MindSpore: LazyAdam."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from optrun.optimizer import LazyAdam
from tests.reference.reference_format import FormatError, fields
from tests.reference.reference_player import (
    CASE,
    SCHEDULER,
    Player,
    events_of,
    lr_of,
    named,
    parameters,
    rate_of,
    tensors,
)
from tests.reference.reference_schedules import Schedule, constant


def lazy_adam(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, driver: str
) -> Player:
    case = fields(
        where, raw, *CASE, covers=[], groups=None, schedule=None, events=[], sparse_mode="rows"
    )
    if case.sparse_mode not in ("rows", "dedup"):
        raise FormatError(f"{where}: unknown sparse_mode {case.sparse_mode!r}.")
    config = fields(
        f"{where} config",
        case.config,
        learning_rate=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        use_locking=False,
        use_nesterov=False,
        weight_decay=0.0,
        loss_scale=1.0,
    )
    specs = parameters(where, case.params, dtype)
    params, shapes = tensors(specs), {name: spec.shape for name, spec in specs.items()}
    rate = rate_of(where, case.schedule or config.learning_rate)
    groups, order = _lazy_groups(where, case.groups)
    rates = [rate if group.lr is None else rate_of(where, group.lr) for group in groups]
    _refuse_short(where, [rate, *rates], len(case.grads))
    built: list[dict[str, Any]] = []
    curves: list[Schedule] = []
    for group, own in zip(groups, rates, strict=True):
        options: dict[str, Any] = {}
        if group.lr is not None:
            options["lr"] = lr_of(own, driver)
        if group.weight_decay is not None:
            options["weight_decay"] = rate_of(where, group.weight_decay)
        centred = [n for n in group.params if group.grad_centralization and _centres(shapes[n])]
        rest = [name for name in group.params if name not in centred]
        for names, more in ((centred, {"grad_centralization": True}), (rest, {})):
            if names:
                built.append({"params": named(params, names), **options, **more})
                curves.append(own if isinstance(own, Schedule) else constant(own))
    optimizer = LazyAdam(
        built or named(params, list(params)),
        lr=lr_of(rate, driver),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        nesterov=config.use_nesterov,
        loss_scale=config.loss_scale,
        eps_form="mindspore",
        foreach=foreach,
    )
    made = Player(
        case, optimizer, params, rate, set_lrs=events_of(where, case), order=order or list(params)
    )
    made.decays = _lazy_decays(where, config, groups, list(params))
    if driver == SCHEDULER:
        run = rate if isinstance(rate, Schedule) else constant(rate)
        if any(group.lr is not None for group in groups):
            # One function for each group: torch's scheduler has them, ours one for all.
            made.scheduler = LambdaLR(optimizer, [curve.multiplier for curve in curves])
        else:
            made.scheduler = run.attach(optimizer, len(case.grads))
    case.config = config
    return made


def _lazy_groups(where: str, groups: list[Any] | None) -> tuple[list[SimpleNamespace], list[str]]:
    """The groups with parameters, and the order of the optimizer's parameters."""
    found, order = [], None
    for group in groups or ():
        if "order_params" in group:
            order = fields(f"{where} groups", group, "order_params").order_params
        else:
            known = {"lr": None, "weight_decay": None, "grad_centralization": False}
            found.append(fields(f"{where} groups", group, "params", **known))
    listed = [name for group in found for name in group.params]
    if order is not None and sorted(order) != sorted(listed):
        raise FormatError(f"{where} groups: order_params {order} is not the groups' {listed}.")
    return found, order or listed


def _centres(shape: list[int]) -> bool:
    """The package leaves tensors alone whose second dimension is no multiple of 16."""
    return len(shape) >= 2 and shape[1] % 16 == 0


def _refuse_short(where: str, rates: list[float | Schedule], steps: int) -> None:
    for rate in rates:
        if isinstance(rate, Schedule) and rate.length is not None and rate.length < steps:
            raise FormatError(f"{where}: a list of {rate.length} rates for {steps} steps.")


def _lazy_decays(
    where: str, config: SimpleNamespace, groups: list[SimpleNamespace], names: list[str]
) -> dict[str, Callable[[int], float]]:
    """Weight decay by name and step.

    The group's, or the optimizer's except where a name holds beta or gamma.
    """

    def of_step(decay: Any) -> Callable[[int], float]:
        rate = rate_of(where, decay)
        return rate if isinstance(rate, Schedule) else constant(rate)

    if not groups:
        ruled = {
            name: 0.0 if "beta" in name or "gamma" in name else config.weight_decay
            for name in names
        }
        return {name: of_step(decay) for name, decay in ruled.items()}
    return {
        name: of_step(config.weight_decay if group.weight_decay is None else group.weight_decay)
        for group in groups
        for name in group.params
    }
