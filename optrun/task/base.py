"""The base class of tasks: examples, batches, the loss and its weight, predictions and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
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
    PredictionsAndLabels,
    TokenMetrics,
    metric_functions,
    predicted_classes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.generic import ModelOutput


class TextKind:
    """Kinds of texts; which special tokens a tokenizer that is trained for a task adds to them."""

    STREAM = "stream"
    """text, with `<|endoftext|>` between documents."""
    PAIR = "pair"
    """[CLS] text [SEP] pair [SEP]."""
    SEQ2SEQ = "seq2seq"
    """text </s>."""
    CHAT = "chat"
    """text; `<|im_start|>` and `<|im_end|>` are in the vocabulary, the latter ends a text."""


@dataclass
class ModelNeeds:
    """Requirements of the data on a model."""

    config: dict[str, object]
    """Values of the transformers configuration that the data decides, such as `id2label`."""
    max_length: int | None = None
    """Number of positions that it must have; None: any."""


class Task(ABC):
    """Turns rows into examples, and the outputs of a model into a loss and metrics.

    The constructor calls `inspect`, which checks columns and labels before anything is tokenized,
    then `read` for the training examples, then `read` for each evaluation set.

    Args:
        config: The task choice.
        data: Has `max_length` and the limits on the number of examples.
        source: Rows of all splits.
        tokenizer: Of the model; for a task on images the model's image preparation.
        seed: Picks the training examples if `data.max_train_examples` limits them.

    Attributes:
        name: The choice in `task=`.
        columns: Keys of `data` that the task reads, such as `text_column`; other column keys are
            refused.
        train: Training examples.
        eval_sets: Evaluation examples by the name of the set; the name of a single set is empty.
        labels: Names of the classes by number; empty without classes.
        notes: Decisions where the configuration was silent, for the user.
        limits: Keys with their values, such as `data.max_length=128`, after which texts are
            truncated.
        main_metric: The metric that decides which checkpoint is best, without `eval/`.
        mode: The better direction of it, `min` or `max`.
        reads_words: Whether the tokenizer is called with lists of words.
        shift: Whether the logits at a position predict the label of the next position.
        unit: What a loss is averaged over: `tokens` or `examples`.
        label_smoothing: `training.label_smoothing_factor`.
        sources: Names of the sources of a mixture; empty without a mixture.
        class_weights: Weight of each class in the training loss, shape (classes,); None: no
            weights.
        measured: Names of the sums that `measure` returns; training logs their means over examples.
        chunks_loss: Whether loss and metrics can be computed from `TargetLosses`, without logits.
        chunked: Whether they are in this run (`training.chunked_loss`).
        router_loss_coef: Factor of the load-balancing loss of a mixture of experts; None: the model
            returns no such loss.
        one_row: Whether a batch of packed blocks is one row without padding, in which documents do
            not attend to each other.
        predictor: The class that predicts rows of a file, or its `module:attribute`; None: `optrun
            predict` is refused.

    Raises:
        ConfigError: Columns, labels or texts do not fit the task.
    """

    columns: tuple[str, ...] = ()
    unit: str = "tokens"
    shift: bool = False
    text_kind: str = TextKind.PAIR
    reads_words: bool = False
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
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
        """The examples of the first evaluation set; none with `data.eval_fraction=0`."""
        return next(iter(self.eval_sets.values()))

    def join(self, others: Sequence[Task]) -> None:
        """Adopt settings of the other sources of a mixture; nothing by default.

        Called on the task of the first source, with the tasks of all sources.

        Raises:
            ConfigError: The task cannot have several sources.
        """
        del others  # most tasks need nothing

    def eval_fingerprint(self) -> str:
        """Digest the examples of all evaluation sets to 16 hexadecimal digits.

        The names of the sets are digested, too, unless there is a single set without a name.
        """
        if list(self.eval_sets) == [""]:
            return self.eval.fingerprint()[:16]
        return digest(
            *(f"{name} {examples.fingerprint()}" for name, examples in self.eval_sets.items())
        )[:16]

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the texts for the training of a new tokenizer.

        By default those of the text column of the training split.

        Raises:
            ConfigError: A column is missing.
        """
        return texts(source.train, text_column(source, source.train))

    def inspect(self, source: Source, tokenizer: Any) -> None:  # noqa: B027  # most tasks have something to look at
        """Check columns, labels and the tokenizer before any example is read; nothing by default.

        May set attributes of the task and change the tokenizer.

        Raises:
            ConfigError: They do not fit the task.
        """

    @abstractmethod
    def read(
        self, source: Source, split: Split, tokenizer: Any, limit: int | None, seed: int | None
    ) -> ExampleSource:
        """Read the examples of a split.

        Args:
            source: All splits; `split is source.train` for the training split.
            split: The rows.
            tokenizer: Of the model.
            limit: The largest number of examples; None: no limit.
            seed: Draws the examples if they are limited; None: the same draw in every run, in the
                order of the rows, as for evaluation.

        Raises:
            ConfigError: Rows do not fit the task.
        """

    def needs(self) -> ModelNeeds:
        """Return the requirements of the data on the model."""
        return ModelNeeds(self.config.model_values(), self.config.positions(self.max_length))

    def adapt(self, model: PreTrainedModel) -> None:  # noqa: B027  # most tasks take it as it is
        """Change a new model in place before training; nothing by default."""

    def expect_step(self, examples: int) -> None:  # noqa: B027
        """Refuse an optimizer step with too few examples for the loss; nothing by default.

        Raises:
            ConfigError: With the keys that give a step more examples.
        """

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to a batch.

        It must depend on these examples alone. By default it has `input_ids`, `token_type_ids` if
        the tokenizer returns them, `attention_mask` if something is padded, and `labels`, padded
        with `IGNORED`; shape (batch, longest).
        """
        labels = pad((example["labels"] for example in examples), IGNORED)
        return {**model_inputs(examples, self.padding), "labels": labels}

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:  # noqa: ARG002
        """Change an example each time it is loaded, as masking does; by default it is unchanged.

        Args:
            example: As `read` has it; not changed in place.
            randomness: A generator seeded by run, epoch and example.
        """
        return example

    # Loss
    # ----------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model over a batch; its outputs are passed to `loss` and to metrics."""
        return model(**batch)

    def measure(self, outputs: ModelOutput, batch: Batch) -> Tensor:
        """Sum the quantities in `measured` over the examples of a batch; shape (names,)."""
        raise NotImplementedError

    def targets(self, batch: Batch) -> Tensor:
        """Return the labels for the loss, or `IGNORED`, at each position.

        If `shift`, the first position is left out: nothing before it predicts it.
        """
        if self.shift:
            return batch["labels"][:, 1:]
        return batch["labels"]

    def count(self, batch: Batch) -> int:
        """Count the targets of a batch, the denominator of the model's own mean loss."""
        return int(np.count_nonzero((self.targets(batch) != IGNORED).cpu().numpy()))

    def weight(self, batch: Batch) -> float:
        """Return the denominator of the mean in `loss`.

        The number of targets, or with class weights the sum of the weights of their classes.
        Example: the targets 0, 1, 1 and `IGNORED` weigh 3, or with the class weights 0.5 and 2.0
        0.5 + 2.0 + 2.0 = 4.5.
        """
        if self.class_weights is None:
            return self.count(batch)
        targets = self.targets(batch)
        target_classes = targets[targets != IGNORED]
        return float(self.class_weights.double()[target_classes].sum())

    def loss(self, outputs: ModelOutput, batch: Batch) -> Tensor:
        """Compute the training loss of a batch, a mean over `weight(batch)`; shape ().

        Without label smoothing and class weights this is the model's own loss; with them, torch's
        cross-entropy, which equals the `LabelSmoother` of transformers, plus the `router_loss` of a
        mixture of experts, which the model's own loss contains. `eval/loss` is always the model's
        own loss if it returns one, so that runs can be compared.

        Args:
            outputs: Outputs of the model, with `loss` and `logits`; if `chunked`, `TargetLosses`:
                `loss` is the cross-entropy with the targets, `uniform_loss` that with a uniform
                distribution over the classes. Label smoothing by s is (1 - s) times the former plus
                s times the latter.
            batch: Inputs and labels of the model.

        Raises:
            ConfigError: The model returned no loss.
        """
        # 1. The model's own loss, or that of `TargetLosses` if chunked.
        if not self.label_smoothing and self.class_weights is None:
            model_loss: Tensor | None = getattr(outputs, "loss", None)
            if model_loss is None:
                raise ConfigError(
                    f"task={self.name}: the model returned no loss"
                    f" ({type(self.config).__name__}.AUTO_CLASS={self.config.AUTO_CLASS}). Name a"
                    f" class with a head there, or write {type(self).__name__}.loss."
                )
            return model_loss

        # 2. Label smoothing without logits. A task with class weights or router loss is never
        # chunked.
        if self.chunked:
            return torch.lerp(outputs.loss, outputs.uniform_loss, self.label_smoothing)

        # 3. From the logits of all positions.
        logits, targets = self._flat_logits_and_targets(outputs, batch)
        weight = None if self.class_weights is None else self.class_weights.to(logits.device)
        loss = functional.cross_entropy(
            logits,
            targets,
            weight=weight,
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        return loss + self.router_loss(outputs)

    def router_loss(self, outputs: Any) -> Tensor | float:
        """Return the load-balancing loss of the experts times its coefficient; 0.0 without experts.

        A model that is called with labels adds this term to its own loss.
        """
        loss = getattr(outputs, "aux_loss", None)
        if self.router_loss_coef is None or not isinstance(loss, Tensor):
            return 0.0
        return self.router_loss_coef * loss.to(outputs.logits.device)

    def _flat_logits_and_targets(self, outputs: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        """Flatten logits and labels of all positions; (positions, classes) and (positions,)."""
        logits = outputs.logits[:, :-1] if self.shift else outputs.logits
        return logits.reshape(-1, logits.shape[-1]).float(), self.targets(batch).reshape(-1)

    def loss_by_example(self, outputs: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum the cross-entropies over each example's targets, and count the targets.

        Without label smoothing and class weights. Both tensors have the shape (batch,).
        """
        is_target = self.targets(batch) != IGNORED
        # The cross-entropy at each position, 0 without a target.
        if self.chunked:
            token_losses = outputs.losses
        else:
            token_losses = functional.cross_entropy(
                *self._flat_logits_and_targets(outputs, batch),
                ignore_index=IGNORED,
                reduction="none",
            )
        by_example = (len(is_target), -1)  # a row for each example, also if it has one target
        return token_losses.reshape(by_example).sum(1), is_target.reshape(by_example).sum(1)

    # Evaluation
    # ----------------------------------------------------------------------------------------------

    def predictions(self, outputs: ModelOutput, batch: Batch) -> PredictionsAndLabels:
        """Return predictions and labels for registered metrics; shape (targets,) each.

        By default the most probable class at each position with a target, and the target.
        """
        targets = self.targets(batch)
        is_target = targets != IGNORED
        return (
            predicted_classes(outputs, shift=self.shift)[is_target].cpu().numpy(),
            targets[is_target].cpu().numpy(),
        )

    def running_metrics(self) -> MetricAccumulator:
        """Construct the metrics that are counted batch by batch: the mean loss by default."""
        return MeanLoss(self.count)

    def evaluation(self) -> MetricAccumulator:
        """Construct all metrics of an evaluation set: `running_metrics`, then registered ones."""
        running = self.running_metrics()
        return EvaluationMetrics(
            running, self.metrics, self.predictions, len(self.labels), self.labels, self.loss
        )

    def token_metrics(self) -> TokenMetrics:
        """Construct loss, perplexity and accuracy of tokens, and `router_loss` with experts."""
        router = None if self.router_loss_coef is None else self.router_loss
        return TokenMetrics(shift=self.shift, router_loss=router)

    def metric_names(self) -> list[str]:
        """List the names of all metrics, without `eval/`."""
        return self.evaluation().names

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of a batch without padding, and its examples.

        The tokens are 0 if there are no `input_ids`, as for images.
        """
        if "attention_mask" in batch:
            mask = batch["attention_mask"]
            return int(mask.sum()), len(mask)
        # Without a mask nothing is padded. The first tensor is `input_ids`, or that of the images.
        first_tensor = next(iter(batch.values()))
        tokens = first_tensor.numel() if "input_ids" in batch else 0
        return tokens, len(first_tensor)

    def sample(
        self,
        model: PreTrainedModel,  # noqa: ARG002
        tokenizer: Any,  # noqa: ARG002
        *,
        seed: int,  # noqa: ARG002
    ) -> tuple[str, str] | None:
        """Generate a text after training, for people to read.

        By default there is none.

        Returns:
            The prompt and its continuation; None: the task has no prompt.
        """
        return None

    def shown(self, tokenizer: Any) -> str | None:  # noqa: ARG002
        """Decode the first training example with its targets marked; None by default."""
        return None


def pad(rows: Iterable[np.ndarray], value: int) -> Tensor:
    """Pad one or more rows on the right to a tensor of shape (rows, longest), int64.

    Example:
        >>> pad([np.array([1, 2]), np.array([3])], 0).tolist()
        [[1, 2], [3, 0]]
    """
    rows = list(rows)
    out = np.full((len(rows), max(len(row) for row in rows)), value, dtype=np.int64)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(out)


def join_to_one_row(batch: Batch, lengths: Iterable[int]) -> Batch:
    """Join the rows of each tensor to one row without padding; shape (1, tokens).

    Args:
        batch: Tensors of shape (rows, longest), padded on the right.
        lengths: The number of tokens in each row.

    Example:
        >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 0]])}
        >>> join_to_one_row(batch, [2, 1])["input_ids"].tolist()
        [[1, 2, 3]]
    """
    # A row of as many ones as it has tokens, padded with 0: True for tokens, False for padding;
    # shape (rows, longest). Indexing with it keeps the tokens, row after row.
    is_token = pad((np.ones(length, dtype=np.int64) for length in lengths), 0).bool()
    return {name: values[is_token][None] for name, values in batch.items()}


def pad_inputs(examples: Sequence[Example], padding: int, *, left: bool = False) -> Batch:
    """Pad `input_ids` and `token_type_ids`, if there are any, and add `attention_mask`.

    Example:
        >>> batch = pad_inputs([{"input_ids": np.array([5, 6])}, {"input_ids": np.array([7])}], 0)
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6], [7, 0]], [[1, 1], [1, 0]])

    Args:
        examples: At least one; those with `token_type_ids` all have them.
        padding: Id of the padding token.
        left: Whether padding comes before a row, as a decoder that continues it needs.

    Returns:
        Tensors of shape (batch, longest), int64.
    """

    def pad_side(rows: Iterable[np.ndarray], value: int) -> Tensor:
        """Pad rows on the chosen side."""
        if left:  # pad the reversed rows on the right, and reverse the result
            return pad((row[::-1] for row in rows), value).flip(1)
        return pad(rows, value)

    rows = [example["input_ids"] for example in examples]
    masks = (np.ones_like(row) for row in rows)
    batch = {"input_ids": pad_side(rows, padding), "attention_mask": pad_side(masks, 0)}
    if "token_type_ids" in examples[0]:
        batch["token_type_ids"] = pad_side((example["token_type_ids"] for example in examples), 0)
    return batch


def model_inputs(examples: Sequence[Example], padding: int) -> Batch:
    """Pad examples as `pad_inputs` does, but without `attention_mask` if nothing is padded.

    transformers would wait for the device to see whether the mask hides anything.
    """
    batch = pad_inputs(examples, padding)
    if len({len(example["input_ids"]) for example in examples}) == 1:
        del batch["attention_mask"]
    return batch
