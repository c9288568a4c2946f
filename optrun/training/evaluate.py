"""Evaluate a model on its evaluation sets, and decide when a run does so."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from optrun.base.errors import OptrunError
from optrun.data.loader import Batch, BatchLoader, share_of
from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.world import ALONE, World
from optrun.training.failures import explain_out_of_memory_in_evaluation, waiting_for_workers
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
    """Compute the metrics of a model on every evaluation set; restore its mode afterwards.

    Ranks share the batches of a set, and each example counts once. If the metrics of a task cannot
    be merged, every rank runs over all batches.

    Args:
        model: Called with a batch's tensors by name; set to evaluation mode meanwhile.
        loaders: Loader of each set by name; the name of a single set is empty.
        batch_size: Examples of a batch.
        metrics: Constructs empty metrics.
        watch: Wraps the batches of a set; called with the batches, the number of batches of earlier
            sets, and the number of batches of all sets, on this rank.
        precision: Device of the model, and autocast of the forward pass.
        world: The ranks.
        keep: Called with the name of each set and its metrics, when the set is done.
        forward: Runs the model over a batch.

    Returns:
        Values by `eval/METRIC`, or `eval/SET/METRIC` for named sets.

    Raises:
        OptrunError: Out of memory, or a metric is not a number.
    """
    # 1. Divide the batches of each set over the ranks. `shares` has the numbers of this rank's
    # batches: of 5 batches, rank 0 of 2 has 0, 2, 4, and rank 1 has 1, 3, 5. There is no batch 5,
    # so that this rank repeats one, to run as many forward passes as the other.
    rank = 0
    ranks = 1
    if getattr(metrics(), "mergeable", False):
        rank = world.rank
        ranks = world.size
    counts = {name: -(-len(loader.examples) // batch_size) for name, loader in loaders.items()}
    shares = {name: share_of(count, rank, ranks) for name, count in counts.items()}
    total = sum(map(len, shares.values()))

    # 2. Evaluate set by set.
    values: dict[str, float] = {}
    batches_before = 0
    was_training = model.training
    model.eval()
    try:
        for name, loader in loaders.items():
            # Run the model over the batches, without counting a repeated one.
            accumulator = metrics()
            counted = sum(number < counts[name] for number in shares[name])
            batches = watch(loader.evaluation(batch_size, rank, ranks), batches_before, total)
            with torch.no_grad():
                for index, batch in enumerate(batches):
                    with explain_out_of_memory_in_evaluation(batch):
                        moved = precision.to_device(batch)
                        with precision.autocast():
                            outputs = forward(model, moved)
                        if index < counted:
                            accumulator.update(outputs, moved)

            # Merge the counts of all ranks, and compute the metrics.
            if ranks > 1:
                accumulator.merge(world.gather_objects(accumulator.partial()))
            prefix = f"eval/{name}/" if name else "eval/"
            for metric, value in accumulator.compute().items():
                values[f"{prefix}{metric}"] = _refuse_non_number(f"{prefix}{metric}", value)
            if keep is not None:
                keep(name, accumulator)
            batches_before += len(shares[name])
    finally:
        model.train(was_training)
    return values


def _refuse_non_number(name: str, value: object) -> float:
    """Return the value of a metric; refuse other types than numbers, such as bool.

    Raises:
        OptrunError: With the name and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptrunError(f"{name}: the task's metrics gave {value!r:.60}: expected one number.")
    return value


@dataclass(eq=False)
class Evaluator:
    """Evaluates the model of a run."""

    setup: TrainingSetup
    """Has the model and the evaluation sets."""
    signal_handler: SignalHandler
    """Requests by signal, which end an evaluation."""
    progress: Callable[[int, int], None]
    """Called with the number of batches that are done, and of all; (0, 0) at the end."""
    keep: Callable[[str, Any], object] | None
    """As for `evaluate_sets`."""

    def due(self, step: int) -> bool:
        """Tell whether an evaluation is due after a step; never without evaluation rows.

        It is due every `training.eval_steps` steps, or if that is null at the end of an epoch.
        """
        setup = self.setup
        if not len(setup.task.eval):
            return False
        if setup.config.eval_steps:
            return step % setup.config.eval_steps == 0
        # The end of an epoch is where the plan of the data is. After the batch size was changed, it
        # is some steps of data ahead of `step`.
        shift = setup.state.data_shift
        return (step + shift) % setup.plan.steps_per_epoch == 0

    def __call__(self, *, trained: bool = True) -> dict[str, float]:
        """Evaluate the model on all sets; restore the random states afterwards.

        Args:
            trained: False before the first step: the model runs uncompiled, so that training
                compiles what it would compile without this evaluation, and `keep` is not called.

        Returns:
            Values by name, such as `eval/loss`; empty without evaluation rows
            (`data.eval_fraction=0`).

        Raises:
            Stopped: A signal to stop arrived on some rank.
            OptrunError: The metric that ranks checkpoints is not among the values; or as
                `evaluate_sets`.
        """
        setup = self.setup
        train_step = setup.train_step
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
                    self._yield_until_stopped,
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
                f"{setup.ranking.metric}: task={setup.task.name} lists this metric, but its"
                f" evaluation did not return it. It returned: {', '.join(values) or 'nothing'}."
            )
        return values

    def _yield_until_stopped(
        self, batches: Iterator[Batch], before: int, total: int
    ) -> Iterator[Batch]:
        """Yield batches with progress and heartbeats; raise Stopped after a signal to stop.

        Args:
            batches: The batches of one set on this rank.
            before: Number of batches of earlier sets.
            total: Number of batches of all sets.
        """
        workers = self.setup.train_loader.workers  # the same for every loader
        for done in itertools.count(before):
            self.progress(done, total)
            beat(Phase.evaluating, self.setup.state.global_step)
            # 1. Wait for the next batch; None after the last one.
            try:
                with waiting_for_workers(workers, self.setup.config.dataloader_timeout):
                    batch = next(batches, None)
            except RuntimeError:
                # A signal to the whole process group killed a worker, too.
                if self.signal_handler.stop_requested and self.setup.train_step.world.size == 1:
                    raise Stopped from None
                raise
            if batch is None:
                return

            # 2. Between two batches all ranks agree whether to go on; raises Stopped if not.
            self._stop_if_signalled()
            yield batch

    def _stop_if_signalled(self) -> None:
        """End the evaluation on all ranks if one of them has received a signal to stop.

        Raises:
            Stopped: With the number of that signal.
        """
        signal_here = float(self.signal_handler.stop_signal or 0)  # 0: none
        rows = self.setup.train_step.world.all_gather([signal_here])  # a row of each rank
        signal = int(max(number for (number,) in rows))
        if signal:
            raise Stopped(signal)
