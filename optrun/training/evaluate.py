"""Evaluate a model on its evaluation sets, and decide when a run does so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optrun.base.errors import OptrunError
from optrun.base.plain import PlainMapping
from optrun.data.loader import Batch, BatchLoader, share_of
from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.world import ALONE, World
from optrun.training.failures import of_memory_in_evaluation, waiting_for_workers
from optrun.training.setup import Metrics, TrainingSetup
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import RandomStates
from optrun.training.step import Precision, plain_forward


def evaluate_sets(
    model: torch.nn.Module,
    loaders: Mapping[str, BatchLoader],
    batch_size: int,
    metrics: Callable[[], Metrics],
    watch: Callable[[Iterator[Batch], int, int], Iterable[Batch]],
    *,
    precision: Precision,
    world: World = ALONE,
    keep: Callable[[str, Any], object] | None = None,
    forward: Callable[[Any, Batch], Any] = plain_forward,
) -> dict[str, float]:
    """Run a model over every evaluation set; its mode is put back.

    Several ranks share the batches of a set, each example counted once. Where the metrics of a task
    cannot be merged, every rank runs over all of them.

    Args:
        model: Called with a batch's tensors by name.
        loaders: The sets by name; that of a single one is empty.
        batch_size: Examples of a batch.
        metrics: Makes empty metrics.
        watch: Stands between the batches of a set and the model; told how many batches there were
            before, and how many there are in all.
        precision: Of the forward pass, and where the model is.
        world: The ranks.
        keep: Told the name of each set and the metrics of it, which know more than their values;
            None: nobody asks.
        forward: Runs the model over a batch.

    Returns:
        `eval/METRIC`, or `eval/SET/METRIC`, to values.

    Raises:
        OptrunError: Memory does not suffice, or a metric is no number.
    """
    rank, ranks = (world.rank, world.size) if getattr(metrics(), "mergeable", False) else (0, 1)
    counts = {name: -(-len(loader.examples) // batch_size) for name, loader in loaders.items()}
    shares = {name: share_of(count, rank, ranks) for name, count in counts.items()}
    total = sum(map(len, shares.values()))
    values: dict[str, float] = {}
    before = 0
    training = model.training
    model.eval()
    try:
        for name, loader in loaders.items():
            accumulator = metrics()
            counted = sum(
                number < counts[name] for number in shares[name]
            )  # those after them run as other ranks do
            batches = watch(loader.evaluation(batch_size, rank, ranks), before, total)
            with torch.no_grad():
                for number, batch in enumerate(batches):
                    with of_memory_in_evaluation(batch):
                        moved = precision.to_device(batch)
                        with precision.autocast():
                            outputs = forward(model, moved)
                        if number < counted:
                            accumulator.update(outputs, moved)
            if ranks > 1:
                accumulator.merge(world.gather_objects(accumulator.partial()))
            prefix = f"eval/{name}/" if name else "eval/"
            values |= {
                f"{prefix}{metric}": value
                for metric, value in _numbers(accumulator.compute(), prefix).items()
            }
            if keep is not None:
                keep(name, accumulator)
            before += len(shares[name])
    finally:
        model.train(training)
    return values


def _numbers(values: PlainMapping, prefix: str) -> Mapping[str, float]:
    """Check that every metric is a number.

    Raises:
        OptrunError: One is none.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptrunError(
                f"{prefix}{name}: the task's metrics gave {value!r:.60}: expected one number."
            )
    return values


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model as it stands."""

    setup: TrainingSetup
    """Model and evaluation split."""
    signal_handler: SignalHandler
    """Requests by signal."""
    progress: Callable[[int, int], None]
    """Told how many batches of how many are done."""
    keep: Callable[[str, Any], object] | None = None
    """As for `evaluate_sets`."""

    def due(self, step: int) -> bool:
        """Tell whether an evaluation is due after a step.

        Every `training.eval_steps`, or at an epoch's end.
        """
        setup = self.setup
        state = self.setup.state
        if not len(setup.task.eval):
            return False
        if setup.config.eval_steps:
            return step % setup.config.eval_steps == 0
        return (step + state.data_shift) % setup.plan.steps_per_epoch == 0

    def __call__(self, *, trained: bool = True) -> dict[str, float]:
        """Evaluate; random states are left as they were.

        Args:
            trained: False before the first step: the model runs as it is, not compiled, so that
                training compiles what it would have compiled without; figures of classes are not
                kept.

        Returns:
            Names with prefix to values; nothing where there are no evaluation rows
            (`data.eval_fraction=0`).

        Raises:
            Stopped: There was a request to stop before the end.
        """
        setup = self.setup
        train_step = self.setup.train_step
        if not len(setup.task.eval):
            return {}
        states = RandomStates(train_step.device)
        model = train_step.model
        try:
            with setup.evaluation_weights():
                values = evaluate_sets(
                    model if trained else getattr(model, "_orig_mod", model),
                    setup.eval_loaders,
                    setup.config.per_device_eval_batch_size,
                    setup.task.evaluation,
                    self._until_stopped,
                    precision=train_step,
                    world=train_step.world,
                    keep=self.keep if trained else None,
                    forward=setup.task.forward,
                )
        finally:
            self.progress(0, 0)
            states.restore()
        if setup.ranking.metric not in values:
            raise OptrunError(
                f"{setup.ranking.metric}: the metrics of task={setup.task.name} have this name, and"
                f" the evaluation gave none. It gave: {', '.join(values) or 'nothing'}."
            )
        return values

    def _until_stopped(self, batches: Iterator[Batch], before: int, total: int) -> Iterator[Batch]:
        """Yield batches with progress and heartbeats; raises Stopped when a signal asks for it."""
        workers = self.setup.train_loader.workers
        for done in itertools.count(before):
            self.progress(done, total)
            beat(Phase.evaluating, self.setup.state.global_step)
            try:
                with waiting_for_workers(workers, self.setup.config.dataloader_timeout):
                    batch = next(batches, None)
            except RuntimeError:
                # A signal to the whole group, which ended a worker, too.
                if self.signal_handler.stop_requested and self.setup.train_step.world.size == 1:
                    raise Stopped from None
                raise
            if batch is None:
                return
            self._stop_if_asked()
            yield batch

    def _stop_if_asked(self) -> None:
        """End the evaluation on all ranks where one of them was asked to stop.

        Raises:
            Stopped: With the number of the signal.
        """
        signals = self.setup.train_step.world.all_gather(
            [float(self.signal_handler.stop_signal or 0)]
        )
        signal = int(max(number for (number,) in signals))
        if signal:
            raise Stopped(signal)
