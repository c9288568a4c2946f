"""Early stopping on the main metric, as `transformers.EarlyStoppingCallback` does it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from optrun.base.options import StateDict
from optrun.base.plain import PlainMapping
from optrun.config.schema.training import TrainingConfig
from optrun.training.callback import Callback, TrainingContext
from optrun.training.ranking import Ranking


class EarlyStopping(Callback):
    """Ends training after a number of evaluations in a row without improvement.

    An evaluation improves if its value is better than the best one before it, by more than the
    threshold. A value that is better by less becomes the best one, too, but counts as no
    improvement. NaN never improves.

    Source: `transformers.EarlyStoppingCallback.check_metric_value`, with
        `Trainer._determine_best_metric` after it.

    Args:
        config: Has the patience, 1 or more, and the threshold.
        ranking: The metric, and which direction of it is better.
    """

    key = "training.early_stopping_patience"

    def __init__(self, config: TrainingConfig, ranking: Ranking) -> None:
        assert config.early_stopping_patience is not None
        self.patience = config.early_stopping_patience
        self.threshold = config.early_stopping_threshold
        self.ranking = ranking
        self.best: float | None = None
        """Best value of all evaluations so far; None: there was none."""
        self.counter = 0
        """Number of evaluations in a row without improvement."""

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Count an evaluation; request to stop after `patience` of them without improvement.

        The first evaluation always improves; if it is NaN, the worst possible value is stored as
        the best. An evaluation that is better by no more than the threshold counts as one without
        improvement, but its value is the new best: the next one is compared with it.
        """
        value = metrics[self.ranking.metric]
        # 1. The first evaluation; a better one, perhaps by less than the threshold; a worse one.
        if self.best is None:
            self.counter = 0
            self.best = value
            if math.isnan(value):
                self.best = math.inf if self.ranking.mode == "min" else -math.inf
        elif self.ranking.is_better(value, self.best):
            self.counter += 1
            if abs(value - self.best) > self.threshold:
                self.counter = 0
            self.best = value
        else:
            self.counter += 1

        # 2. Too many in a row without improvement.
        if self.counter >= self.patience:
            by_more = f" by more than {self.threshold:g}" if self.threshold else ""
            training.request_stop(
                f"no improvement of {self.ranking.metric}{by_more} in {self.counter} evaluations;"
                f" the best is {self.best:.6g}"
            )

    def state_dict(self) -> StateDict:
        """Return the counter and the best value, with their metric and its direction."""
        return {
            "metric": self.ranking.metric,
            "mode": self.ranking.mode,
            "best": self.best,
            "counter": self.counter,
        }

    def load_state_dict(self, state: PlainMapping) -> None:
        """Load counter and best value, unless they belong to another metric or direction."""
        if (state["metric"], state["mode"]) == (self.ranking.metric, self.ranking.mode):
            self.best = state["best"]
            self.counter = state["counter"]
