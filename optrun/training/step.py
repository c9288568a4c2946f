"""One optimizer step: micro-batches forward and backward, clip, check, step, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from optrun.base.errors import OptrunError
from optrun.base.options import StateDict
from optrun.data.loader import SOURCE, Batch
from optrun.distributed.world import ALONE, World
from optrun.training.exchange import GlobalStep, MicroBatchFacts, Requests, exchange, in_order
from optrun.training.host_copy import HostCopy
from optrun.training.state import digest_of_batch, seed_of_micro_batch, seed_random_states

Numbered = tuple[Batch, int]
"""A micro-batch with its number in the step, over all ranks."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class StepResult:
    """The numbers of one step."""

    loss: float
    """Mean over the step's tokens or examples."""
    weight: float
    """How many those are, or the sum of their class weights."""
    grad_norm: float
    """Global norm before clipping."""
    applied: bool
    """False where the update was left out: non-finite numbers, or the fp16 scaler lowered its
    scale."""
    losses: list[float]
    """Of each micro-batch."""
    by_source: list[list[float]] | None = None
    """Of each source of a mixture: sum of losses, targets, examples."""
    measures: list[float] | None = None
    """Sums of what the task measures of the step's examples."""
    overflow: bool = False
    """Only the fp16 scaler finding its scale."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(eq=False)
class Precision:
    """Autocast dtype and device of a model's forward passes."""

    device: torch.device
    """Where the model is."""
    precision: str
    """`fp32`, `bf16` or `fp16`."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return `torch.autocast`, or nothing for fp32."""
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def to_device(self, batch: Batch) -> Batch:
        """Move a batch to the model."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


class Scheduler(Protocol):
    """The part of a schedule that a step and a checkpoint use; `optrun.scheduler` builds it."""

    metric: str | None
    """Evaluation metric that it watches, such as `eval/loss`; None: it is a function of the step.
    """

    def step(self) -> None: ...
    def observe(self, metric: float) -> None: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: StateDict) -> None: ...


def model_loss(outputs: Any, batch: Batch) -> torch.Tensor:  # noqa: ARG001
    """Take the model's own loss."""
    loss: torch.Tensor = outputs.loss
    return loss


def _trainable(loss: object) -> torch.Tensor:
    """Check that a loss is one number with a gradient.

    Raises:
        OptrunError: It is no single number, or no parameter has a part in it.
    """
    if not isinstance(loss, torch.Tensor):
        description = type(loss).__name__
    elif loss.dim() > 0:
        description = f"a tensor of shape {tuple(loss.shape)}"
    elif loss.requires_grad:
        return loss
    else:
        description = "a number that no parameter has a part in (requires_grad is False)"
    raise OptrunError(
        f"the loss of the task is {description}: expected a tensor of shape () with a gradient."
    )


def zero_loss(outputs: Any) -> torch.Tensor:
    """Return a loss of 0 with a gradient to every parameter."""
    floating = (
        value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point()
    )
    wholes = [value.float().sum() for value in floating if value.dim()]
    return torch.stack(wholes).sum() * 0


def plain_forward(model: Any, batch: Batch) -> Any:
    """Run a model over a batch's tensors by name."""
    return model(**batch)


