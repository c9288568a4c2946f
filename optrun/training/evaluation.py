"""The evaluations of a run: when one is due, and which values were the best so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from optrun.config.training import TrainingConfig
from optrun.data.loader import Batch
from optrun.training.evaluate import evaluate
from optrun.training.interrupts import Interrupts, Stopped
from optrun.training.learner import Learner
from optrun.training.ranking import Ranking, best_mode
from optrun.training.state import TrainState, random_states, restore_random_states


class Evaluation:
    """Evaluates the model as it stands.

    Args:
        learner: Model and evaluation split.
        training: How often, and how many examples at a time.
        state: Where the run stands; holds the best values.
        ranking: Which metric ranks checkpoints.
        interrupts: Requests by signal.
        waiting: Around each wait for a batch.
        progress: Told how many batches of how many are done.
    """

    def __init__(
        self,
        learner: Learner,
        training: TrainingConfig,
        state: TrainState,
        ranking: Ranking,
        interrupts: Interrupts,
        waiting: Callable[[], AbstractContextManager[None]],
        progress: Callable[[int, int], None],
    ) -> None:
        self.learner = learner
        self.training = training
        self.state = state
        self.ranking = ranking
        self.interrupts = interrupts
        self.waiting = waiting
        self.progress = progress

    def due(self) -> bool:
        """Whether the configuration wants one after this step: every `training.eval_steps`, or at an epoch's end."""
        if not len(self.learner.task.eval):
            return False
        if self.training.eval_steps:
            return self.state.global_step % self.training.eval_steps == 0
        return (self.state.global_step + self.state.data_shift) % self.learner.plan.steps_per_epoch == 0

    def __call__(self) -> dict[str, float]:
        """Metrics of the evaluation split, with prefix; the model's random state is left as it was.

        Returns:
            Names to values; nothing where there are no evaluation rows (`data.eval_fraction=0`).

        Raises:
            Stopped: There was a request to stop before the end.
        """
        if not len(self.learner.task.eval):
            return {}
        stepper = self.learner.stepper
        states = random_states(stepper.device)
        try:
            with self.learner.evaluation_weights():
                found = evaluate(
                    stepper.model,
                    self._until_stopped(self.learner.eval_feed.evaluation(self.training.per_device_eval_batch_size)),
                    self.learner.task.evaluation(),
                    to_device=stepper.to_device,
                    autocast=stepper.autocast,
                )
        finally:
            self.progress(0, 0)
            restore_random_states(states, stepper.device)
        values = {f"eval/{name}": value for name, value in found.items()}
        self._remember_best(values)
        return values

    def _until_stopped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        total = -(-len(self.learner.task.eval) // self.training.per_device_eval_batch_size)
        for done in itertools.count():
            self.progress(done, total)
            try:
                with self.waiting():
                    batch = next(batches, None)
            except RuntimeError:
                if self.interrupts.stop_requested:  # a signal to the whole group, which ended a worker too
                    raise Stopped from None
                raise
            if batch is None:
                return
            if self.interrupts.stop_requested:
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
