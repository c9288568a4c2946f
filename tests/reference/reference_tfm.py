"""Cases of the TensorFlow Model Garden: LAMB."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch

from optrun.optimizer import Lamb
from optrun.optimizer.clip import Clip, build_clip
from optrun.scheduler import curves
from tests.reference.reference_format import FormatError, fields
from tests.reference.reference_player import (
    CASE,
    SCHEDULER,
    Player,
    events_of,
    lr_of,
    parameters,
    rate_of,
    tensors,
)
from tests.reference.reference_schedules import Schedule, of_function


def tfm_config(where: str, config: dict[str, Any]) -> SimpleNamespace:
    """Keywords of the Model Garden's LAMB.

    `lr` is its other name for `learning_rate`, and wins over it.
    """
    found = fields(
        where,
        config,
        lr=None,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay_rate=0.0,
        exclude_from_weight_decay=None,
        exclude_from_layer_adaptation=None,
        clipnorm=None,
        clipvalue=None,
        global_clipnorm=None,
        decay=0.0,
        name="LAMB",
    )
    if found.lr is not None:
        found.learning_rate = found.lr
    return found


def tfm_name(name: str) -> str:
    """What patterns are searched in: the variable's name without one `:<digits>` at its end."""
    return re.sub(r":\d+$", "", name)


def tfm_optimizer(params: Any, config: SimpleNamespace, lr: Any, **options: Any) -> Lamb:
    """The Model Garden adapts without decay, and excludes from adaptation what it excludes from
    decay unless told.
    """
    no_decay = list(config.exclude_from_weight_decay or ())
    no_adaptation = list(config.exclude_from_layer_adaptation or ()) or no_decay
    return Lamb(
        params,
        lr=lr,
        betas=(config.beta_1, config.beta_2),
        eps=config.epsilon,
        weight_decay=config.weight_decay_rate,
        always_adapt=True,
        step_count="optimizer",
        exclude_from_weight_decay=no_decay or None,
        exclude_from_layer_adaptation=no_adaptation or None,
        **options,
    )


def tfm_clips(where: str, config: SimpleNamespace) -> list[Clip]:
    """Value first, then one of the norms."""
    if config.clipnorm is not None and config.global_clipnorm is not None:
        raise FormatError(f"{where}: clipnorm and global_clipnorm exclude each other.")
    clips = []
    if config.clipvalue is not None:
        clips.append(build_clip("value", max_value=config.clipvalue))
    if config.clipnorm is not None:
        clips.append(build_clip("norm", max_norm=config.clipnorm, eps=0.0))
    if config.global_clipnorm is not None:
        clips.append(build_clip("global_norm", max_norm=config.global_clipnorm, eps=0.0))
    return clips


def tfm_rate(
    base: float | Schedule, decay: float, set_lrs: dict[int, list[float]]
) -> float | Schedule:
    """`decay` damps a rate, a schedule and a rate set by hand alike.

    The last replaces a schedule.
    """
    if isinstance(base, Schedule) and not decay and not set_lrs:
        return base
    if not isinstance(base, Schedule) and not decay:
        return base
    damp = {"decay_rate": decay, "decay_steps": 1}
    if not isinstance(base, Schedule) and not set_lrs:
        return Schedule(base, lambda step: curves.inverse_time(step, **damp), "inverse_time", damp)

    def rate(step: int) -> float:
        earlier = [at for at in sorted(set_lrs) if at <= step]
        if earlier:
            return set_lrs[earlier[-1]][-1]
        return base(step) if isinstance(base, Schedule) else base

    return of_function(curves.product(rate, lambda step: curves.inverse_time(step, **damp)))


def tfm_lamb(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, driver: str
) -> Player:
    case = fields(where, raw, *CASE, covers=[], schedule=None, events=[])
    config = tfm_config(f"{where} config", case.config)
    specs = parameters(where, case.params, dtype)
    set_lrs = events_of(where, case)
    rate = tfm_rate(rate_of(where, case.schedule or config.learning_rate), config.decay, set_lrs)
    named = [(tfm_name(name), spec.tensor) for name, spec in specs.items()]
    optimizer = tfm_optimizer(
        named, config, lr_of(rate, driver), unmatched_patterns="ignore", foreach=foreach
    )
    made = Player(
        case,
        optimizer,
        tensors(specs),
        rate,
        [(clip, list(specs)) for clip in tfm_clips(where, config)],
    )
    made.set_lrs = {} if isinstance(rate, Schedule) else set_lrs
    if driver == SCHEDULER and isinstance(rate, Schedule):
        made.scheduler = rate.attach(optimizer, len(case.grads))
    case.config = config
    return made
