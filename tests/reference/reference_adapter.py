"""From a recorded case to optrun's public API: names are translated, nothing is computed.

Formulas live in the package, expected numbers in the JSON files; what stands here is which keyword is called what.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrun.clip import Clip, build_clip
from optrun.optimizer import Adamax, AdamWDL, Lamb, LazyAdam
from optrun.scheduler import curves

DTYPES = {"float32": torch.float32, "float64": torch.float64}

ATOL = {
    ("paddle_lamb", "float32"): 3e-6,
    ("paddle_lamb", "float64"): 1e-6,
    ("paddle_adamax", "float32"): 2e-6,
    ("paddle_adamax", "float64"): 2e-7,
    ("paddlenlp_adamwdl", "float32"): 7e-6,
    ("paddlenlp_adamwdl", "float64"): 1e-8,
    ("tfm_lamb", "float32"): 2e-6,
    ("tfm_lamb", "float64"): 1e-7,
    ("mindspore_lazyadam", "float32"): 4e-6,
}
"""Absolute tolerance by file and by the dtype a case was recorded in; the relative one is 1e-6 throughout."""

LEFT_OUT = {
    "lazy_sparse_fused_dup_wd": "a row listed k times gets k times the weight decay",
    "lazy_sparse_dup_no_dedup": "repeated rows overwrite each other's moments; which one stays depends on their order",
}
"""Defects nobody wants; see the README beside this file."""


def reference_dir() -> Path:
    """Where the recorded cases lie."""
    return Path(os.environ.get("OPTRUN_REFERENCE_DIR") or Path(__file__).parent)


def load(system: str) -> dict[str, Any]:
    """One file of recorded cases and tables."""
    return json.loads((reference_dir() / f"{system}.json").read_text(encoding="utf-8"))


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case of every system."""
    for system in ("paddle_lamb", "paddle_adamax", "paddlenlp_adamwdl", "tfm_lamb", "mindspore_lazyadam"):
        for case in load(system)["cases"]:
            yield system, case


