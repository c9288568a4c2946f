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
from optrun.training.exchange import (
    GlobalStep,
    MicroBatchFacts,
    Requests,
    exchange,
    interleave_ranks,
)
from optrun.training.host_copy import HostCopy
from optrun.training.state import digest_of_batch, seed_of_micro_batch, seed_random_states

NumberedBatch = tuple[Batch, int]
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
    losses: list[float]
    """Mean loss of each micro-batch."""
    by_source: list[list[float]] | None = None
    """For each source of a mixture: sum of losses, targets, examples."""
    measures: list[float] | None = None
    """Sums over the step's examples of the values that the task measures."""
    overflow: bool = False
    """Whether the update was skipped only because the fp16 loss scale was too high."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are numbers; if not, the update is skipped."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    applied = finite
    """The name for callbacks (docs/plugins.md)."""


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
    """Return the model's own loss."""
    loss: torch.Tensor = outputs.loss
    return loss


def _trainable(loss: object) -> torch.Tensor:
    """Return a task's loss, and refuse one that is not a single number with a gradient.

    Raises:
        OptrunError: The loss is no tensor of shape (), or does not depend on any parameter.
    """
    if not isinstance(loss, torch.Tensor):
        description = type(loss).__name__
    elif loss.dim() > 0:
        description = f"a tensor of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        description = "a number that depends on no trainable parameter (requires_grad is False)"
    else:
        return loss
    raise OptrunError(
        f"the loss of the task is {description}: expected a tensor of shape () with a gradient."
    )


def zero_loss(outputs: Any) -> torch.Tensor:
    """Return a loss of 0 that depends on every output of the model, and so on every parameter.

    A rank that has nothing to learn from still runs backward with it, since the reduction of
    gradients waits for all ranks. Scalars are left out: a mean over no target is NaN.
    """
    sums = [
        value.float().sum()
        for value in outputs.values()
        if torch.is_tensor(value) and value.is_floating_point() and value.dim()
    ]
    return torch.stack(sums).sum() * 0


def plain_forward(model: Any, batch: Batch) -> Any:
    """Run a model over a batch's tensors by name."""
    return model(**batch)


class Sums:
    """Adds up values of micro-batches on their device, without copying them to the host."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: torch.Tensor | None = None

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of a micro-batch."""
        self._sums = sums if self._sums is None else self._sums + sums

    def pop(self) -> torch.Tensor:
        """Return the sums of this rank since the last call, and start again at 0."""
        sums = self._sums
        self._sums = None
        if sums is None:
            return torch.zeros(self._size)
        return sums


def split_by_rank(values: list[float], ranks: int) -> list[list[float]]:
    """Split gathered values into the list of each rank; all lists have the same length.

    Example:
        >>> split_by_rank([1.0, 2.0, 3.0, 4.0], ranks=2)
        [[1.0, 2.0], [3.0, 4.0]]
    """
    size = len(values) // ranks
    return [values[size * rank : size * (rank + 1)] for rank in range(ranks)]


def sum_over_ranks(sums: list[float], ranks: int) -> list[float]:
    """Add up gathered values over the ranks, position by position.

    Example:
        >>> sum_over_ranks([1.0, 2.0, 3.0, 4.0], ranks=2)
        [4.0, 6.0]
    """
    return [math.fsum(values) for values in zip(*split_by_rank(sums, ranks), strict=True)]


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
        """Add the losses of a micro-batch, by source.

        Args:
            outputs: What the model returned.
            batch: The micro-batch.
            sources: Source number of each example, shape (batch,).
        """
        with torch.no_grad():
            losses, targets = self.losses(outputs, batch)
            ones = torch.ones_like(losses, dtype=torch.float)
            examples = torch.stack([losses.float(), targets.float(), ones], dim=1)  # (batch, 3)
            # (sources, batch) @ (batch, 3): the rows of the same source are added up.
            self.sums.add(torch.nn.functional.one_hot(sources, self.sources).float().T @ examples)


