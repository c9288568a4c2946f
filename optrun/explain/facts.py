"""Facts of a configuration before the first step, as plain data for tables and JSON."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrun.base.plain import PlainDict, PlainMapping

if TYPE_CHECKING:
    from optrun.explain.data import Sampled


@dataclass(frozen=True)
class TrunkState:
    """The description of the checkpoint that a run forks from, without its tensors."""

    folder: str
    """The checkpoint, as the user named it."""
    step: int
    """Optimizer steps of the checkpoint."""
    schedule_from: int
    """The step that the schedule of the fork counts from: 0, or that of the checkpoint."""
    optimizer: PlainMapping
    """The description of the optimizer's state."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Tensors of the optimizer's state by name: dtype, such as `float32`, and shape."""


@dataclass(frozen=True)
class ForkFacts:
    """What a fork takes over from its trunk."""

    folder: str
    step: int
    optimizer_state: str
    """What becomes of the trunk's optimizer state, as a sentence."""
    schedule: str
    """Where the schedule of the fork begins, as a sentence."""
    first_lr: float
    """The highest lr of the first step."""


@dataclass(frozen=True)
class TensorFacts:
    """One trainable tensor, as the optimizer will treat it.

    Attributes:
        group: Index of its parameter group.
        lr_peak: Highest learning rate it will see.
        lr_scale: `lr_peak` divided by the run's `lr`; None if a rule set an absolute lr.
        adapted: Whether LAMB's trust ratio applies; None for optimizers without one.
        state_bytes: Bytes of optimizer state after the first gradient; None: unknown.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    layer: str
    role: str
    optimizer: str
    lr_peak: float
    lr_scale: float | None
    weight_decay: float
    adapted: bool | None
    rule: str
    parameters: int
    state_bytes: int | None


@dataclass(frozen=True)
class CurveFacts:
    """The schedule: multipliers of the lr of every group.

    Attributes:
        steps: Sampled steps of the run, including the one with the highest multiplier.
        multipliers: Multipliers at those steps.
        peak: Highest multiplier over all steps of the run.
    """

    steps: list[int]
    multipliers: list[float]
    peak: float


@dataclass(frozen=True)
class RankMemory:
    """Memory of the rank with the largest shards.

    Attributes:
        distributed: The choice of `distributed=`, `ddp` or `fsdp`.
        ranks: Number of ranks on all machines.
        shards: Number of ranks that share one model; 1 if each rank has all of it.
        weight_bytes: Bytes of its shards of all parameters.
        gradient_bytes: Bytes of its shards of all gradients.
        state_bytes: Bytes of optimizer state; None: unknown.
    """

    distributed: str
    ranks: int
    shards: int
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int | None


@dataclass(frozen=True)
class Facts:
    """The facts behind `optrun explain`.

    Attributes:
        warmup_steps: Length of the warm-up.
        warmup_share: Share of the warm-up in the run, if it is not given in steps.
        steps: Length of the run in optimizer steps.
        steps_from: Origin of `steps`: `max_steps`, `data` or `assumed`.
        in_steps: Whether the schedule is described in steps, because the length is known or the
            schedule names steps; otherwise in shares of the run.
        kernel: The optimizer's kernel, and why not a faster one.
        waits: Why each step waits for its loss before the update; None if it does not.
        frozen: Names of parameters that do not train.
        weight_dtype: Dtype of the parameters, except those of an adapter.
        weight_bytes: Bytes of all parameters.
        gradient_bytes: Bytes of the gradients of trainable parameters.
        state_bytes: Bytes of optimizer state; None: unknown.
        rank_memory: Memory of the rank with the largest shards; None in one process.
        data: Facts of the data; None if no data are named, or only the run reads them.
        branch: What the run takes over from the checkpoint that it forks from; None: it is no fork.
        options: Options of the optimizer, resolved from its dialect and typed values.
        notes: Assumptions and open points, for the user.
    """

    model: str
    task: str
    optimizer: str
    kernel: str
    waits: str | None
    lr: float
    param_groups: str
    rules: list[str]
    scheduler: str
    warmup_steps: int
    warmup_share: float | None
    clip: str
    steps: int
    steps_from: str
    in_steps: bool
    tensors: list[TensorFacts]
    frozen: list[str]
    frozen_parameters: int
    curve: CurveFacts
    weight_dtype: str
    weight_bytes: int
    gradient_bytes: int
    state_bytes: int | None
    rank_memory: RankMemory | None
    data: Sampled | None
    branch: ForkFacts | None
    options: PlainDict
    notes: list[str]

    @property
    def parameters(self) -> int:
        """Number of trainable elements."""
        return sum(tensor.parameters for tensor in self.tensors)

    def as_dict(self) -> dict[str, object]:
        """Convert to numbers, strings and lists for JSON."""
        plain = dataclasses.asdict(self)
        if self.data is not None:
            del plain["data"]["spec"]  # the facts of the model say the same
        return {
            **plain,
            "parameters": self.parameters,
            "groups": [group.as_dict() for group in groups_of(self)],
        }


@dataclass(frozen=True)
class GroupFacts:
    """One parameter group, with the sums over its tensors."""

    index: int
    tensors: list[TensorFacts]

    @property
    def first(self) -> TensorFacts:
        """The first tensor, for what all tensors of a group share."""
        return self.tensors[0]

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def state_bytes(self) -> int | None:
        """Optimizer state of all its tensors; None if one is unknown."""
        return total([tensor.state_bytes for tensor in self.tensors])

    @property
    def lr_peaks(self) -> tuple[float, float]:
        """Lowest and highest peak lr; the optimizer's own ratios make them differ."""
        peaks = [tensor.lr_peak for tensor in self.tensors]
        return min(peaks), max(peaks)

    @property
    def weight_decays(self) -> tuple[float, float]:
        """Lowest and highest weight decay.

        They differ if the optimizer exempts some parameters by name.
        """
        decays = [tensor.weight_decay for tensor in self.tensors]
        return min(decays), max(decays)

    @property
    def adapted(self) -> int | None:
        """Number of tensors with a trust ratio; None for optimizers without a trust ratio."""
        return total([tensor.adapted for tensor in self.tensors])

    def as_dict(self) -> dict[str, object]:
        """Convert to numbers, strings and lists for JSON."""
        shared = ("layer", "role", "optimizer", "lr_scale", "rule")
        return {
            "index": self.index,
            **{name: getattr(self.first, name) for name in shared},
            "lr_peak": list(self.lr_peaks),
            "weight_decay": list(self.weight_decays),
            "adapted": self.adapted,
            "tensors": len(self.tensors),
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "names": [tensor.name for tensor in self.tensors],
        }


def groups_of(facts: Facts) -> list[GroupFacts]:
    """Sort the tensors into their parameter groups, in the optimizer's order."""
    tensors_of = defaultdict(list)
    for tensor in facts.tensors:
        tensors_of[tensor.group].append(tensor)
    return [GroupFacts(index, tensors) for index, tensors in tensors_of.items()]


def by_layer(groups: list[GroupFacts]) -> list[GroupFacts]:
    """Sort groups by layer, in the order of their first occurrence, the head last.

    Groups of one layer keep the optimizer's order. Example: layers `block 0`, `head`, `block 1`,
    `block 0` become `block 0`, `block 0`, `block 1`, `head`.
    """
    layers = list(dict.fromkeys(group.first.layer for group in groups))
    return sorted(
        groups,
        key=lambda group: (
            group.first.layer == "head",
            layers.index(group.first.layer),
            group.index,
        ),
    )


def total(sizes: Iterable[int | None]) -> int | None:
    """Add up sizes; None if one of them is None."""
    amounts = [*sizes]
    if None in amounts:
        return None
    return sum(filter(None, amounts))
