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

    An evaluation improves where its value is better than the best of all before it, and by more
    than the threshold; the best is the plain one, whatever the threshold. A NaN never improves.

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
        """Of all evaluations up to now; None: there was none."""
        self.counter = 0
        """Evaluations in a row that did not improve."""

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Count an evaluation, and request the stop when `patience` of them did not improve.

        The first evaluation improves always; if it is NaN, the worst possible value is the best.
        """
        value = metrics[self.ranking.metric]
        if self.best is None:
            self.counter = 0
            self.best = value
            if math.isnan(value):
                self.best = math.inf if self.ranking.mode == "min" else -math.inf
        elif self.ranking.better(value, self.best):
            is_enough = abs(value - self.best) > self.threshold
            self.counter = 0 if is_enough else self.counter + 1
            self.best = value
        else:
            self.counter += 1
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
        """Load counter and best value; nothing if they are of another metric or direction."""
        if (state["metric"], state["mode"]) == (self.ranking.metric, self.ranking.mode):
            self.best = state["best"]
            self.counter = state["counter"]
