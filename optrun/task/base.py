"""What every task has.

Examples, batches, the loss and its weight, and the numbers that judge the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.config.schema.data import DataConfig
from optrun.config.schema.task_base import TaskConfig
from optrun.data.cache import digest
from optrun.data.columns import refuse_unused, text_column, texts
from optrun.data.examples import Example
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.task.evaluation import (
    IGNORED,
    EvaluationMetrics,
    MeanLoss,
    MetricAccumulator,
    TokenMetrics,
    metric_functions,
    predicted,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.generic import ModelOutput


class TextKind:
    """Which special tokens a tokenizer trained for a task puts around a text."""

    STREAM = "stream"
    """None around it; `<|endoftext|>` between documents."""
    PAIR = "pair"
    """[CLS] text [SEP] pair [SEP]."""
    SEQ2SEQ = "seq2seq"
    """text </s>."""
    CHAT = "chat"
    """None around it; `<|im_start|>` and `<|im_end|>`, which ends a text, for chats."""


@dataclass
class ModelNeeds:
    """What the data asks of a model."""

    config: dict[str, object] = field(default_factory=dict)
    """Values of the transformers configuration that the data decides, such as `id2label`."""
    max_length: int | None = None
    """Positions it must have room for."""


class Task(ABC):
    """Rows to examples, and a model's outputs to a loss and metrics.

    A task is built in three moves: `inspect` looks at columns and labels, so that what is wrong
    with them is told before anything is tokenized; `read` makes the training examples; `read` makes
    those of each evaluation set.

    Args:
        config: The task choice.
        data: Lengths and limits.
        source: Rows.
        tokenizer: Of the model; its image preparation where the task is about images.
        seed: Picks the training examples where they are limited.

    Attributes:
        name: The choice in `task=`.
        columns: Keys of `data` that it reads, such as `text_column`; the others are refused.
        train: Training examples.
        eval_sets: Evaluation examples by the name of the set; that of a single one is empty.
        labels: Names of the classes by number; empty where there are none.
        notes: What was decided where the configuration was silent.
        limits: The keys, with their values, after which texts are cut.
        main_metric: The metric that says which checkpoint is best.
        mode: `min` or `max`: which direction of it is better.
        reads_words: Whether the tokenizer is given one word at a time.
        shift: Whether the logits at a position predict the label of the next one.
        unit: What a loss is averaged over: `tokens` or `examples`.
        label_smoothing: `training.label_smoothing_factor`.
        sources: The names of the sources that the training examples are mixed of; empty where there
            is one.
        class_weights: Weight of each class in the loss, shape (classes,); None: all alike.
        measured: What `measure` sums over the examples of a batch, which training logs as means, by
            name.
        chunks_loss: Whether losses and metrics are also made of `TargetLosses`; a subclass says so
            itself.
        chunked: Whether they are in this run.
        router_loss_coef: What the loss that balances the experts of a model is multiplied by; None:
            the model returns no such loss.
        one_row: Whether a batch of blocks, whose documents see nothing of each other, is one row
            without padding.
        predictor: The class that predicts rows of a file, or its `module:attribute`; None: `optrun
            predict` is refused.

    Raises:
        ConfigError: Columns, labels or texts that do not fit the task.
    """

    columns: tuple[str, ...] = ()
    unit: str = "tokens"
    shift: bool = False
    text_kind: str = TextKind.PAIR
    reads_words: bool = False
    label_smoothing: float = 0.0
    class_weights: torch.Tensor | None = None
    predictor: str | type[Any] | None = None
    sources: Sequence[str] = ()
    measured: tuple[str, ...] = ()
    router_loss_coef: float | None = None
    one_row: bool = False
    chunks_loss: bool = False
    chunked: bool = False

    def __init__(
        self, config: Any, data: DataConfig, source: Source, tokenizer: Any, *, seed: int
    ) -> None:
        task_config: TaskConfig = config
        self.config = config
        self.name = task_config.kind
        self.main_metric = task_config.main_metric
        self.mode = task_config.MODE
        self.metrics = metric_functions(task_config)
        self.max_length = data.max_length
        self.limits = [f"data.max_length={data.max_length}"]
        self.notes: list[str] = []
        self.labels: list[str] = []
        padding = getattr(tokenizer, "pad_token_id", None)
        self.padding = 0 if padding is None else int(padding)
        refuse_unused(source.columns, self.columns, self.name)
        self.inspect(source, tokenizer)
        self.train = self.read(source, source.train, tokenizer, data.max_train_examples, seed)
        self.eval_sets = {
            name: self.read(source, split, tokenizer, data.max_eval_examples, None)
            for name, split in source.eval_sets.items()
        }

    @property
    def eval(self) -> ExampleSource:
        """The first evaluation set; the main metric is computed on it.

        Without an example where none are wanted.
        """
        return next(iter(self.eval_sets.values()))

    def join(self, others: Sequence[Task]) -> None:
        """Adopt settings of the other tasks of a mixture.

        This task is that of the first source.
        """
        del others  # most tasks need nothing

    def eval_fingerprint(self) -> str:
        """Digest the evaluation examples; of several sets with their names."""
        if list(self.eval_sets) == [""]:
            return self.eval.fingerprint()[:16]
        return digest(
            *(f"{name} {examples.fingerprint()}" for name, examples in self.eval_sets.items())
        )[:16]

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the training texts for a new tokenizer.

        Raises:
            ConfigError: A missing column.
        """
        return texts(source.train, text_column(source, source.train))

    def inspect(self, source: Source, tokenizer: Any) -> None:  # noqa: B027  # most tasks have something to look at
        """Look at columns, labels and the tokenizer, before any example is read.

        Raises:
            ConfigError: They do not fit the task.
        """

    @abstractmethod
    def read(
        self, source: Source, split: Split, tokenizer: Any, limit: int | None, seed: int | None
    ) -> ExampleSource:
        """Make the examples of a split.

        Args:
            source: Both splits; `split is source.train` says which it is.
            split: The rows.
            tokenizer: Of the model.
            limit: How many examples at most; None: all.
            seed: Picks them, as in `optrun.data.examples.chosen`.

        Raises:
            ConfigError: Rows that do not fit the task.
        """

    def needs(self) -> ModelNeeds:
        """Return the requirements of the data on the model."""
        return ModelNeeds(self.config.model_values(), self.config.positions(self.max_length))

    def adapt(self, model: PreTrainedModel) -> None:  # noqa: B027  # most tasks take it as it is
        """Change a newly built model before training."""

    def expect_step(self, examples: int) -> None:  # noqa: B027
        """Refuse an optimizer step of too few examples.

        Raises:
            ConfigError: With the keys that make it larger.
        """

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to one batch.

        The tokenizer's inputs, and `labels` of one a token, shape (batch, longest).

        Must be a pure function of its examples.
        """
        labels = pad((example["labels"] for example in examples), IGNORED)
        return {**model_inputs(examples, self.padding), "labels": labels}

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:  # noqa: ARG002
        """Change an example from epoch to epoch, as masking does; nothing by default."""
        return example

    # Loss
    # ----------------------------------------------------------------------------------------------

    def forward(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Run a model over a batch; `loss` and metrics get its outputs."""
        return model(**batch)

    def measure(self, outputs: ModelOutput, batch: Batch) -> torch.Tensor:
        """Sum the quantities in `measured` over a batch; shape (names,)."""
        raise NotImplementedError

    def targets(self, batch: Batch) -> torch.Tensor:
        """Return the labels of the loss; `IGNORED` marks positions without one."""
        if self.shift:
            return batch["labels"][:, 1:]
        return batch["labels"]

    def count(self, batch: Batch) -> int:
        """Count the targets of a batch, the denominator of the model's own mean loss."""
        return int(np.count_nonzero((self.targets(batch) != IGNORED).cpu().numpy()))

    def weight(self, batch: Batch) -> float:
        """Return the denominator of the mean in `loss`.

        The number of targets, or the sum of their class weights.
        """
        if self.class_weights is None:
            return self.count(batch)
        targets = self.targets(batch)
        return float(self.class_weights.double()[targets[targets != IGNORED]].sum())

    def loss(self, outputs: ModelOutput, batch: Batch) -> torch.Tensor:
        """Compute the training loss of a batch, a mean over `weight(batch)`; shape ().

        The model's own; with label smoothing or class weights torch's cross-entropy, which is what
        the `LabelSmoother` of transformers computes. `eval/loss` is the model's own where it
        returns one, so that runs compare.

        Args:
            outputs: What the model returned; has `loss` and `logits`.
            batch: What it was given.

        Raises:
            ConfigError: The model returned none.
        """
        if not self.label_smoothing and self.class_weights is None:
            model_loss: torch.Tensor | None = getattr(outputs, "loss", None)
            if model_loss is None:
                raise ConfigError(
                    f"task={self.name}: the model returned no loss"
                    f" ({type(self.config).__name__}.AUTO_CLASS={self.config.AUTO_CLASS}). Name a"
                    f" class with a head there, or write {type(self).__name__}.loss."
                )
            return model_loss
        if self.chunked:
            smoothed: torch.Tensor = torch.lerp(outputs.loss, outputs.even, self.label_smoothing)
            return smoothed
        logits, targets = self._flat(outputs, batch)
        weight = None if self.class_weights is None else self.class_weights.to(logits.device)
        loss = functional.cross_entropy(
            logits,
            targets,
            weight=weight,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        return loss + self.router_loss(outputs)

    def router_loss(self, outputs: Any) -> torch.Tensor | float:
        """Return the weighted load-balancing loss of the experts; 0 without experts.

        The model's own loss holds it, if labels are given.
        """
        loss = getattr(outputs, "aux_loss", None)
        if self.router_loss_coef is None or not isinstance(loss, torch.Tensor):
            return 0.0
        return self.router_loss_coef * loss.to(outputs.logits.device)

    def _flat(self, outputs: ModelOutput, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Put logits beside their targets; shape (targets, classes) and (targets,)."""
        logits = outputs.logits[:, :-1] if self.shift else outputs.logits
        return logits.reshape(-1, logits.shape[-1]).float(), self.targets(batch).reshape(-1)

    def loss_by_example(
        self, outputs: ModelOutput, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the losses over each example's targets, and count these; shape (batch,) each.

        Plain cross-entropy, whatever the training loss is made of.
        """
        is_target = self.targets(batch) != IGNORED
        if self.chunked:
            token_losses = outputs.losses
        else:
            token_losses = functional.cross_entropy(
                *self._flat(outputs, batch), ignore_index=IGNORED, reduction="none"
            )
        return token_losses.reshape(len(is_target), -1).sum(1), is_target.reshape(
            len(is_target), -1
        ).sum(1)

    # Evaluation
    # ----------------------------------------------------------------------------------------------

    def predictions(self, outputs: ModelOutput, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return predicted and true classes of a batch for the registered metrics.

        Shape (targets,) each.
        """
        targets = self.targets(batch)
        is_target = targets != IGNORED
        return (
            predicted(outputs, shift=self.shift)[is_target].cpu().numpy(),
            targets[is_target].cpu().numpy(),
        )

    def running_metrics(self) -> MetricAccumulator:
        """Make empty metrics to be updated batch by batch, besides those of `task.metrics`.

        The mean loss by default.
        """
        return MeanLoss(self.count)

    def evaluation(self) -> MetricAccumulator:
        """Make empty metrics.

        Those counted batch by batch, then the registered ones over the whole set.
        """
        running = self.running_metrics()
        return EvaluationMetrics(
            running, self.metrics, self.predictions, len(self.labels), self.labels, self.loss
        )

    def token_metrics(self, *, shift: bool) -> TokenMetrics:
        """Make loss, perplexity and accuracy of tokens; the loss of experts stands by itself."""
        router = None if self.router_loss_coef is None else self.router_loss
        return TokenMetrics(shift=shift, router_loss=router)

    def metric_names(self) -> list[str]:
        """List the names in `evaluation().compute()`."""
        return self.evaluation().names

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """Count tokens (without padding) and examples of a batch, for throughput."""
        if "attention_mask" in batch:
            return int(batch["attention_mask"].sum()), int(batch["attention_mask"].shape[0])
        first = next(iter(batch.values()))
        return (first.numel() if "input_ids" in batch else 0), int(first.shape[0])

    def sample(
        self, model: PreTrainedModel, tokenizer: Any, *, seed: int
    ) -> tuple[str, str] | None:
        """Sample a continuation of a prompt for people to read.

        None: the task has no such thing.
        """
        del model, tokenizer, seed
        return None

    def shown(self, tokenizer: Any) -> str | None:  # noqa: ARG002
        """Show a training example as a person reads it, its targets marked.

        None: there is nothing to read.
        """
        return None


def pad(rows: Iterable[np.ndarray], value: int) -> torch.Tensor:
    """Pad rows of unequal length to one tensor of shape (rows, longest), int64."""
    rows = list(rows)
    out = np.full((len(rows), max(len(row) for row in rows)), value, dtype=np.int64)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(out)


def in_one_row(batch: Batch, lengths: Iterable[int]) -> Batch:
    """Join rows one behind another, without their padding; shape (1, tokens)."""
    inside = pad((np.ones(length, dtype=np.int64) for length in lengths), 0).bool()
    return {name: values[inside][None] for name, values in batch.items()}


def pad_inputs(examples: Sequence[Example], padding: int, *, left: bool = False) -> Batch:
    """Pad `input_ids`, `attention_mask`, and `token_type_ids` if there are some.

    Shape (batch, longest). `left` puts the padding before a row, as a decoder that continues it
    needs it.
    """

    def fill(rows: Iterable[np.ndarray], value: int) -> torch.Tensor:
        if left:
            return pad((row[::-1] for row in rows), value).flip(1)
        return pad(rows, value)

    rows = [example["input_ids"] for example in examples]
    masks = (np.ones_like(row) for row in rows)
    batch = {"input_ids": fill(rows, padding), "attention_mask": fill(masks, 0)}
    if "token_type_ids" in examples[0]:
        batch["token_type_ids"] = fill((example["token_type_ids"] for example in examples), 0)
    return batch


def model_inputs(examples: Sequence[Example], padding: int) -> Batch:
    """Pad as `pad_inputs`, with a mask only if something is padded.

    To learn whether a mask masks anything, transformers reads it from the device, and waits.
    """
    batch = pad_inputs(examples, padding)
    if len({len(example["input_ids"]) for example in examples}) == 1:
        del batch["attention_mask"]
    return batch