class Sums:
    """Adds up numbers of micro-batches, on their device."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: torch.Tensor | None = None

    def plus(self, sums: torch.Tensor) -> None:
        """Add the sums of a micro-batch."""
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> torch.Tensor:
        """Return the sums of this rank since the last call, and begin at 0 again."""
        sums = self._sums
        self._sums = None
        if sums is None:
            return torch.zeros(self._size)
        return sums


def by_rank(values: list[float], ranks: int) -> list[list[float]]:
    """Divide gathered values into those of each rank.

    Example:
        >>> by_rank([1.0, 2.0, 3.0, 4.0], ranks=2)
        [[1.0, 2.0], [3.0, 4.0]]
    """
    size = len(values) // ranks
    return [values[size * rank : size * (rank + 1)] for rank in range(ranks)]


def over_ranks(sums: list[float], ranks: int) -> list[float]:
    """Add the gathered sums of all ranks."""
    return [math.fsum(values) for values in zip(*by_rank(sums, ranks), strict=True)]


@dataclass(eq=False)
class BySource:
    """Adds up the losses of each source of a mixture."""

    losses: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]
    """What the model returned, and the batch, to each example's sum of losses and number of
    targets.
    """
    sources: int
    """How many there are."""

    def __post_init__(self) -> None:
        """Begin at 0."""
        self.sums = Sums(3 * self.sources)

    def add(self, outputs: object, batch: Batch, sources: torch.Tensor) -> None:
        """Take in a micro-batch; `sources` is the number of each example's, shape (batch,)."""
        with torch.no_grad():
            losses, targets = self.losses(outputs, batch)
            sums = torch.stack(
                [losses.float(), targets.float(), torch.ones_like(losses, dtype=torch.float)], dim=1
            )
            self.sums.plus(torch.nn.functional.one_hot(sources, self.sources).float().T @ sums)


class Guard(Protocol):
    """Steps an optimizer unless numbers are not finite; `optrun.optimizer.guard` has one."""

    def step(self, numbers: torch.Tensor) -> None: ...
    def take_back(self) -> None: ...


@dataclass(eq=False)
class UnreadStep:
    """A computed step before its numbers are read."""

    step: GlobalStep
    position: int
    """Steps of data used before this one."""
    numbers: list[int]
    """Of the micro-batches that this rank ran."""
    values: torch.Tensor
    """What each of them adds to the loss, then the gradient norm, on the device; shape (n + 1,), of
    several ranks (ranks, n + 1)."""
    host: HostCopy
    """Of these values, then of the sums by source and of what the task measures."""

    @property
    def is_applied(self) -> bool:
        """Whether `TrainStep.update` changes anything: all values are finite. Waits for them."""
        return all(map(math.isfinite, self.host.lists[0]))


