"""Optimizers that know nothing of optrun.

What they are asked, and tried for, before a model is trained with them.

On small stand-ins one has to step, obey and come back; where the model is sharded, to step shards
as one process steps the whole.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.base.options import Group, Options, ParamGroup
from optrun.optimizer.averaged import averages, evaluation_weights
from optrun.optimizer.groups import DESCRIPTIVE_KEYS, known_keys
from optrun.optimizer.numerics import sharding_of
from optrun.optimizer.restore import sharded_like
from optrun.optimizer.state import load_named_state, named_state

ALWAYS_READ = DESCRIPTIVE_KEYS | {"params", "lr", "weight_decay"}
"""Keys of a group that need not be among an optimizer's defaults."""

NO_SHARDS = (
    "Give distributed=ddp, where each rank holds whole parameters, or another optimizer, such as"
    " optimizer=adamw."
)
"""What to do where an optimizer cannot take shards."""

Build = Callable[[list[ParamGroup]], Optimizer]

_HALF, _WHOLE = 11, 24
"""Steps; some move nothing before the tenth."""

_SIDE = 12
"""Longest side of a stand-in."""

_NEAR = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far steps over shards may be from those of one process, over the largest number.

Other dtypes: 1e-2.
"""


class _Trial:
    """A few steps on stand-ins with gradients that are always the same, at an lr that falls as a schedule's does."""

    def __init__(
        self,
        build: Build,
        groups: Sequence[Group],
        dtype: torch.dtype | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.optimizer = build(
            [_small(group, index, dtype, sharded) for index, group in enumerate(groups)]
        )
        self.lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.params: dict[str, Tensor] = {
            name: param
            for group in self.optimizer.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    def steps(self, first: int, last: int, scale: float = 1.0) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for param in self.params.values():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad = sharded_like(noise.to(param.dtype), param) + param.detach()
            lrs = [scale * lr * (1 - step / (2 * _WHOLE)) for lr in self.lrs]
            for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr
            one_step(self.optimizer, 1 / (1 + step))
            if [group["lr"] for group in self.optimizer.param_groups] != lrs:
                raise ConfigError(
                    "it sets the learning rate itself: lr and the schedule of this run would be"
                    " ignored"
                )

    def holds(self) -> dict[str, Tensor]:
        return {**self.params, **named_state(self.optimizer)[0]}


def one_step(optimizer: Optimizer, loss: float) -> None:
    """Step once, with the loss for an optimizer that follows it."""
    if getattr(optimizer, "takes_loss", False):
        optimizer.step(lambda: loss)
    else:
        optimizer.step()


def rehearse(build: Build, groups: Sequence[Group]) -> None:
    """Try an optimizer with the options and kinds of groups of a run.

    Global random states stay as they are.

    Args:
        build: Makes the optimizer over groups of (name, parameter) pairs.
        groups: Of the run; their parameters are only looked at.

    Raises:
        ConfigError: It fails, it ignores `lr` or the weight decay, or it does not come back from a
            saved state to the last bit; the message is the second half of a sentence.
    """
    kinds = _kinds(groups)
    with apart():
        straight = _Trial(build, kinds)
        straight.steps(0, _WHOLE)
        differs = _first_difference(straight, _resumed(build, kinds))
        if differs is not None:
            raise ConfigError(
                f"it does not come back from a checkpoint as it was: {differs} differs after a"
                " resume"
            )
        if _same_weights(build, kinds, scale=0.5):
            raise ConfigError(
                "its steps do not depend on lr: lr and the schedule of this run would be ignored"
            )
        if any(group.get("weight_decay") for group in kinds) and _same_weights(
            build, kinds, decay=1e4
        ):
            raise ConfigError("its steps do not depend on weight_decay, which would be ignored")


def rehearse_shards(build: Build, groups: Sequence[Group]) -> None:
    """Try an optimizer on shards of small stand-ins.

    Which lie on the ranks as the parameters of a run do.

    Every rank has to call it; it does nothing where no parameter is sharded.

    Args:
        build: Makes the optimizer over groups of (name, parameter) pairs.
        groups: Of the run; their parameters are only looked at.

    Raises:
        ConfigError: It fails on shards, its weights or its state are not those of one process, or
            it does not go on from one process's state; the message is the second half of a
            sentence.
    """
    if not any(sharding_of(param).groups for group in groups for _, param in group["params"]):
        return
    kinds = _kinds(groups)
    with apart():
        dtype: torch.dtype | None = torch.float64
        try:
            _Trial(build, kinds, dtype).steps(0, _HALF)
        except Exception:  # float64 is not what the run will use
            dtype = None
        one, shards = _Trial(build, kinds, dtype), _Trial(build, kinds, dtype, sharded=True)
        one.steps(0, _HALF)
        shards.steps(0, _HALF)
        _refuse_far("its steps over shards are not those of one process", one, shards)
        resumed = _Trial(build, kinds, dtype, sharded=True)
        with torch.no_grad():
            for name, param in resumed.params.items():
                param.copy_(sharded_like(one.params[name].detach(), param))
        tensors, meta = named_state(one.optimizer)
        load_named_state(resumed.optimizer, tensors, json.loads(json.dumps(meta)))
        one.steps(_HALF, _WHOLE)
        resumed.steps(_HALF, _WHOLE)
        _refuse_far("over shards it does not go on from one process's checkpoint", one, resumed)


def _refuse_far(what: str, one: _Trial, shards: _Trial) -> None:
    """Raise for the first tensor that is not that of one process; every rank finds the same one."""
    wanted, found = one.holds(), shards.holds()
    for name in sorted(set(wanted) | set(found)):
        if name not in wanted or name not in found:
            raise ConfigError(f"{what}: only one of the two keeps {name}")
        held = found[name]
        value = (held.full_tensor() if isinstance(held, DTensor) else held).detach()
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            shapes = f"{tuple(value.shape)} and not {tuple(wanted[name].shape)}"
            raise ConfigError(
                f"{what}: {name} has shape {shapes}, {value.dtype} and {wanted[name].dtype}"
            )
        if not value.numel() or _equal(value.cpu(), wanted[name]):
            continue
        far = (value.cpu() - wanted[name]).abs().max().item() / max(
            wanted[name].abs().max().item(), 1e-30
        )
        if not far <= _NEAR.get(value.dtype, 1e-2):
            raise ConfigError(f"{what}: {name} is {far:.0e} away")


def _kinds(groups: Sequence[Group]) -> list[Group]:
    """Choose one group of each kind.

    Its keys, whether it decays, how many dimensions its parameters have.
    """
    found: dict[object, Mapping[str, object]] = {}
    for group in groups:
        pairs = {param.dim(): (name, param) for name, param in reversed(list(group["params"]))}
        flags = (group.get("use_muon"), group.get("optimizer"))
        key = (frozenset(group), bool(group.get("weight_decay")), frozenset(pairs), flags)
        found.setdefault(key, {**group, "params": list(pairs.values())})
    return list(found.values())


def _small(group: Group, index: int, dtype: torch.dtype | None, sharded: bool) -> dict[str, object]:
    pairs = []
    for name, param in group["params"]:
        shape = [min(side, _SIDE - position) for position, side in enumerate(param.shape)]
        value = 0.02 * torch.randn(shape, dtype=dtype or param.dtype)
        if sharded and isinstance(param, DTensor):
            value = distribute_tensor(
                value, param.device_mesh, param.placements, src_data_rank=None
            )
        pairs.append((f"{index}.{name}", Parameter(value)))
    return {**group, "params": pairs}


def _resumed(build: Build, kinds: Sequence[Group]) -> _Trial:
    """Stop half-way, save as a checkpoint does, and go on with another."""
    first = _Trial(build, kinds)
    first.steps(0, _HALF)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with evaluation_weights(first.optimizer):
        weights = {name: param.detach().clone() for name, param in first.params.items()}
    tensors, meta = named_state(first.optimizer)
    saved = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    again = _Trial(build, kinds)
    with torch.no_grad():
        for name, param in again.params.items():
            param.copy_(weights[name])
    load_named_state(again.optimizer, saved, json.loads(json.dumps(meta)))
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])
    again.steps(_HALF, _WHOLE)
    return again


