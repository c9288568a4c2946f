"""Every value table beside the cases, held against optrun's functions and against what
`build_...` makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optrun.param_groups import NamedParam, layerwise_lr_decay
from optrun.scheduler import inverse_sqrt
from tests.reference.reference_format import (
    DTYPES,
    RTOL_SCHEDULE,
    FormatError,
    check_number,
    check_same,
    fields,
)
from tests.reference.reference_paddle import clip_of
from tests.reference.reference_schedules import KINDS, Schedule, schedule
from tests.reference.reference_tfm import tfm_clips, tfm_config, tfm_name, tfm_optimizer, tfm_rate

RAISED = {"KeyError": KeyError, "IndexError": IndexError, "ValueError": ValueError}
CLIP_ATOL = {"float32": 2e-7, "float64": 1e-15}


def _check_schedule(what: str, made: Schedule, values: list[float], rtol: float) -> None:
    """The curve, and the rates that a scheduler sets, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=made.peak)
    scheduler = made.attach(optimizer, len(values))
    for step, want in enumerate(values):
        check_number(f"{what}, step {step}", made(step), want, rtol=rtol)
        check_number(
            f"{what}, step {step} of build_scheduler",
            optimizer.param_groups[0]["lr"],
            want,
            rtol=rtol,
        )
        optimizer.step()
        scheduler.step()


def _schedules(package: str) -> Callable[[str, Any], None]:
    def check(where: str, entry: Any) -> None:
        table = fields(where, entry, "kind", "args", "values")
        if "kind" in table.args:
            raise FormatError(f"{where}: unknown argument 'kind'.")
        _check_schedule(
            where,
            schedule(where, {"kind": table.kind, **table.args}),
            table.values,
            RTOL_SCHEDULE[package],
        )

    return check


def _inverse_square_root(where: str, entry: Any) -> None:
    table = fields(where, entry, "args", "values")
    _check_schedule(
        where,
        KINDS["InverseSquareRootSchedule"](where, table.args),
        table.values,
        RTOL_SCHEDULE["paddle"],
    )


def _inverse_square_root_warmup_0(where: str, entry: Any) -> None:
    check_same(where, "ZeroDivisionError", entry)
    with pytest.raises(ValueError, match="num_warmup_steps=0: expected a number above 0"):
        inverse_sqrt(0, 0)


def _layerwise_ratio(where: str, entry: Any) -> None:
    table = fields(where, entry, "decay_rate", "n_layers", "name", ratio=None, raises=None)
    if (table.ratio is None) == (table.raises is None) or table.raises not in (None, *RAISED):
        known = ", ".join(RAISED)
        raise FormatError(
            f"{where}: expected a ratio or `raises`, one of {known}; got {table.ratio},"
            f" {table.raises}."
        )
    for param in ("p", NamedParam("p", torch.zeros(1))):
        arguments = (table.decay_rate, {"p": table.name}, table.n_layers, param)
        if table.raises is None:
            check_number(
                f"{where} {table.name}", layerwise_lr_decay(*arguments), table.ratio, rtol=1e-12
            )
        else:
            with pytest.raises(RAISED[table.raises]):
                layerwise_lr_decay(*arguments)


def _clip_values(where: str, entry: Any) -> None:
    table = fields(where, entry, "clip", "dtype", "need_clip", "shapes", "grads", "clipped")
    if table.dtype not in DTYPES:
        raise FormatError(f"{where}: unknown dtype {table.dtype!r}.")
    params = []
    for shape, grad in zip(table.shapes, table.grads, strict=True):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=DTYPES[table.dtype]))
        param.grad = torch.tensor(grad, dtype=DTYPES[table.dtype]).reshape(shape)
        params.append(param)
    taking_part = [param for param, wanted in zip(params, table.need_clip, strict=True) if wanted]
    clip_of(where, table.clip).clip_params(taking_part)
    for param, clipped in zip(params, table.clipped, strict=True):
        assert param.grad is not None
        for got, want in zip(param.grad.flatten().tolist(), clipped, strict=True):
            check_number(where, got, want, rtol=0.0, atol=CLIP_ATOL[table.dtype])


def _get_config(where: str, entry: Any) -> None:
    """What the package's configuration says, ours says under its own names, and builds the same
    again.
    """
    table = fields(where, entry, "kwargs", "get_config")
    config = tfm_config(f"{where} kwargs", table.kwargs)
    params = [("a/b", torch.nn.Parameter(torch.ones(1)))]
    optimizer = tfm_optimizer(params, config, config.learning_rate, unmatched_patterns="ignore")
    clips = {
        "clipnorm": config.clipnorm,
        "clipvalue": config.clipvalue,
        "global_clipnorm": config.global_clipnorm,
    }
    ours = optimizer.get_config()
    again = {
        "name": config.name,
        **{key: value for key, value in clips.items() if value is not None},
        "learning_rate": ours["lr"],
        "weight_decay_rate": ours["weight_decay"],
        "decay": config.decay,
        "beta_1": ours["betas"][0],
        "beta_2": ours["betas"][1],
        "epsilon": ours["eps"],
    }
    check_same(f"{where} get_config", sorted(again), sorted(table.get_config))
    for key, value in again.items():
        want = table.get_config[key]
        if isinstance(value, str):
            check_same(f"{where} {key}", value, want)
        else:
            check_number(f"{where} {key}", value, want, rtol=RTOL_SCHEDULE["float32"])
    rebuilt = type(optimizer).from_config(params, ours)
    check_same(f"{where} from_config(get_config())", rebuilt.get_config(), ours)
    check_same(
        f"{where} clips",
        len(tfm_clips(where, config)),
        sum(value is not None for value in clips.values()),
    )
    rate = tfm_rate(config.learning_rate, config.decay, {})
    check_number(
        f"{where} first rate", rate(0) if isinstance(rate, Schedule) else rate, ours["lr"], rtol=0.0
    )


def _normalised_name(where: str, entry: Any) -> None:
    """A pattern that spells out the recorded name finds the parameter, and one that adds to it
    does not.
    """
    table = fields(where, entry, "variable_name", "pattern_is_searched_in")
    for suffix, decays in (("$", False), (".", True)):
        param = torch.nn.Parameter(torch.ones(1))
        pattern = f"^{re.escape(table.pattern_is_searched_in)}{suffix}"
        config = tfm_config(
            where, {"weight_decay_rate": 0.1, "exclude_from_weight_decay": [pattern]}
        )
        named = [(tfm_name(table.variable_name), param)]
        optimizer = tfm_optimizer(named, config, 0.1, unmatched_patterns="ignore")
        check_same(
            f"{where}: {table.variable_name} decays under {pattern}",
            optimizer.decays(named[0][0]),
            decays,
        )


CHECKS: dict[str, Callable[[str, Any], None]] = {
    "clip_values": _clip_values,
    "layerwise_ratios": _layerwise_ratio,
    "inverse_square_root": _inverse_square_root,
    "inverse_square_root_warmup_0_raises": _inverse_square_root_warmup_0,
    "paddle_schedules": _schedules("paddle"),
    "keras_schedules": _schedules("float32"),
    "mindspore_schedules": _schedules("float32"),
    "get_config": _get_config,
    "normalised_names": _normalised_name,
}
"""Table -> what holds one entry of it against optrun."""
