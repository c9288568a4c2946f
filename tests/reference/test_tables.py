"""The value tables beside the trajectories: schedules, layer ratios and clips, each through public API."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optrun.clip import build_clip
from optrun.param_groups import NamedParam, layerwise_lr_decay
from optrun.scheduler import build_scheduler, inverse_sqrt
from tests.reference.reference_adapter import DTYPES, load

RAISED = {"KeyError": KeyError, "IndexError": IndexError, "ValueError": ValueError}


def _translated(kind: str, args: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """Peak lr, name of our schedule and its keys."""
    peak = args.get("learning_rate", args.get("initial_learning_rate", args.get("max_lr", 1.0)))
    staircase = args.get("staircase", args.get("is_stair", False))
    match kind:
        case "StepDecay":
            return peak, "step", {"step_size": args["step_size"], "gamma": args["gamma"]}
        case "NoamDecay":
            return peak, "noam", {"d_model": args["d_model"], "num_warmup_steps": args["warmup_steps"]}
        case "PiecewiseDecay":
            return 1.0, "piecewise", {"values": args["values"], "boundaries": args["boundaries"]}
        case "PiecewiseConstantDecay":
            lists = {"values": args["values"], "boundaries": args["boundaries"]}
            return 1.0, "piecewise", {**lists, "boundary": "keras"}
        case "ExponentialDecay" | "ExponentialDecayLR":
            keys = {"decay_rate": args["decay_rate"], "decay_steps": args["decay_steps"], "staircase": staircase}
            return peak, "exponential", keys
        case "InverseTimeDecay":
            return peak, "inverse_time", {"decay_rate": args["decay_rate"], "decay_steps": args["decay_steps"]}
        case "PolynomialDecay" | "PolynomialDecayLR":
            end = {"min_lr": args["end_learning_rate"], "decay_steps": args["decay_steps"]}
            return peak, "polynomial", {**end, "power": args["power"]}
        case "CosineDecay":
            return peak, "cosine", {"min_lr": args["alpha"] * peak, "decay_steps": args["decay_steps"]}
        case "CosineDecayLR":
            return peak, "cosine", {"min_lr": args["min_lr"], "decay_steps": args["decay_steps"]}
        case "WarmUpLR":
            return peak, "constant", {"num_warmup_steps": args["warmup_steps"]}
    raise KeyError(kind)


def _played(lr: float, name: str, options: dict[str, Any], steps: int, *, start: int = 0) -> list[float]:
    """The lr that each optimizer step is made with."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build_scheduler(optimizer, name, num_training_steps=steps + start, **options)
    lrs = []
    for step in range(start + steps):
        if step >= start:
            lrs.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return lrs


def _tables(system: str, key: str) -> list[Any]:
    return [pytest.param(table, id=f"{table.get('kind', key)}-{n}") for n, table in enumerate(load(system)[key])]


@pytest.mark.parametrize("table", _tables("paddlenlp_adamwdl", "paddle_schedules"))
def test_paddle_schedules(table: dict[str, Any]) -> None:
    lr, name, options = _translated(table["kind"], table["args"])
    assert _played(lr, name, options, len(table["values"])) == pytest.approx(table["values"], rel=1e-12, abs=0)


@pytest.mark.parametrize(
    "table", _tables("tfm_lamb", "keras_schedules") + _tables("mindspore_lazyadam", "mindspore_schedules")
)
def test_keras_and_mindspore_schedules(table: dict[str, Any]) -> None:
    lr, name, options = _translated(table["kind"], table["args"])
    assert _played(lr, name, options, len(table["values"])) == pytest.approx(table["values"], rel=3e-6, abs=0)


@pytest.mark.parametrize("table", _tables("paddlenlp_adamwdl", "inverse_square_root"))
def test_inverse_square_root(table: dict[str, Any]) -> None:
    args, values = table["args"], table["values"]
    lr, climb, start = args.get("learning_rate", 1.0), args["warmup_steps"], args.get("last_epoch", -1) + 1
    wanted = pytest.approx(values, rel=1e-12, abs=0)
    assert [lr * inverse_sqrt(start + step, climb) for step in range(len(values))] == wanted
    assert _played(lr, "inverse_sqrt", {"num_warmup_steps": climb}, len(values), start=start) == wanted


def test_inverse_square_root_needs_a_warmup() -> None:
    assert load("paddlenlp_adamwdl")["inverse_square_root_warmup_0_raises"] == "ZeroDivisionError"
    with pytest.raises(ValueError, match="num_warmup_steps=0: expected a number above 0"):
        inverse_sqrt(0, 0)
    with pytest.raises(ValueError, match="num_warmup_steps=0"):
        _played(1.0, "inverse_sqrt", {"num_warmup_steps": 0}, 1)


@pytest.mark.parametrize("entry", load("paddlenlp_adamwdl")["layerwise_ratios"], ids=lambda entry: entry["name"])
def test_layerwise_ratios(entry: dict[str, Any]) -> None:
    for param in ("p", NamedParam("p", torch.zeros(1))):
        if "raises" in entry:
            with pytest.raises(RAISED[entry["raises"]]):
                layerwise_lr_decay(entry["decay_rate"], {"p": entry["name"]}, entry["n_layers"], param)
        else:
            ratio = layerwise_lr_decay(entry["decay_rate"], {"p": entry["name"]}, entry["n_layers"], param)
            assert ratio == pytest.approx(entry["ratio"], rel=1e-12, abs=0)


@pytest.mark.parametrize(
    "table", load("paddle_lamb")["clip_values"], ids=lambda table: f"{table['clip']['kind']}-{table['need_clip']}"
)
def test_clip_values(table: dict[str, Any]) -> None:
    dtype = DTYPES[table["dtype"]]
    params = []
    for index, (shape, grad) in enumerate(zip(table["shapes"], table["grads"], strict=True)):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = torch.tensor(grad, dtype=dtype).reshape(shape)
        params.append((f"p{index}", param))
    spec = table["clip"]
    exclude = [f"^p{index}$" for index, wanted in enumerate(table["need_clip"]) if not wanted]
    if spec["kind"] == "value":
        clip = build_clip("value", max_value=spec["max"], min_value=spec["min"], exclude=exclude)
    else:
        clip = build_clip(spec["kind"], max_norm=spec["clip_norm"], eps=0.0, exclude=exclude)
    clip.clip_params(params)
    for (_, param), expected in zip(params, table["clipped"], strict=True):
        assert param.grad is not None
        error = (param.grad.flatten() - torch.tensor(expected, dtype=dtype)).abs().max()
        assert error <= (1e-15 if dtype is torch.float64 else 2e-7)