def _first_difference(one: _Trial, other: _Trial) -> str | None:
    before, after = one.holds(), other.holds()
    for name in sorted(set(before) | set(after)):
        if name not in before or name not in after or not _equal(before[name], after[name]):
            return name
    same = named_state(one.optimizer)[1] == named_state(other.optimizer)[1]
    return None if same else "what it counts"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare to the last bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(
        *(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    )


def _same_weights(
    build: Build, kinds: Sequence[Group], scale: float = 1.0, decay: float = 1.0
) -> bool:
    """Tell whether another lr, or another decay, leads to the same weights.

    In float64, to round nothing away.

    One that does not step float64 is judged in its own dtype.
    """

    def weights(dtype: torch.dtype | None, scale: float, decay: float) -> list[Tensor]:
        others = [
            {**group, **{key: decay * group[key] for key in group if key == "weight_decay"}}
            for group in kinds
        ]
        trial = _Trial(build, others, dtype)
        trial.steps(0, _WHOLE, scale)
        return list(trial.params.values())

    try:
        pair = weights(torch.float64, 1.0, 1.0), weights(torch.float64, scale, decay)
    except Exception:  # float64 is not what the run will use
        pair = weights(None, 1.0, 1.0), weights(None, scale, decay)
    return all(map(_equal, *pair))


@contextmanager
def apart() -> Iterator[None]:
    """Hide what is tried from outside: no random number drawn, no warning."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def build_plain(
    choice: str, cls: Any, param_groups: Sequence[Group], *, lr: float, **options: Any
) -> Optimizer:
    """Build a registered torch optimizer, tried before on small stand-ins with the same options.

    Args:
        choice: Its name.
        cls: Takes parameters, `lr` and the options.
        param_groups: Group dicts with (name, parameter) pairs.
        lr: Base learning rate.
        **options: The fields of its schema.

    Raises:
        ConfigError: It fails, an option would be ignored, or it would not come back from a
            checkpoint.
        TypeError: For an option that its constructor does not have.
    """
    keywords = set(inspect.signature(cls).parameters) - {"params"}
    options = without_no_decay(options, keywords)
    groups = [without_no_decay(group, keywords) for group in param_groups]
    known_keys(options, keywords, cls.__name__)
    refuse_group_keys(choice, cls, groups, keywords)

    def refuse(built: Optimizer) -> None:
        for group in groups:
            refuse_unread_keys(built, group)

    hint = "Mend it, or take another optimizer."
    build = builder(cls, options, lr=lr)
    return tried(
        build, groups, refuse=refuse, key=f"optimizer={choice}", owner=cls.__name__, hint=hint
    )


def builder(cls: Any, options: Options, *, lr: float, **marks: Any) -> Build:
    """Return what makes an optimizer of others over groups, ready to train.

    `marks` are attributes it is given.
    """

    def build(groups: Sequence[Group]) -> Optimizer:
        built: Any = cls([dict(group) for group in groups], lr=lr, **options)
        vars(built).update(marks)
        if averages(built):
            built.train()
        assert isinstance(built, Optimizer)
        return built

    return build


def tried(
    build: Build,
    groups: Sequence[Group],
    *,
    key: str,
    owner: str,
    hint: str,
    refuse: Callable[[Optimizer], None] = lambda _: None,
) -> Optimizer:
    """Build an optimizer that steps, obeys and comes back from a checkpoint.

    On shards, where the parameters are some.

    Args:
        build: Makes it over groups.
        groups: Of the run.
        key: What chose it, such as `optimizer=mine`.
        owner: What it is called in messages.
        hint: What to do where it does not.
        refuse: Looks at what was built.

    Raises:
        ConfigError: It does not, with what it does instead.
    """
    try:
        built = build([dict(group) for group in groups])
        refuse(built)
        rehearse(build, groups)
    except Exception as error:  # whatever it raises, it does so before anything is trained
        raise ConfigError(
            f"{key}: tried on small parameters, {owner} cannot be used like this: {_reason(error)}."
            f" {hint}"
        ) from error
    try:
        rehearse_shards(build, groups)
    except Exception as error:
        raise ConfigError(
            f"{key}: tried on small shards, {owner} cannot train with distributed=fsdp:"
            f" {_reason(error)}. {NO_SHARDS}"
        ) from error
    return built


def _reason(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error).rstrip(".")
    first = str(error).strip().split("\n", 1)[0]
    return ": ".join(part for part in ("it fails", type(error).__name__, first.rstrip(".")) if part)


def without_no_decay(options: Options, keywords: Set[str]) -> dict[str, object]:
    """Drop a weight decay of 0 for an optimizer that has none; any other is left, to be refused."""
    none = "weight_decay" not in keywords and options.get("weight_decay") == 0
    return {key: value for key, value in options.items() if not (none and key == "weight_decay")}


def refuse_group_keys(
    choice: str, cls: type[Optimizer], groups: Sequence[Group], keywords: Set[str]
) -> None:
    """Refuse a group with another optimizer, or an option that this one does not have."""
    for group in groups:
        if "optimizer" in group:
            raise ConfigError(
                f"a parameter group asks for optimizer={group['optimizer']}, which goes with"
                f" optrun's own optimizers and torch's, not with optimizer={choice}."
            )
        known_keys(
            group, {*keywords, *DESCRIPTIVE_KEYS, "params"}, f"a parameter group of {cls.__name__}"
        )


def refuse_unread_keys(built: Optimizer, group: Group, own: Set[str] = frozenset()) -> None:
    """Refuse a group's key that its optimizer keeps on itself, for all groups alike."""
    for key in group.keys() - {*built.defaults, *own, *ALWAYS_READ}:
        raise ConfigError(
            f"it takes {key} for all parameters alike: that of a rule would be ignored"
        )
