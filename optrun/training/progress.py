"""Count the tokens, examples and speed of training, and make the metrics of a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from optrun.base.plain import PlainMapping
from optrun.training.device import peak_memory_bytes
from optrun.training.exchange import MicroBatchFacts
from optrun.training.setup import TrainingSetup
from optrun.training.state import digest_of_batches
from optrun.training.step import StepResult


class Throughput:
    """Counts tokens, examples and training time since the last metrics line.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.begun = self.clock()
        self.tokens = 0
        self.samples = 0

    def add(self, tokens: int, samples: int) -> None:
        """Count a micro-batch."""
        self.tokens += tokens
        self.samples += samples

    def leave_out(self, seconds: float) -> None:
        """Leave out the time of an evaluation or of the copy for a checkpoint."""
        self.begun += seconds

    def rates(self) -> dict[str, float]:
        """Compute tokens and samples per second; nothing if there were none."""
        elapsed = max(self.clock() - self.begun, 1e-9)
        counted = {"perf/tokens_per_second": self.tokens, "perf/samples_per_second": self.samples}
        return {name: count / elapsed for name, count in counted.items() if count}


class Progress(Throughput):
    """Counts steps into the state of the run.

    Args:
        setup: What is trained.
        clock: As for `Throughput`.
    """

    def __init__(self, setup: TrainingSetup, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.setup = setup
        self.begin()

    def begin(self) -> None:
        """Begin to count training time."""
        self.reset()
        self._training_begun = self.begun
        self._seconds_before = self.setup.state.seconds

    def count(self, result: StepResult, facts: Sequence[MicroBatchFacts]) -> None:
        """Count a step, with the micro-batches of all ranks."""
        state = self.setup.state
        task = self.setup.task
        state.global_step += 1
        state.batches_digest = digest_of_batches(
            state.batches_digest, (fact.digest for fact in facts)
        )
        for fact in facts:
            state.tokens += fact.tokens
            state.samples += fact.samples
            self.add(fact.tokens, fact.samples)
        if result.finite:
            state.window_loss += result.loss * result.weight
            state.window_weight += result.weight
            state.grad_norm = result.grad_norm
            state.window_grad_norm = max(state.window_grad_norm, result.grad_norm)
            for name, sums in zip(task.sources, result.by_source or (), strict=False):
                before = state.window_sources.get(name, [0.0, 0.0, 0.0])
                state.window_sources[name] = [
                    total + addend for total, addend in zip(before, sums, strict=True)
                ]
            for name, total in zip(task.measured, result.measures or (), strict=False):
                state.window_measures[name] = state.window_measures.get(name, 0.0) + total
        state.seconds = self._seconds_before + self.clock() - self._training_begun

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of training since the last line."""
        state = self.setup.state
        values = {
            "train/loss": state.window_loss / state.window_weight,
            "train/grad_norm": state.grad_norm,
            "train/grad_norm_max": max(state.window_grad_norm, state.grad_norm),
            **{
                f"train/{name}": total / state.window_weight
                for name, total in state.window_measures.items()
            },
            **source_metrics(state.window_sources),
            **state.lrs,
        }
        if state.skipped_steps:
            values["train/skipped_steps"] = state.skipped_steps
        if state.rollbacks:
            values["train/rollbacks"] = state.rollbacks
        values |= self.rates()
        return {**values, "perf/peak_memory_bytes": peak_memory_bytes(self.setup.train_step.device)}


def learning_rates(groups: Sequence[PlainMapping]) -> dict[str, float]:
    """Return `train/lr`, the largest of all groups, and `lr/<layer>` if layers have different ones.

    Args:
        groups: Parameter groups, with `lr` and, where they were divided by layer, `layer`.

    Example:
        >>> learning_rates([{"lr": 0.1, "layer": "head"}, {"lr": 0.05, "layer": "block 3"}])
        {'train/lr': 0.1, 'lr/head': 0.1, 'lr/block_03': 0.05}
    """
    rates = [float(group["lr"]) for group in groups]
    peak = {"train/lr": max(rates)}
    if len(set(rates)) == 1:
        return peak
    layers: dict[str, float] = {}
    for group, rate in zip(groups, rates, strict=True):
        if group.get("layer"):
            name = _metric_of_layer(str(group["layer"]))
            layers[name] = max(layers.get(name, 0.0), rate)
    if len(set(layers.values())) > 1:
        return {**peak, **layers}
    return peak


@cache
def _metric_of_layer(layer: str) -> str:
    """Name the learning rate of a layer, such as `lr/block_03` of "block 3"."""
    pieces = [f"{int(piece):02d}" if piece.isdecimal() else piece for piece in layer.split()]
    return "lr/" + "_".join(pieces)


def source_metrics(window: Mapping[str, list[float]]) -> dict[str, float]:
    """Compute the loss of each source of a mixture, and its share of the examples."""
    examples = sum(count for _, _, count in window.values())
    losses = {
        f"train/loss/{name}": loss / targets
        for name, (loss, targets, _) in window.items()
        if targets
    }
    return {
        **losses,
        **{f"train/share/{name}": count / examples for name, (_, _, count) in window.items()},
    }