@dataclass(eq=False, kw_only=True)
class TrainStep(Precision):
    """One optimizer step: micro-batches forward and backward, clip, check, update, schedule."""

    model: torch.nn.Module
    """What is trained; called with a batch's tensors by name, returns `loss` and `logits`."""
    optimizer: torch.optim.Optimizer
    """Over its parameters."""
    clip: Callable[[torch.optim.Optimizer], torch.Tensor]
    """Clips all gradients, returns their global norm from before; shape ()."""
    scheduler: Scheduler
    """Stepped once after each update."""
    weight: Callable[[Batch], float]
    """Tokens or examples that the mean loss of a batch is over, or the sum of their class weights.
    """
    loss: Callable[[Any, Batch], torch.Tensor] = model_loss
    """What the model returned, and the batch, to the mean loss; shape ()."""
    seed: int | None = 0
    """Of dropout; None: the generators are taken as they stand."""
    sizes: Callable[[Batch], tuple[int, int]] = lambda batch: (0, 0)  # noqa: ARG005
    """Tokens and examples of a batch."""
    world: World = ALONE
    """The ranks that share each step."""
    gradient_sync: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()  # noqa: ARG005
    """Around each micro-batch, told whether it is the step's last on this rank; gradients are
    reduced over ranks there only."""
    by_source: BySource | None = None
    """Adds up the losses of each source of a mixture; None: there is one source."""
    forward: Callable[[Any, Batch], Any] = plain_forward
    """Runs the model over a batch."""
    measure: Callable[[Any, Batch], torch.Tensor] | None = None
    """What the model returned, and the batch, to sums over its examples; None: nothing is measured.
    """
    measured: int = 0
    """How many sums those are."""
    guard: Guard | None = None
    """Lets an update start before its numbers are read; None: each step waits for them."""
    updating: bool = field(default=False, init=False)
    """An update is done that is not counted yet: what is saved meanwhile would fit no step."""
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        """Create the loss scaler of fp16 and the sums of measures."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._measures = Sums(self.measured)
        self._scaler_state: StateDict | None = None
        """Of the scaler before the unread update; None: it has to be read from the device."""

    def __call__(
        self, micro_batches: list[Batch], step: GlobalStep | None = None, position: int = 0
    ) -> StepResult:
        """Do one step, and wait for its numbers before the update.

        Nothing is updated where loss or gradient norm is not finite.

        Args:
            micro_batches: As for `compute`.
            step: As for `compute`.
            position: As for `compute`.

        Returns:
            What was seen, the same on every rank; the caller decides what a non-finite result
            means.
        """
        self._scaler_state = None
        result = self.read(self.compute(micro_batches, step, position))
        self._seed(position, -1)  # for an optimizer that draws: alike on all ranks
        if result.finite:
            self.updating = True
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            return result
        result.applied = False
        if self.scaler.is_enabled() and result.weight:
            result.overflow = self._lower_scale(result)
        if result.overflow:
            self.scheduler.step()
        return result

    def compute(
        self, micro_batches: list[Batch], step: GlobalStep | None = None, position: int = 0
    ) -> UnreadStep:
        """Run a step up to its update: forward, backward, clip. Nothing waits for the device.

        Each micro-batch's mean loss is weighted by its share of the step's tokens (or examples),
        over all ranks, so that k micro-batches give the gradient of one big batch wherever they
        run. Each draws its dropout from a seed of its own.

        Args:
            micro_batches: Of this rank, as collated, on the CPU.
            step: What all ranks know of the step; None: there are no others.
            position: Steps of data used before this one.
        """
        step = step or self.exchange(micro_batches, Requests(), len(micro_batches))
        self._drop_sums()
        if step.total_weight == 0:  # the mean over no target is 0/0
            return UnreadStep(step, position, [], torch.tensor([math.nan]), HostCopy([]))
        self.optimizer.zero_grad(set_to_none=True)
        # Every rank takes part in every forward pass; a process alone leaves out what has no
        # target.
        runs = [
            run
            for run in zip(micro_batches, step.numbers, strict=True)
            if self.world.size > 1 or step.weight_of(run[1])
        ]
        shares = self._shares(runs, step, position)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip(self.optimizer).float()
        values = torch.stack([*shares, grad_norm.to(shares[0].device)])
        tensors = [values]
        if self.by_source is not None:
            tensors.append(self.by_source.sums.take())
        if self.measure is not None:
            tensors.append(self._measures.take())
        if self.world.size > 1:
            tensors = [self.world.gather_tensors(each.to(values.device)) for each in tensors]
        numbers = [number for _, number in runs]
        return UnreadStep(step, position, numbers, tensors[0], HostCopy(tensors))

    def update(self, unread: UnreadStep) -> None:
        """Start the update. It changes nothing if the numbers of a rank are not finite.

        Its counters run ahead until `keep` or `take_back`.
        """
        assert self.guard is not None
        self._seed(unread.position, -1)
        self.updating = True
        self.guard.step(unread.values)
        if self.scaler.is_enabled():
            if self._scaler_state is None:
                self._scaler_state = self.scaler.state_dict()
            self.scaler.update()

    def keep(self) -> None:
        """Count an update that was applied."""
        self.scheduler.step()
        state = self._scaler_state
        if state is not None:
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                self._scaler_state = None  # the device has raised the scale

    def take_back(self) -> None:
        """Take back the counters of an update that changed nothing else."""
        assert self.guard is not None
        self.guard.take_back()
        if self._scaler_state is not None:
            self.scaler.update(self._scaler_state["scale"])  # forgets what it has unscaled since
            self.scaler.load_state_dict(self._scaler_state)
        self.updating = False

    def read(self, unread: UnreadStep) -> StepResult:
        """Wait for the numbers of a step."""
        if unread.step.total_weight == 0:
            return StepResult(loss=math.nan, weight=0, grad_norm=math.nan, applied=False, losses=[])
        values, *sums = unread.host.lists
        result = self._result(unread.step, unread.numbers, values)
        if self.by_source is not None:
            total = over_ranks(sums.pop(0), self.world.size)
            result.by_source = [total[at : at + 3] for at in range(0, len(total), 3)]
        if self.measure is not None:
            result.measures = over_ranks(sums.pop(0), self.world.size)
        return result

    def reason_to_wait(self) -> str | None:
        """Say why a step's loss and gradient norm must reach the host before its update.

        None: the update starts without waiting for them.
        """
        if self.seed is None:
            return "the random states of each step are kept"
        if self.guard is None:
            return "the optimizer has no kernel that leaves a step out on this device"
        return None

    def _drop_sums(self) -> None:
        """Forget the sums of an interrupted step."""
        if self.by_source is not None:
            self.by_source.sums.take()
        if self.measure is not None:
            self._measures.take()

    def _shares(self, runs: list[Numbered], step: GlobalStep, position: int) -> list[torch.Tensor]:
        """Run the micro-batches forward and backward.

        Returns:
            What each adds to the step's loss, shape () each.
        """
        shares = []
        for at, (batch, number) in enumerate(runs, 1):
            self._seed(position, number)
            with self.gradient_sync(at == len(runs)):
                share = step.weight_of(number) / step.total_weight
                shares.append(self._backward(batch, share))
        return shares

    def _seed(self, position: int, number: int) -> None:
        if self.seed is not None:
            seed_random_states(seed_of_micro_batch(self.seed, position, number), self.device)

    def exchange(self, micro_batches: list[Batch], requests: Requests, count: int) -> GlobalStep:
        """Tell the other ranks of this one's micro-batches, and hear of theirs.

        Args:
            micro_batches: Of this rank.
            requests: Of this rank.
            count: Micro-batches of the step over all ranks.
        """
        facts = [
            MicroBatchFacts(self.weight(batch), *self.sizes(batch), digest_of_batch(batch))
            for batch in micro_batches
        ]
        return exchange(facts, requests, self.world, count)

    def _backward(self, batch: Batch, share: float) -> torch.Tensor:
        """Run one micro-batch forward and backward.

        Args:
            batch: On the CPU.
            share: Of its mean loss in the step's.

        Returns:
            What it adds to the step's loss; shape ().
        """
        with self.autocast():
            moved = self.to_device(batch)
            sources = moved.pop(SOURCE, None)
            outputs = self.forward(self.model, moved)
            # What counts nothing may have a mean over no target, which is NaN, and NaN times 0 is
            # NaN.
            loss = _trainable(self.loss(outputs, moved)) if share else zero_loss(outputs)
            if self.by_source is not None and sources is not None and share:
                self.by_source.add(outputs, moved, sources)
            if self.measure is not None and share:
                with torch.no_grad():
                    self._measures.plus(self.measure(outputs, moved))
            if share not in (0, 1):  # a factor costs two launches
                loss = loss * share
        # The reduction over ranks is a mean.
        self.scaler.scale(loss * self.world.size if self.world.size > 1 else loss).backward()
        return loss.detach().float()

    def _result(self, step: GlobalStep, numbers: list[int], values: list[float]) -> StepResult:
        """Put the losses of all ranks together, in the order of their micro-batches."""
        rows = by_rank(values, self.world.size)
        *shares_here, norm = rows[0]
        if self.world.size > 1:
            shares = dict(enumerate(in_order(rows, len(step.facts))))
        else:
            shares = dict(zip(numbers, shares_here, strict=True))
        counted = [(number, fact.weight) for number, fact in enumerate(step.facts) if fact.weight]
        total = step.total_weight
        return StepResult(
            loss=sum(shares[number] for number, _ in counted),
            weight=total,
            grad_norm=norm,
            applied=True,
            losses=[shares[number] * total / weight for number, weight in counted],
        )

    def _lower_scale(self, result: StepResult) -> bool:
        """Tell whether a non-finite result is only the fp16 scaler finding its scale.

        Which is then lowered.

        It is not where the loss itself is not finite, nor below a scale of 1: what overflows there
        would unscaled, and a gradient that is NaN at any scale would otherwise be left out for
        ever. The scale is then kept, and the scaler made ready for the next step.
        """
        scale = self.scaler.get_scale()
        if not math.isfinite(result.loss) or scale < 1:
            self.scaler.update(scale)
            return False
        self.scaler.update()
        return (
            self.scaler.get_scale() < scale
        )  # else the gradients are finite, and only their norm is not