class Guard(Protocol):
    """Steps an optimizer only if all values are finite; see `optrun.optimizer.guard`.

    `take_back` restores the counters on the host after a skipped step.
    """

    def step(self, values: torch.Tensor) -> None: ...
    def take_back(self) -> None: ...


@dataclass(eq=False)
class PendingStep:
    """A step after forward and backward, whose loss and norm the host has not read yet."""

    step: GlobalStep
    position: int
    """Steps of data used before this one."""
    numbers: list[int]
    """Numbers of the micro-batches that this rank ran."""
    values: torch.Tensor
    """The share of each micro-batch in the loss, then the gradient norm, on the device; shape
    (n + 1,), with several ranks (ranks, n + 1)."""
    host: HostCopy
    """Copy of these values, then of the sums by source and of the measures of the task."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite on all ranks; waits for the values.

        If not, `TrainStep.start_update` changed nothing.
        """
        return all(map(math.isfinite, self.host.lists[0]))


@dataclass(eq=False, kw_only=True)
class TrainStep(Precision):
    """One optimizer step: micro-batches forward and backward, clip, check, update, schedule."""

    model: torch.nn.Module
    """The trained model; called with a batch's tensors by name, returns `loss` and `logits`."""
    optimizer: torch.optim.Optimizer
    """Optimizer of the model's parameters."""
    clip: Callable[[torch.optim.Optimizer], torch.Tensor]
    """Clips all gradients, and returns their global norm before clipping; shape ()."""
    scheduler: Scheduler
    """Stepped once after each update."""
    weight: Callable[[Batch], float]
    """Tokens or examples that the mean loss of a batch is over, or the sum of their class weights.
    """
    loss: Callable[[Any, Batch], torch.Tensor] = model_loss
    """Computes the mean loss, shape (), from the model's output and the batch."""
    seed: int | None = 0
    """Seed of dropout; None: the present states of the generators are used."""
    count_tokens_and_examples: Callable[[Batch], tuple[int, int]] = lambda batch: (0, 0)  # noqa: ARG005
    """Tokens and examples of a batch."""
    world: World = ALONE
    """The ranks that share each step."""
    gradient_sync: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()  # noqa: ARG005
    """Context of each micro-batch; its argument is whether this is the last one of the step on this
    rank. Only there gradients are reduced over ranks."""
    by_source: BySource | None = None
    """Adds up the losses of each source of a mixture; None: there is one source."""
    forward: Callable[[Any, Batch], Any] = plain_forward
    """Runs the model over a batch."""
    measure: Callable[[Any, Batch], torch.Tensor] | None = None
    """Computes sums over a batch's examples from the model's output; None: nothing is measured."""
    measured: int = 0
    """Number of these sums."""
    guard: Guard | None = None
    """Starts an update before its loss and norm are read; None: each step waits for them."""
    has_uncounted_update: bool = field(default=False, init=False)
    """Whether the weights are updated and the step is not counted yet; a checkpoint saved now would
    belong to no step."""
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        """Create the loss scaler of fp16 and the sums of measures."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._measures = Sums(self.measured)
        self._scaler_state: StateDict | None = None
        """The host's copy of the scaler's state before the pending update, from
        `GradScaler.state_dict`, which waits for the device; None: it must be read again."""

    def __call__(
        self, micro_batches: list[Batch], step: GlobalStep | None = None, position: int = 0
    ) -> StepResult:
        """Do one step, and wait for loss and gradient norm before the update.

        If one of them is not finite, nothing is updated.

        Args:
            micro_batches: As for `compute_gradients`.
            step: As for `compute_gradients`.
            position: As for `compute_gradients`.

        Returns:
            The result, the same on every rank; the caller handles one that is not finite.
        """
        self._scaler_state = None  # this step changes the scaler, and so outdates the copy
        result = self.read_result(self.compute_gradients(micro_batches, step, position))
        self._seed(position, -1)  # an optimizer that draws random numbers: the same on all ranks
        if result.finite:
            self.has_uncounted_update = True
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            return result
        if self.scaler.is_enabled() and result.weight:
            result.overflow = self._lower_scale_on_overflow(result)
        if result.overflow:
            self.scheduler.step()
        return result

    def compute_gradients(
        self, micro_batches: list[Batch], step: GlobalStep | None = None, position: int = 0
    ) -> PendingStep:
        """Run a step up to its update: forward, backward, clip. Nothing waits for the device.

        The gradient is that of one big batch, however the step is divided into micro-batches and
        ranks: each mean loss is weighted by its share of the step's tokens or examples.

        Args:
            micro_batches: Micro-batches of this rank, as collated, on the CPU.
            step: The exchanged facts of the step; None: this process runs alone.
            position: Steps of data used before this one.

        Returns:
            The step, with gradients in the parameters' `grad`. If no micro-batch has a target,
            nothing runs, old gradients stay, and the values are a single NaN.
        """
        # `step` has the weight of each micro-batch over all ranks, and the numbers of those here.
        step = step or self.exchange(micro_batches, Requests(), len(micro_batches))
        self._clear_sums()  # left by a step that an error interrupted
        if step.total_weight == 0:  # the mean over no target is 0/0
            return PendingStep(step, position, [], torch.tensor([math.nan]), HostCopy([]))
        self.optimizer.zero_grad(set_to_none=True)

        # 1. Forward and backward, which give one loss share of shape () for each micro-batch. A
        # process alone leaves out micro-batches without a target. Several ranks wait for each other
        # in every pass, so each runs all of its micro-batches, those without a target at weight 0.
        numbered_batches = []
        for batch, number in zip(micro_batches, step.numbers, strict=True):
            if self.world.size > 1 or step.weight_of(number):
                numbered_batches.append((batch, number))
        loss_shares = self._backward_all(numbered_batches, step, position)

        # 2. Clip. The norm is that before clipping; without fp16 the scaler does nothing.
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip(self.optimizer).float()

        # 3. Start to copy the results to the host; `read_result` reads them in this order: loss
        # shares and gradient norm; sums by source, if there are sources; sums of measures, if
        # something is measured. With several ranks each tensor gets a row for each rank.
        values = torch.stack([*loss_shares, grad_norm.to(loss_shares[0].device)])
        tensors = [values]
        if self.by_source is not None:
            tensors.append(self.by_source.sums.pop())
        if self.measure is not None:
            tensors.append(self._measures.pop())
        if self.world.size > 1:
            tensors = [self.world.gather_tensors(tensor.to(values.device)) for tensor in tensors]
        numbers = [number for _, number in numbered_batches]
        return PendingStep(step, position, numbers, tensors[0], HostCopy(tensors))

    def start_update(self, pending: PendingStep) -> None:
        """Start the update, before the host has read whether loss and gradient norm are finite.

        If they are not, weights and optimizer state stay as they are. Only the counters on the host
        are ahead then: the caller calls `confirm_update` or `revert_update` once it has read them.
        """
        assert self.guard is not None  # the caller has asked `reason_to_wait`
        self._seed(pending.position, -1)  # of an optimizer that draws random numbers
        self.has_uncounted_update = True
        self.guard.step(pending.values)  # on the device: steps only if all values are finite
        if self.scaler.is_enabled():  # fp16
            # The state before `update`, for `revert_update`. Reading it waits for the device, so
            # `confirm_update` keeps this copy up to date as long as it can.
            if self._scaler_state is None:
                self._scaler_state = self.scaler.state_dict()
            self.scaler.update()

    def confirm_update(self) -> None:
        """Step the schedule, and the host's copy of the scaler's counters, after a valid update.

        With fp16 `GradScaler.update` has counted the step on the device, and the copy is brought up
        to date without reading it. Example with `growth_interval` 2000: the copy counts 1 to 1999
        along; with step 2000 the device raises the scale, and the copy is dropped.
        """
        self.scheduler.step()
        state = self._scaler_state
        if state is not None:  # None without fp16
            state["_growth_tracker"] += 1  # consecutive steps with finite gradients
            if state["_growth_tracker"] == state["growth_interval"]:
                self._scaler_state = None  # `start_update` reads the new scale and a count of 0

    def revert_update(self) -> None:
        """Restore the counters of optimizer and scaler after an update that the device left out.

        Weights, optimizer state and schedule are still those from before `start_update`, so that
        the step can be repeated.
        """
        assert self.guard is not None
        self.guard.take_back()  # restores the step counts of the optimizer
        if self._scaler_state is not None:  # None without fp16
            # 1. Let it unscale again: `compute_gradients` may have unscaled the gradients of the
            # next step already, the scaler refuses to do it twice, and only `update` clears that.
            self.scaler.update(self._scaler_state["scale"])
            # 2. Undo the `update` of `start_update`.
            self.scaler.load_state_dict(self._scaler_state)
        self.has_uncounted_update = False

    def read_result(self, pending: PendingStep) -> StepResult:
        """Wait for the values of a step, and combine all ranks into its result.

        A step without a target has loss and norm NaN, and weight 0.
        """
        if pending.step.total_weight == 0:
            return StepResult(loss=math.nan, weight=0, grad_norm=math.nan, losses=[])
        # `host.lists` waits for the copies of `compute_gradients`, in its order: values, sums by
        # source, sums of measures; the last two only if they are configured. The values of all
        # ranks follow one another.
        values, *sums = pending.host.lists
        result = self._combine_ranks(pending.step, pending.numbers, values)
        if self.by_source is not None:
            flat = sum_over_ranks(sums.pop(0), self.world.size)  # three sums for each source
            result.by_source = [flat[at : at + 3] for at in range(0, len(flat), 3)]
        if self.measure is not None:
            result.measures = sum_over_ranks(sums.pop(0), self.world.size)
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

    def _clear_sums(self) -> None:
        """Set the sums by source and of measures to 0, in case a step was interrupted."""
        if self.by_source is not None:
            self.by_source.sums.pop()
        if self.measure is not None:
            self._measures.pop()

    def _backward_all(
        self, numbered_batches: list[NumberedBatch], step: GlobalStep, position: int
    ) -> list[torch.Tensor]:
        """Run all micro-batches of this rank forward and backward, adding up their gradients.

        Args:
            numbered_batches: The micro-batches, each with its number in the step.
            step: Has the weight of each micro-batch of the step.
            position: Steps of data used before, which seeds the dropout of each micro-batch.

        Returns:
            The mean loss of each micro-batch times its share of the step's weight, shape () each;
            over all ranks they add up to the loss of the step.
        """
        loss_shares = []
        for at, (batch, number) in enumerate(numbered_batches, 1):
            self._seed(position, number)  # its dropout is the same on any rank
            is_last = at == len(numbered_batches)
            with self.gradient_sync(is_last):  # only the last one reduces gradients over ranks
                share = step.weight_of(number) / step.total_weight
                loss_shares.append(self._backward(batch, share))
        return loss_shares

    def _seed(self, position: int, number: int) -> None:
        """Seed all generators for a micro-batch (-1: the update); with `seed=None` do nothing."""
        if self.seed is not None:
            seed_random_states(seed_of_micro_batch(self.seed, position, number), self.device)

    def exchange(self, micro_batches: list[Batch], requests: Requests, count: int) -> GlobalStep:
        """Exchange the facts of the micro-batches, and requests, with all ranks.

        Args:
            micro_batches: Micro-batches of this rank.
            requests: Requests to this rank.
            count: Micro-batches of the step over all ranks.

        Returns:
            The facts of all micro-batches, the numbers of those of this rank, and all requests.
        """
        facts = [
            MicroBatchFacts(
                self.weight(batch), *self.count_tokens_and_examples(batch), digest_of_batch(batch)
            )
            for batch in micro_batches
        ]
        return exchange(facts, requests, self.world, count)

    def _backward(self, batch: Batch, share: float) -> torch.Tensor:
        """Run one micro-batch forward and backward.

        Args:
            batch: The micro-batch, on the CPU.
            share: Weight of its mean loss in the step's loss; 0 for a micro-batch without a target
                and for a repeated one, which only keeps the ranks in step.

        Returns:
            Its mean loss times `share`; shape ().
        """
        with self.autocast():
            moved = self.to_device(batch)
            sources = moved.pop(SOURCE, None)  # the model does not know this tensor
            outputs = self.forward(self.model, moved)
            if share:
                loss = _trainable(self.loss(outputs, moved))  # shape (), or an error
                # Sum what is logged by source, and what the task measures.
                if self.by_source is not None and sources is not None:
                    self.by_source.add(outputs, moved, sources)
                if self.measure is not None:
                    with torch.no_grad():
                        self._measures.add(self.measure(outputs, moved))
                if share != 1:  # a factor costs two kernel launches
                    loss = loss * share
            else:
                # Not the task's loss times 0: the mean over no target is NaN, and NaN * 0 is NaN.
                loss = zero_loss(outputs)
        self._backward_over_ranks(loss)
        return loss.detach().float()

    def _backward_over_ranks(self, loss: torch.Tensor) -> None:
        """Backpropagate a scaled loss so that the gradients of all ranks add up.

        The reduction over ranks takes their mean, so the loss is multiplied by their number.
        """
        if self.world.size > 1:
            loss = loss * self.world.size
        self.scaler.scale(loss).backward()

    def _combine_ranks(
        self, step: GlobalStep, numbers: list[int], values: list[float]
    ) -> StepResult:
        """Combine the losses of all ranks into one result, in the order of their micro-batches.

        Args:
            step: The exchanged facts of the step.
            numbers: Numbers of the micro-batches that this rank ran.
            values: From each rank the loss shares of its micro-batches, then the gradient norm,
                which is the same on all ranks.

        Returns:
            The result. Its `losses` leave out micro-batches without a target.

        Example: two ranks, and three micro-batches with the weights 2, 1 and 1. Rank 0 ran numbers
        0 and 2, rank 1 number 1 and a repeated one: values are `[1.0, 0.5, norm, 0.25, 0.0, norm]`.
        The loss is 1.0 + 0.25 + 0.5, the losses are `[2.0, 1.0, 2.0]`.
        """
        # 1. The loss share of each micro-batch, by its number.
        rows = split_by_rank(values, self.world.size)
        *shares_here, grad_norm = rows[0]
        if self.world.size > 1:  # drops repeated micro-batches, and the norm at the end of each row
            shares = dict(enumerate(interleave_ranks(rows, len(step.facts))))
        else:  # only the micro-batches with a target ran
            shares = dict(zip(numbers, shares_here, strict=True))

        # 2. They add up to the loss of the step; each divided by its part of the weight is the mean
        # loss of its micro-batch.
        total = step.total_weight
        counted = [
            (shares[number], fact.weight) for number, fact in enumerate(step.facts) if fact.weight
        ]
        return StepResult(
            loss=sum(share for share, _ in counted),
            weight=total,
            grad_norm=grad_norm,
            losses=[share * total / weight for share, weight in counted],
        )

    def _lower_scale_on_overflow(self, result: StepResult) -> bool:
        """Lower the fp16 loss scale if it made a result non-finite; tell whether it did.

        In the other cases the scale stays:

        1. the loss itself is not finite;
        2. the scale is below 1: the gradients would overflow without a scale, too;
        3. all gradients are finite, and only their norm overflowed.
        """
        scale = self.scaler.get_scale()
        if not math.isfinite(result.loss) or scale < 1:
            self.scaler.update(scale)  # keeps the scale, and lets the next step unscale again
            return False
        self.scaler.update()  # lowers it if `unscale_` met a gradient that is not finite
        return self.scaler.get_scale() < scale
