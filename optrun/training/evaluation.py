"""The evaluations of a run: when one is due, and which values were the best so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from optrun.config.schema.training import TrainingConfig
from optrun.data.loader import Batch
from optrun.training.evaluate import evaluate
from optrun.training.ranking import Ranking, best_mode
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import TrainState, random_states, restore_random_states


class Evaluator:
    """Evaluates the model as it stands.

    Args:
        setup: Model and evaluation split.
        training: How often, and how many examples at a time.
        state: Where the run stands; holds the best values.
        ranking: Which metric ranks checkpoints.
        signal_handler: Requests by signal.
        waiting: Around each wait for a batch.
        progress: Told how many batches of how many are done.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        training: TrainingConfig,
        state: TrainState,
        ranking: Ranking,
        signal_handler: SignalHandler,
        waiting: Callable[[], AbstractContextManager[None]],
        progress: Callable[[int, int], None],
    ) -> None:
        self.setup = setup
        self.training = training
        self.state = state
        self.ranking = ranking
        self.signal_handler = signal_handler
        self.waiting = waiting
        self.progress = progress

    def due(self) -> bool:
        """Whether the configuration wants one after this step: every `training.eval_steps`, or at an epoch's end."""
        if not len(self.setup.task.eval):
            return False
        if self.training.eval_steps:
            return self.state.global_step % self.training.eval_steps == 0
        return (self.state.global_step + self.state.data_shift) % self.setup.plan.steps_per_epoch == 0

    def __call__(self) -> dict[str, float]:
        """Metrics of the evaluation split, with prefix; the model's random state is left as it was.

        Returns:
            Names to values; nothing where there are no evaluation rows (`data.eval_fraction=0`).

        Raises:
            Stopped: There was a request to stop before the end.
        """
        if not len(self.setup.task.eval):
            return {}
        train_step = self.setup.train_step
        states = random_states(train_step.device)
        try:
            with self.setup.evaluation_weights():
                found = evaluate(
                    train_step.model,
                    self._until_stopped(self.setup.eval_feed.evaluation(self.training.per_device_eval_batch_size)),
                    self.setup.task.evaluation(),
                    to_device=train_step.to_device,
                    autocast=train_step.autocast,
                )
        finally:
            self.progress(0, 0)
            restore_random_states(states, train_step.device)
        values = {f"eval/{name}": value for name, value in found.items()}
        self._remember_best(values)
        return values

    def _until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        total = -(-len(self.setup.task.eval) // self.training.per_device_eval_batch_size)
        for done in itertools.count():
            self.progress(done, total)
            try:
                with self.waiting():
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
        state = self.state
        for name, value in values.items():
            held = state.best.get(name)
            direction = Ranking(name, best_mode(name, self.ranking))
            if held is None or direction.better(value, held["value"]):
                state.best[name] = {"value": value, "step": state.global_step}
        state.ranking[str(state.global_step)] = values[self.ranking.metric]