@dataclass
class Player:
    """A case ready to be played: the optimizer, its clips, and what each step gets."""

    case: dict[str, Any]
    optimizer: Any
    params: dict[str, torch.nn.Parameter]
    clips: list[tuple[Clip, list[str]]] = field(default_factory=list)
    keeps_zeros: bool = False
    events_in_schedule: bool = False

    def play(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Step through the case; yields the step and the parameters after it."""
        for step, grads in enumerate(self.case["grads"]):
            for event in self.case.get("events", ()):
                if event["before_step"] == step and not self.events_in_schedule:
                    self.optimizer.set_lr(event["value"])
            self.optimizer.zero_grad(set_to_none=not self.keeps_zeros)
            for param, grad in zip(self.params.values(), grads, strict=True):
                if grad is not None and param.requires_grad:
                    param.grad = _gradient(grad, param)
            for clip, names in self.clips:
                clip.clip_params([(name, self.params[name]) for name in names])
            self.optimizer.step()
            yield step, {name: param.detach() for name, param in self.params.items()}


def player(system: str, case: dict[str, Any], *, dtype: torch.dtype, foreach: bool) -> Player:
    """Build the optimizer of a case through the public API."""
    params = {
        spec["name"]: torch.nn.Parameter(
            torch.tensor(spec["init"], dtype=dtype).reshape(spec["shape"]), requires_grad=spec.get("trainable", True)
        )
        for spec in case["params"]
    }
    build = {
        "paddle_lamb": _paddle_lamb,
        "paddle_adamax": _paddle_adamax,
        "paddlenlp_adamwdl": _adamwdl,
        "tfm_lamb": _tfm_lamb,
        "mindspore_lazyadam": _lazy_adam,
    }[system]
    return build(case, params, foreach)


def _gradient(grad: Any, param: Tensor) -> Tensor:
    if isinstance(grad, dict):
        values = torch.tensor(grad["values"], dtype=param.dtype).reshape(len(grad["rows"]), *param.shape[1:])
        return torch.sparse_coo_tensor(torch.tensor([grad["rows"]]), values, param.shape, check_invariants=True)
    return torch.tensor(grad, dtype=param.dtype).reshape(param.shape)


# -- schedules: a rate in the files is a curve times its peak ----------------------------------------------------------


def _times(peak: float, curve: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: peak * curve(step)


def schedule(spec: dict[str, Any]) -> Callable[[int], float]:
    """A schedule of any of the systems as a function of the step."""
    args = {key: value for key, value in spec.items() if key != "kind"}
    match spec["kind"]:
        case "StepDecay":
            return _times(args["learning_rate"], partial(curves.step, step_size=args["step_size"], gamma=args["gamma"]))
        case "NoamDecay":
            curve = partial(curves.noam, d_model=args["d_model"], num_warmup_steps=args["warmup_steps"])
            return _times(args["learning_rate"], curve)
        case "InverseSquareRootSchedule":
            return _times(args["learning_rate"], partial(curves.inverse_sqrt, num_warmup_steps=args["warmup_steps"]))
        case "PiecewiseDecay":
            return partial(curves.piecewise, values=args["values"], boundaries=args["boundaries"])
        case "PiecewiseConstantDecay":
            return partial(curves.piecewise, values=args["values"], boundaries=args["boundaries"], boundary="keras")
        case "ExponentialDecay" | "ExponentialDecayLR":
            stairs = args.get("staircase", args.get("is_stair", False))
            curve = partial(
                curves.exponential,
                decay_rate=args["decay_rate"],
                decay_steps=args["decay_steps"],
                staircase=stairs,
            )
            return _times(args.get("initial_learning_rate", args.get("learning_rate")), curve)
        case "PolynomialDecay" | "PolynomialDecayLR":
            peak = args.get("initial_learning_rate", args.get("learning_rate"))
            final = args["end_learning_rate"] / peak
            curve = partial(curves.polynomial, decay_steps=args["decay_steps"], final=final, power=args["power"])
            return _times(peak, curve)
        case "CosineDecay":
            curve = partial(curves.cosine, decay_steps=args["decay_steps"], final=args["alpha"])
            return _times(args["initial_learning_rate"], curve)
        case "CosineDecayLR":
            final = args["min_lr"] / args["max_lr"]
            return _times(args["max_lr"], partial(curves.cosine, decay_steps=args["decay_steps"], final=final))
        case "WarmUpLR":
            return _times(args["learning_rate"], partial(curves.warmup, num_warmup_steps=args["warmup_steps"]))
        case "list":
            return partial(curves.piecewise, values=args["values"])
    raise KeyError(spec["kind"])


def _rate(value: Any) -> Any:
    return schedule(value) if isinstance(value, dict) else value


def _paddle_lr(case: dict[str, Any]) -> Any:
    return schedule(case["schedule"]) if "schedule" in case else case["config"]["learning_rate"]


# -- clips ------------------------------------------------------------------------------------------------------------


def _clip(spec: dict[str, Any], out: list[str]) -> Clip:
    exclude = [f"^{re.escape(name)}$" for name in out]
    match spec["kind"]:
        case "global_norm":
            return build_clip("global_norm", max_norm=spec["clip_norm"], eps=0.0)
        case "norm":
            return build_clip("norm", max_norm=spec["clip_norm"], eps=0.0, exclude=exclude)
        case "value":
            return build_clip("value", max_value=spec["max"], min_value=spec["min"], exclude=exclude)
    raise KeyError(spec["kind"])


def _paddle_clips(case: dict[str, Any]) -> list[tuple[Clip, list[str]]]:
    """Paddle clips each parameter group by itself; `need_clip=False` takes a parameter out."""
    specs = {spec["name"]: spec for spec in case["params"]}
    groups = case.get("groups") or [{"params": list(specs)}]
    clips = []
    for group in groups:
        spec = group.get("grad_clip", case["config"].get("grad_clip"))
        names = [name for name in group["params"] if specs[name].get("trainable", True)]
        names = [name for name in names if specs[name].get("need_clip", True)]
        if spec is not None and names:
            clips.append((_clip(spec, []), names))
    return clips


# -- the systems ------------------------------------------------------------------------------------------------------


def _named(params: dict[str, torch.nn.Parameter], names: list[str]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, params[name]) for name in names]


def _patterns(names: list[str]) -> list[str] | None:
    return [f"^{re.escape(name)}$" for name in names] or None


def _renamed(source: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {new: source[old] for old, new in names.items() if old in source}


def _betas(source: dict[str, Any], first: str, second: str, base: tuple[float, float] = (0.9, 0.999)) -> dict[str, Any]:
    if first not in source and second not in source:
        return {}
    return {"betas": (source.get(first, base[0]), source.get(second, base[1]))}


def _coupled(regularizer: Any, l1: str, l2: str) -> dict[str, Any]:
    """A regularizer of Paddle: a number is L2."""
    if regularizer is None:
        return {}
    if isinstance(regularizer, dict):
        return {l1 if regularizer["kind"] == "L1" else l2: regularizer["coeff"]}
    return {l2: regularizer}


def _one_by_one(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups of the case; where parameters carry a scale or regularizer of their own, one group each."""
    if "groups" in case:
        return case["groups"]
    if any("lr_scale" in spec or "regularizer" in spec for spec in case["params"]):
        return [
            {
                "params": [spec["name"]],
                "learning_rate": spec.get("lr_scale", 1.0),
                **({"weight_decay": spec["regularizer"]} if "regularizer" in spec else {}),
            }
            for spec in case["params"]
        ]
    return [{"params": [spec["name"] for spec in case["params"]]}]


def _paddle_lamb(case: dict[str, Any], params: dict[str, torch.nn.Parameter], foreach: bool) -> Player:
    names = {"epsilon": "eps", "lamb_weight_decay": "weight_decay", "always_adapt": "always_adapt"}
    config = case["config"]
    groups = []
    for group in _one_by_one(case):
        options = _renamed(group, {"learning_rate": "lr_scale", "epsilon": "eps", "lamb_weight_decay": "weight_decay"})
        options |= _betas(group, "beta1", "beta2") | _coupled(group.get("weight_decay"), "l1", "l2")
        if "exclude_names" in group:
            options["exclude_from_weight_decay"] = _patterns(group["exclude_names"])
        groups.append({"params": _named(params, group["params"]), **options})
    optimizer = Lamb(
        groups,
        lr=_paddle_lr(case),
        exclude_from_weight_decay=_patterns(config.get("exclude_names", [])),
        unmatched_patterns="ignore",
        foreach=foreach,
        **_renamed(config, names),
        **_betas(config, "beta1", "beta2"),
    )
    return Player(case, optimizer, params, _paddle_clips(case), case.get("clear_grad_set_to_zero", True))


def _paddle_adamax(case: dict[str, Any], params: dict[str, torch.nn.Parameter], foreach: bool) -> Player:
    def decay(regularizer: Any) -> dict[str, Any]:
        named = _coupled(regularizer, "l1", "l2")
        return {
            key: value for mode in named for key, value in (("weight_decay_mode", mode), ("weight_decay", named[mode]))
        }

    config = case["config"]
    groups = []
    for group in _one_by_one(case):
        options = _renamed(group, {"learning_rate": "lr_scale", "epsilon": "eps"})
        options |= _betas(group, "beta1", "beta2") | decay(group.get("weight_decay"))
        groups.append({"params": _named(params, group["params"]), **options})
    optimizer = Adamax(
        groups,
        lr=_paddle_lr(case),
        foreach=foreach,
        **_renamed(config, {"epsilon": "eps"}),
        **_betas(config, "beta1", "beta2"),
        **decay(config.get("weight_decay")),
    )
    return Player(case, optimizer, params, _paddle_clips(case), case.get("clear_grad_set_to_zero", True))


def _adamwdl(case: dict[str, Any], params: dict[str, torch.nn.Parameter], foreach: bool) -> Player:
    """Parameters go under the framework's own names, which `name_dict` maps to the structured ones."""
    config = case["config"]
    keys = {spec["name"]: spec["key"] for spec in case["params"]}
    structured = {key: name for name, key in keys.items()}
    options = _renamed(
        config,
        {
            "epsilon": "eps",
            "weight_decay": "weight_decay",
            "layerwise_decay": "layerwise_decay",
            "n_layers": "n_layers",
        },
    )
    if "apply_decay_keys" in config:
        options["apply_decay_param_fun"] = lambda key: key in config["apply_decay_keys"]
    if "ratios" in config:
        options["set_param_lr_fun"] = lambda rate, names, depth, param: config["ratios"][names[param.name]]
    groups = [
        {
            "params": [(keys[name], params[name]) for name in group["params"]],
            "lr_scale": group.get("learning_rate", 1.0),
        }
        for group in _one_by_one(case)
    ]
    optimizer = AdamWDL(
        groups,
        lr=_paddle_lr(case),
        name_dict=structured,
        decay_form={"twice": "paddlenlp", "once": "paddlenlp-2.2"}[config["decay"]],
        foreach=foreach,
        **options,
        **_betas(config, "beta1", "beta2"),
    )
    return Player(case, optimizer, params, _paddle_clips(case), case.get("clear_grad_set_to_zero", True))


def _tfm_lamb(case: dict[str, Any], params: dict[str, torch.nn.Parameter], foreach: bool) -> Player:
    """The Model Garden adapts without decay, and excludes from adaptation what it excludes from decay unless told."""
    config = case["config"]
    no_decay, no_adaptation = (config.get(f"exclude_from_{what}") for what in ("weight_decay", "layer_adaptation"))
    lr = schedule(case["schedule"]) if "schedule" in case else config["learning_rate"]
    if "decay" in config:
        damped = partial(curves.inverse_time, decay_rate=config["decay"], decay_steps=1)
        lr = curves.product(lr if callable(lr) else _set_rates(lr, case), damped)
    optimizer = Lamb(
        _named(params, list(params)),
        lr=lr,
        always_adapt=True,
        step_count="optimizer",
        exclude_from_weight_decay=no_decay,
        exclude_from_layer_adaptation=no_adaptation or no_decay,
        unmatched_patterns="ignore",
        foreach=foreach,
        **{"weight_decay": 0.0, **_renamed(config, {"epsilon": "eps", "weight_decay_rate": "weight_decay"})},
        **_betas(config, "beta_1", "beta_2"),
    )
    clips = []
    if "clipvalue" in config:
        clips.append(build_clip("value", max_value=config["clipvalue"]))
    if "clipnorm" in config:
        clips.append(build_clip("norm", max_norm=config["clipnorm"], eps=0.0))
    if "global_clipnorm" in config:
        clips.append(build_clip("global_norm", max_norm=config["global_clipnorm"], eps=0.0))
    return Player(
        case, optimizer, params, [(clip, list(params)) for clip in clips], events_in_schedule="decay" in config
    )


def _set_rates(lr: float, case: dict[str, Any]) -> Callable[[int], float]:
    """A rate that is set at known steps, under a schedule that would refuse `set_lr`: a piecewise one."""
    events = case.get("events", [])
    values = [lr, *(event["value"] for event in events)]
    return partial(curves.piecewise, values=values, boundaries=[event["before_step"] for event in events])


def _lazy_adam(case: dict[str, Any], params: dict[str, torch.nn.Parameter], foreach: bool) -> Player:
    config = case["config"]
    names = {"eps": "eps", "weight_decay": "weight_decay", "loss_scale": "loss_scale", "use_nesterov": "nesterov"}
    shapes = {spec["name"]: spec["shape"] for spec in case["params"]}
    groups: list[Any] = []
    for group in case.get("groups", ()):
        if "order_params" in group:
            continue
        options = {key: _rate(group[key]) for key in ("lr", "weight_decay") if key in group}
        if group.get(
            "grad_centralization"
        ):  # the package leaves tensors alone whose second dimension is no multiple of 16
            centred = [n for n in group["params"] if len(shapes[n]) >= 2 and shapes[n][1] % 16 == 0]
            groups.append({"params": _named(params, centred), "grad_centralization": True, **options})
            rest = [name for name in group["params"] if name not in centred]
        else:
            rest = group["params"]
        if rest:
            groups.append({"params": _named(params, rest), **options})
    optimizer = LazyAdam(
        groups or _named(params, list(params)),
        lr=_rate(config["learning_rate"]),
        eps_form="mindspore",
        foreach=foreach,
        **_renamed(config, names),
        **_betas(config, "beta1", "beta2"),
    )
    return Player(case, optimizer, params)
