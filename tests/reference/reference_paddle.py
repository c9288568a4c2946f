"""Cases of Paddle and PaddleNLP: Lamb, Adamax, AdamWDL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from optrun.optimizer import Adamax, AdamWDL, Lamb
from optrun.optimizer.clip import Clip, build_clip
from tests.reference.reference_format import FormatError, fields
from tests.reference.reference_player import (
    CASE,
    SCHEDULER,
    Player,
    events_of,
    lr_of,
    named,
    parameters,
    patterns,
    tensors,
)
from tests.reference.reference_schedules import Schedule, schedule

PADDLE_PARAM = {"need_clip": True, "lr_scale": 1.0, "regularizer": None, "key": None}
PADDLE = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "grad_clip": None}


def _paddle_case(where: str, case: dict[str, Any], **optional: Any) -> SimpleNamespace:
    return fields(
        where,
        case,
        *CASE,
        covers=[],
        schedule=None,
        events=[],
        clear_grad_set_to_zero=True,
        **optional,
    )


def _paddle_groups(
    where: str,
    case: SimpleNamespace,
    specs: dict[str, SimpleNamespace],
    config: SimpleNamespace,
    **options: Any,
) -> list[SimpleNamespace]:
    """Groups of a Paddle case.

    Those it has, or one for each parameter, which may carry a scale or regularizer.

    A group wipes the scale and the regularizer that its parameters carry; `weight_decay: null`
    falls back.
    """
    base = {"learning_rate": 1.0, "weight_decay": None, "grad_clip": config.grad_clip, **options}
    if case.groups is not None:
        groups = [fields(f"{where} groups", group, "params", **base) for group in case.groups]
    else:
        groups = [
            SimpleNamespace(
                **{
                    **base,
                    "params": [name],
                    "learning_rate": spec.lr_scale,
                    "weight_decay": spec.regularizer,
                }
            )
            for name, spec in specs.items()
        ]
    for group in groups:
        decay = (
            getattr(config, "weight_decay", None)
            if group.weight_decay is None
            else group.weight_decay
        )
        group.l1, group.l2 = _coupled(where, decay)
    return groups


def _coupled(where: str, regularizer: Any) -> tuple[float, float]:
    """Coefficients of L1 and L2; a number is L2."""
    if not isinstance(regularizer, dict):
        return 0.0, regularizer or 0.0
    decay = fields(f"{where} weight_decay", regularizer, "kind", "coeff")
    if decay.kind not in ("L1", "L2"):
        raise FormatError(f"{where} weight_decay: unknown kind {decay.kind!r}.")
    return (decay.coeff, 0.0) if decay.kind == "L1" else (0.0, decay.coeff)


def _paddle_clips(
    where: str,
    specs: dict[str, SimpleNamespace],
    config: SimpleNamespace,
    groups: list[SimpleNamespace] | None,
) -> list[tuple[Clip, list[str]]]:
    """Paddle clips each parameter group by itself; `need_clip: false` takes a parameter out."""
    parts = [(group.grad_clip, group.params) for group in groups or ()] or [
        (config.grad_clip, list(specs))
    ]
    clips = []
    for spec, names in parts:
        taking_part = [name for name in names if specs[name].trainable and specs[name].need_clip]
        if spec is not None and taking_part:
            clips.append((clip_of(f"{where} grad_clip", spec), taking_part))
    return clips


def _paddle_player(
    where: str,
    case: SimpleNamespace,
    specs: dict[str, SimpleNamespace],
    config: SimpleNamespace,
    groups: list[SimpleNamespace],
    driver: str,
    build: Callable[[Any], Any],
) -> Player:
    """Play an optimizer of Paddle, which `build` makes from its rate."""
    rate = config.learning_rate if case.schedule is None else schedule(where, case.schedule)
    if case.events and isinstance(rate, Schedule):
        raise FormatError(f"{where}: Paddle refuses set_lr under a schedule.")
    grouped = groups if case.groups is not None else None
    made = Player(
        case,
        build(lr_of(rate, driver)),
        tensors(specs),
        rate,
        _paddle_clips(where, specs, config, grouped),
        case.clear_grad_set_to_zero,
        events_of(where, case),
    )
    if driver == SCHEDULER and isinstance(rate, Schedule):
        made.scheduler = rate.attach(made.optimizer, len(case.grads))
    return made


def paddle_lamb(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, driver: str
) -> Player:
    case = _paddle_case(where, raw, groups=None)
    defaults = {
        **PADDLE,
        "epsilon": 1e-6,
        "lamb_weight_decay": 0.01,
        "always_adapt": False,
        "multi_precision": False,
    }
    config = fields(f"{where} config", case.config, **defaults, exclude_names=[])
    specs = parameters(where, case.params, dtype, **PADDLE_PARAM)
    own = ("beta1", "beta2", "epsilon", "lamb_weight_decay", "exclude_names")
    groups = _paddle_groups(
        where, case, specs, config, **{key: getattr(config, key) for key in own}
    )

    def build(lr: Any) -> Lamb:
        return Lamb(
            [
                {
                    "params": named(tensors(specs), group.params),
                    "lr_scale": group.learning_rate,
                    "betas": (group.beta1, group.beta2),
                    "eps": group.epsilon,
                    "weight_decay": group.lamb_weight_decay,
                    "exclude_from_weight_decay": patterns(group.exclude_names),
                    "l1": group.l1,
                    "l2": group.l2,
                }
                for group in groups
            ],
            lr=lr,
            always_adapt=config.always_adapt,
            master_weights=config.multi_precision,
            unmatched_patterns="ignore",
            foreach=foreach,
        )

    return _paddle_player(where, case, specs, config, groups, driver, build)


def paddle_adamax(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, driver: str
) -> Player:
    case = _paddle_case(where, raw, groups=None)
    config = fields(f"{where} config", case.config, **PADDLE, epsilon=1e-8, weight_decay=None)
    specs = parameters(where, case.params, dtype, **PADDLE_PARAM)
    own = ("beta1", "beta2", "epsilon")
    groups = _paddle_groups(
        where, case, specs, config, **{key: getattr(config, key) for key in own}
    )

    def build(lr: Any) -> Adamax:
        return Adamax(
            [
                {
                    "params": named(tensors(specs), group.params),
                    "lr_scale": group.learning_rate,
                    "betas": (group.beta1, group.beta2),
                    "eps": group.epsilon,
                    "weight_decay_mode": "l1" if group.l1 else "l2",
                    "weight_decay": group.l1 or group.l2,
                }
                for group in groups
            ],
            lr=lr,
            foreach=foreach,
        )

    return _paddle_player(where, case, specs, config, groups, driver, build)


def adamwdl(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, driver: str
) -> Player:
    """Parameters go under the framework's own names.

    Which `name_dict` maps to the structured ones.
    """
    case = _paddle_case(where, raw)
    case.groups = None
    config = fields(
        f"{where} config",
        case.config,
        **PADDLE,
        epsilon=1e-8,
        weight_decay=0.01,
        layerwise_decay=1.0,
        n_layers=12,
        decay="twice",
        apply_decay_keys=None,
        ratios=None,
        lazy_mode=False,
        multi_precision=False,
    )
    forms = {"twice": "paddlenlp", "once": "paddlenlp-2.2"}
    if config.decay not in forms:
        raise FormatError(f"{where}: unknown decay {config.decay!r}.")
    specs = parameters(
        where,
        case.params,
        dtype,
        **{key: PADDLE_PARAM[key] for key in ("need_clip", "lr_scale", "key")},
    )
    keys = {name: spec.key or name for name, spec in specs.items()}
    options: dict[str, Any] = {}
    if config.apply_decay_keys is not None:
        options["apply_decay_param_fun"] = lambda key: key in config.apply_decay_keys
    if config.ratios is not None:
        options["set_param_lr_fun"] = lambda rate, names, depth, param: config.ratios[
            names[param.name]
        ]

    def build(lr: Any) -> AdamWDL:
        return AdamWDL(
            [
                {"params": [(keys[name], spec.tensor)], "lr_scale": spec.lr_scale}
                for name, spec in specs.items()
            ],
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            layerwise_decay=config.layerwise_decay,
            n_layers=config.n_layers,
            name_dict={key: name for name, key in keys.items()},
            decay_form=forms[config.decay],
            lazy_mode=config.lazy_mode,
            master_weights=config.multi_precision,
            foreach=foreach,
            **options,
        )

    return _paddle_player(where, case, specs, config, [], driver, build)


def clip_of(where: str, spec: Any) -> Clip:
    """A clip of Paddle."""
    kind = spec.get("kind") if isinstance(spec, dict) else spec
    if kind == "value":
        clip = fields(where, spec, "kind", "max", min=None)
        return build_clip("value", max_value=clip.max, min_value=clip.min)
    if kind in ("global_norm", "norm"):
        return build_clip(
            kind, max_norm=fields(where, spec, "kind", "clip_norm").clip_norm, eps=0.0
        )
    raise FormatError(f"{where}: unknown clip {spec!r}; known kinds are global_norm, norm, value.")
