"""Model and evaluation split to metrics, and when a run does that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from optrun.data.loader import Batch
from optrun.training.failures import of_memory_in_evaluation, waiting_for_workers
from optrun.training.ranking import Ranking, best_mode
from optrun.training.setup import Metrics, TrainingSetup
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import RandomStates


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    metrics: Metrics,
    *,
    to_device: Callable[[Batch], Batch],
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Run a model over all batches; its mode is put back.

    Args:
        model: Called with a batch's tensors by name.
        batches: The evaluation split.
        metrics: Empty; takes each batch in.
        to_device: Moves a batch to the model.
        autocast: The precision of the forward pass.

    Returns:
        Names without prefix to values.

    Raises:
        OptrunError: Memory does not suffice.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                with of_memory_in_evaluation(batch):
                    moved = to_device(batch)
                    with autocast():
                        outputs = model(**moved)
                    metrics.update(outputs, moved)
    finally:
        model.train(training)
    return metrics.compute()


class Evaluator:
    """Evaluates the model as it stands.

    Args:
        setup: Model and evaluation split; its state holds the best values.
        signal_handler: Requests by signal.
        progress: Told how many batches of how many are done.
    """

    def __init__(
        self, setup: TrainingSetup, signal_handler: SignalHandler, progress: Callable[[int, int], None]
    ) -> None:
        self.setup = setup
        self.signal_handler = signal_handler
        self.progress = progress
        self.batch_size = setup.config.per_device_eval_batch_size

    def due(self) -> bool:
        """Whether the configuration wants one after this step: every `training.eval_steps`, or at an epoch's end."""
        setup, state = self.setup, self.setup.state
        if not len(setup.task.eval):
            return False
        if setup.config.eval_steps:
            return state.global_step % setup.config.eval_steps == 0
        return (state.global_step + state.data_shift) % setup.plan.steps_per_epoch == 0

    def __call__(self) -> dict[str, float]:
        """Evaluate; random states are left as they were.

        Returns:
            Names with prefix to values; nothing where there are no evaluation rows (`data.eval_fraction=0`).

        Raises:
            Stopped: There was a request to stop before the end.
        """
        setup, train_step = self.setup, self.setup.train_step
        if not len(setup.task.eval):
            return {}
        states = RandomStates(train_step.device)
        try:
            with setup.evaluation_weights():
                found = evaluate(
                    train_step.model,
                    self._until_stopped(setup.eval_loader.evaluation(self.batch_size)),
                    setup.task.evaluation(),
                    to_device=train_step.to_device,
                    autocast=train_step.autocast,
                )
        finally:
            self.progress(0, 0)
            states.restore()
        values = {f"eval/{name}": value for name, value in found.items()}
        self._remember_best(values)
        return values

    def _until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        total = -(-len(self.setup.task.eval) // self.batch_size)
        for done in itertools.count():
            self.progress(done, total)
            try:
                with waiting_for_workers(self.setup.eval_loader.workers, self.setup.config.dataloader_timeout):
                    batch = next(batches, None)
            except RuntimeError:
                if self.signal_handler.stop_requested:  # a signal to the whole group, which ended a worker too
                    raise Stopped from None
                raise
            if batch is None:
                return
            if self.signal_handler.stop_requested:
                raise Stopped
            yield batch

    def _remember_best(self, values: Mapping[str, float]) -> None:
        state, ranking = self.setup.state, self.setup.ranking
        for name, value in values.items():
            held = state.best.get(name)
            if held is None or Ranking(name, best_mode(name, ranking)).better(value, held["value"]):
                state.best[name] = {"value": value, "step": state.global_step}
        state.ranking[str(state.global_step)] = values[ranking.metric]
