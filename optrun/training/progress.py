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


class Progress:
    """Counts steps into the state of the run, and tokens, examples and time since the last line.

    Args:
        setup: The run; its state is changed in place.
        clock: Returns seconds; monotonic.
    """

    def __init__(self, setup: TrainingSetup, clock: Callable[[], float]) -> None:
        self.setup = setup
        self.clock = clock
        self.begin()

    def begin(self) -> None:
        """Start to count training time, on top of the seconds of earlier starts of the run."""
        self.reset()
        self._training_begun = self.begun
        self._seconds_before = self.setup.state.seconds

    def reset(self) -> None:
        """Start a new interval, after a line of metrics."""
        self.begun = self.clock()
        self.tokens = 0
        self.samples = 0

    def exclude_seconds(self, seconds: float) -> None:
        """Exclude the seconds of an evaluation or save from the rates of this interval."""
        self.begun += seconds

    def count(self, result: StepResult, facts: Sequence[MicroBatchFacts]) -> None:
        """Count a step into the state of the run, and into the sums since the last line.

        A step with a non-finite loss or norm only adds its tokens and examples.

        Args:
            result: Loss, gradient norm and sums of the step.
            facts: Facts of each micro-batch of the step, over all ranks in their order.
        """
        state = self.setup.state
        task = self.setup.task

        # 1. Every step: its data and the time.
        state.global_step += 1
        state.batches_digest = digest_of_batches(
            state.batches_digest, (fact.digest for fact in facts)
        )
        for fact in facts:
            state.tokens += fact.tokens
            state.samples += fact.samples
            self.tokens += fact.tokens
            self.samples += fact.samples
        # Of earlier starts, and since this one began to train.
        state.seconds = self._seconds_before + self.clock() - self._training_begun
        if not result.finite:
            return

        # 2. Loss and gradient norm. The weight is the number of tokens or examples that the loss is
        # a mean over, so that the mean of a line weighs all of them alike.
        state.window_loss += result.loss * result.weight
        state.window_weight += result.weight
        state.grad_norm = result.grad_norm
        state.window_grad_norm = max(state.window_grad_norm, result.grad_norm)

        # 3. Sums of losses, targets and examples by source; sums of what the task measures.
        if result.by_source is not None:
            for name, sums in zip(task.sources, result.by_source, strict=True):
                before = state.window_sources.get(name, [0.0, 0.0, 0.0])
                state.window_sources[name] = [
                    total + addend for total, addend in zip(before, sums, strict=True)
                ]
        if result.measures is not None:
            for name, total in zip(task.measured, result.measures, strict=True):
                state.window_measures[name] = state.window_measures.get(name, 0.0) + total

    def metrics(self) -> dict[str, float]:
        """Compute the metrics of training since the last line, by name such as `train/loss`.

        There must have been a step with a finite loss since then: `window_weight` is above 0.
        """
        state = self.setup.state
        values = {
            "train/loss": state.window_loss / state.window_weight,
            "train/grad_norm": state.grad_norm,  # of the last step
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

        # Rates since the last line; without tokens for a task that has none, such as on images.
        seconds = max(self.clock() - self.begun, 1e-9)
        if self.tokens:
            values["perf/tokens_per_second"] = self.tokens / seconds
        if self.samples:
            values["perf/samples_per_second"] = self.samples / seconds
        values["perf/peak_memory_bytes"] = peak_memory_bytes(self.setup.train_step.device)
        return values


def learning_rates(groups: Sequence[PlainMapping]) -> dict[str, float]:
    """Return `train/lr`, the largest lr of all groups, and `lr/LAYER` if layers differ.

    Args:
        groups: Parameter groups with `lr`, and `layer` if they are divided by layer. A layer with
            several groups has the largest lr of these.

    Example:
        >>> learning_rates([{"lr": 0.1, "layer": "head"}, {"lr": 0.05, "layer": "block 3"}])
        {'train/lr': 0.1, 'lr/head': 0.1, 'lr/block_03': 0.05}
    """
    # 1. All groups are alike.
    rates = [float(group["lr"]) for group in groups]
    largest = {"train/lr": max(rates)}
    if len(set(rates)) == 1:
        return largest

    # 2. The largest lr of each layer, if layers differ.
    layers: dict[str, float] = {}
    for group, rate in zip(groups, rates, strict=True):
        if group.get("layer"):
            name = _metric_of_layer(str(group["layer"]))
            layers[name] = max(layers.get(name, 0.0), rate)
    if len(set(layers.values())) > 1:
        return {**largest, **layers}
    return largest


@cache
def _metric_of_layer(layer: str) -> str:
    """Name the learning rate of a layer, such as `lr/block_03` of "block 3"."""
    words = [f"{int(word):02d}" if word.isdecimal() else word for word in layer.split()]
    return "lr/" + "_".join(words)


def source_metrics(window: Mapping[str, list[float]]) -> dict[str, float]:
    """Compute `train/loss/SOURCE` and `train/share/SOURCE`, the source's share of the examples.

    Args:
        window: Sum of losses, targets and examples of each source; a source without a target gets
            no loss.

    Example:
        >>> source_metrics({"code": [6.0, 3, 1], "books": [0.0, 0, 3]})
        {'train/loss/code': 2.0, 'train/share/code': 0.25, 'train/share/books': 0.75}
    """
    total_examples = sum(examples for _, _, examples in window.values())
    losses = {}
    shares = {}
    for name, (loss, targets, examples) in window.items():
        if targets:
            losses[f"train/loss/{name}"] = loss / targets
        shares[f"train/share/{name}"] = examples / total_examples
    return losses | shares
