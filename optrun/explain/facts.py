"""Facts of a configuration before a single step.

Plain data, for tables, pictures and JSON.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrun.base.plain import PlainDict, PlainMapping

if TYPE_CHECKING:
    from optrun.explain.data import Sampled


@dataclass(frozen=True)
class TrunkState:
    """The description of a trunk's checkpoint, without its tensors."""

    folder: str
    step: int
    schedule_from: int
    """The step that the schedule of the branch counts from."""
    optimizer: PlainMapping
    """The description of the optimizer's state."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Its tensors by name: dtype, as safetensors names it in torch, and shape."""


@dataclass(frozen=True)
class ForkFacts:
    """The point of a fork on its trunk."""

    folder: str
    step: int
    optimizer_state: str
    """What becomes of the trunk's, in words."""
    schedule: str
    """Where the schedule stands, in words."""
    first_lr: float
    """The highest lr of the first step."""


@dataclass(frozen=True)
class TensorFacts:
    """One trainable tensor, as the optimizer will treat it.

    Attributes:
        group: Index of its parameter group.
        lr_peak: Highest learning rate it will see.
        lr_scale: That over the run's `lr`; None where a rule gave an absolute one.
        adapted: Whether LAMB's trust ratio applies; None for optimizers without one.
        state_bytes: Of the optimizer's state once it has had a gradient; None where it is not
            known.
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
    """The multipliers of the lr of every group.

    Attributes:
        steps: Some of the run, the one with the highest multiplier among them.
        multipliers: At those steps.
        peak: The highest over all steps of the run.
    """

    steps: list[int]
    multipliers: list[float]
    peak: float


@dataclass(frozen=True)
class RankMemory:
    """Memory of the fullest rank.

    Attributes:
        distributed: The choice, `ddp` or `fsdp`.
        ranks: All there are, over all machines.
        shards: Ranks that share one model; 1 where each holds the whole.
        weight_bytes: Of its pieces of all parameters.
        gradient_bytes: Of those that train.
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
        warmup_steps: Length of the climb.
        warmup_share: That over the run, where it was not given in steps.
        steps: Length of the run in optimizer steps.
        steps_from: Where that number comes from: `max_steps`, `data`, or `assumed`.
        in_steps: Whether the schedule is read in steps: the length is known, or it names steps
            itself. Otherwise it is shares of a run of any length.
        kernel: What steps the optimizer, and why it is nothing faster.
        waits: Why each step waits for its loss before the update; None: it does not.
        frozen: Names of parameters that do not train.
        weight_dtype: Of the parameters, those apart that an adapter trains.
        weight_bytes: Of all parameters.
        gradient_bytes: Of the trainable ones.
        state_bytes: Bytes of optimizer state; None: unknown.
        rank_memory: What each rank holds of that; None in one process.
        data: What named data hold; None where none are named, or they are looked at by a run alone.
        branch: Where it leaves its trunk; None for a run of its own.
        options: Of the optimizer, resolved: what its dialect says and what was given.
        notes: What was assumed or left open, for people.
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
            del plain["data"]["spec"]  # what it says of the model stands there
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
        """The first tensor, for shared properties."""
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

        They differ where the optimizer exempts names of its own.
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
    """List the groups in the optimizer's order."""
    tensors_of = defaultdict(list)
    for tensor in facts.tensors:
        tensors_of[tensor.group].append(tensor)
    return [GroupFacts(index, tensors) for index, tensors in tensors_of.items()]


def by_layer(groups: list[GroupFacts]) -> list[GroupFacts]:
    """Sort groups of a layer beside each other, layers in the order of the model, the head last."""
    order = list(dict.fromkeys(group.first.layer for group in groups))
    return sorted(
        groups,
        key=lambda group: (
            group.first.layer == "head",
            order.index(group.first.layer),
            group.index,
        ),
    )


def total(sizes: Iterable[int | None]) -> int | None:
    """Add up sizes; None if one is unknown."""
    amounts = [*sizes]
    return None if None in amounts else sum(filter(None, amounts))


def listed(names: Sequence[str], most: int) -> str:
    """List names, the first of many.

    Example:
        >>> listed(["a", "b"], 2), listed(["a", "b", "c", "d"], 2)
        ('a, b', 'a, b and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
