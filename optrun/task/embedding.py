"""Texts to vectors.

`AutoModel`, a pooling of its states, and the losses of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.config.schema.task import EmbeddingLoss
from optrun.data.cache import digest
from optrun.data.examples import Example, Examples, chosen
from optrun.data.loader import SCORES, TEXTS, Batch, ExampleSource, inputs_of
from optrun.data.source import Source, Split
from optrun.task import contrastive
from optrun.task.base import ModelNeeds, Task, pad_inputs
from optrun.task.embedding_columns import string_columns, text_and_score_columns
from optrun.task.evaluation import MetricAccumulator, PredictionsAndLabels
from optrun.task.labels import read_finite_numbers
from optrun.task.pooling import choose_pooling
from optrun.task.retrieval import RetrievalMetrics
from optrun.task.tokens import NO_TOKEN, encode_rows, interleave_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput


class Embedding(Task):
    """Pairs of texts, with negatives or a score, to vectors that say what belongs together.

    The in-batch negatives of a row are all other texts of its step, over every micro-batch and
    every rank.

    Raises:
        ConfigError: A missing column, a score out of range, a triplet without a negative, several
            sources.
    """

    columns = ("text_column", "text_pair_column", "negative_columns", "label_column")
    unit = "examples"
    predictor = "optrun.runner.predictors:Embeddings"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the texts of every text column, row by row."""
        return interleave_columns(source.train, string_columns(source.train))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the columns, read the scores, and let the tokenizer pad on the right.

        Sets `names` (columns of texts) and `scores`, both by split; `has_scores`, whether the loss
        reads scores; and `width`, the number of texts in a row. Changes `tokenizer.padding_side`,
        with a note.

        Raises:
            ConfigError: Columns or scores that do not fit the loss; splits with different numbers
                of text columns.
        """
        # 1. The tokenizer.
        if tokenizer.padding_side != "right":
            tokenizer.padding_side = "right"
            self.notes.append(
                "the tokenizer pads on the right now, as in training: with padding on the left,"
                " models that count positions from the first column would compute other vectors"
            )

        # 2. Columns and scores of each split. There is no column of scores if the loss reads none.
        self.has_scores = self.config.of_numbers
        self.names: dict[Split, list[str]] = {}
        self.scores: dict[Split, np.ndarray] = {}
        for split in source.splits:
            self.names[split], score_column = text_and_score_columns(self.config, source, split)
            if score_column is not None and len(split.rows):
                self.scores[split] = self._read_scores(split, score_column)

        # 3. The number of texts in a row.
        widths = sorted({len(names) for names in self.names.values()})
        if len(widths) > 1:
            raise ConfigError(
                f"data.train and data.eval have {' and '.join(map(str, widths))} columns of texts:"
                " expected the same number in all. Name them with data.negative_columns."
            )
        (self.width,) = widths

    def _read_scores(self, split: Split, name: str) -> np.ndarray:
        """Read the scores of a split; shape (rows,), float32.

        Raises:
            ConfigError: A score that is no number; or, with `task.loss=cosine_similarity`, one
                outside of -1 to 1, which no cosine can equal.
        """
        scores = read_finite_numbers(split, name)
        beyond = np.flatnonzero(np.abs(scores) > 1)
        if len(beyond) and self.config.loss is EmbeddingLoss.cosine_similarity:
            row = int(beyond[0])
            largest = float(np.abs(scores).max())
            raise ConfigError(
                f"{split.where(row)} has the score {scores[row]:g} in column {name}, and"
                f" task.loss=cosine_similarity expects -1 to 1. Divide the scores by {largest:g},"
                " or take task.loss=cosent, which uses their order alone."
            )
        return scores

    def join(self, others: Sequence[Task]) -> None:
        """Refuse a mixture of several sources, since the loss of a row depends on its whole step.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"data=mixture: task={self.name} reads one source, not {len(others)}. Join the files"
            " in one data.train=[FILE, FILE]."
        )

    def read(
        self,
        source: Source,  # noqa: ARG002
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row, or for `limit` rows drawn with `seed`, see `Task.read`.

        An example has the texts of all columns, and a score, 0 if the rows have none.

        Raises:
            ConfigError: A text without a single token.
        """
        columns = self.names[split]
        indices = chosen(len(split.rows), limit, seed=seed)  # of the rows; None: all of them
        part = split.take(indices)

        # 1. Encode the texts of all columns as one list, row by row: with the columns anchor and
        # positive these are anchor 0, positive 0, anchor 1, positive 1, ...
        texts = partial(interleave_columns, part, columns)
        encoded_texts = encode_rows(part, texts, tokenizer, self.max_length, "embedding", *columns)

        # 2. Refuse an empty text. Text 7 of 3 columns is in row 2, column 1.
        empty = np.flatnonzero(encoded_texts.lengths == 0)
        if len(empty):
            row, column = divmod(int(empty[0]), len(columns))
            raise ConfigError(
                f"{part.where(row)} has no token in column {columns[column]}: {NO_TOKEN}"
            )

        # 3. Group the texts by row again, `len(columns)` in each, with the score of the row.
        scores = self.scores.get(split, np.zeros(len(split.rows), dtype=np.float32))
        if indices is not None:
            scores = scores[indices]
        return ComparedTexts(encoded_texts, len(columns), scores)

    def needs(self) -> ModelNeeds:
        """Require a model for `data.max_length` tokens, without a head."""
        return ModelNeeds({}, self.max_length)

    def adapt(self, model: PreTrainedModel) -> None:
        """Choose the pooling, and write it into the model's configuration, with a note.

        The pooling turns the hidden states of a text's tokens into one vector. Sets `pooling`.

        Raises:
            ConfigError: The model's folder has a pooling that optrun lacks; or the model has an
                encoder and a decoder.
        """
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"task={self.name}: {type(model).__name__} has an encoder and a decoder, so not"
                " one vector for each token of a text. Take an encoder such as bert, or a decoder"
                " such as gpt2."
            )
        # The folder or hub name; empty: the model is made from scratch.
        path = str(getattr(config, "name_or_path", "") or "")
        commit = getattr(config, "_commit_hash", None)  # of a model of the hub
        mode = None if self.config.pooling is None else self.config.pooling.value
        self.pooling, origin = choose_pooling(path, commit, mode, self.config.normalize)
        self.pooling.store_in(config)
        scaled = "normalised" if self.pooling.normalize else "not normalised"
        self.notes.append(f"embeddings: {self.pooling.mode} of the last states, {scaled}, {origin}")

    def expect_step(self, examples: int) -> None:
        """Refuse an optimizer step of one row if the loss compares rows with each other.

        Raises:
            ConfigError: With the keys that give a step more rows.
        """
        if examples < 2 and self.config.over_step and self.width == 2:
            raise ConfigError(
                f"training.per_device_train_batch_size: a step has {examples} row, and"
                f" task.loss={self.config.loss.value} compares rows of a step with each other."
                " Raise it to 2 or more, or raise training.gradient_accumulation_steps."
            )

    def collate(self, examples: list[Example]) -> Batch:
        """Pad the texts of all rows to a batch.

        Returns:
            `input_ids`, `attention_mask` and, if the tokenizer returns them, `token_type_ids`,
            shape (batch * width, longest), the texts of a row one after another. `TEXTS`: a number
            of each text, equal for equal texts, shape (batch, width), int64. `SCORES`, if the loss
            reads scores: shape (batch,), float32.
        """
        batch = pad_texts(examples, self.padding)
        batch[TEXTS] = torch.from_numpy(np.stack([example[TEXTS] for example in examples]))
        if self.has_scores:
            batch[SCORES] = torch.tensor([float(example["labels"]) for example in examples])
        return batch

    def count(self, batch: Batch) -> int:
        """Count the rows of a batch."""
        return len(batch[TEXTS])

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of all texts without padding, and the rows."""
        return int(batch["attention_mask"].sum()), self.count(batch)

    # Loss
    # ----------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model over the texts of a batch; their numbers and scores are left out."""
        return model(**inputs_of(batch))

    def represent(self, outputs: ModelOutput, batch: Batch) -> Tensor:
        """Pool the texts of a batch to vectors, shape (batch, texts, width), at least float32."""
        vectors = self.pooling(outputs, batch["attention_mask"])
        return vectors.reshape(*batch[TEXTS].shape, vectors.shape[-1])

    def compare(self, vectors: Tensor, batch: Batch) -> Tensor:
        """Compute the loss of the vectors of one batch, or of several joined batches; shape ().

        Args:
            vectors: Anchor, positive, then negatives of each row; shape (batch, texts, width).
                Autocast is switched off for the comparison.
            batch: The numbers of the texts, and the scores if the loss reads them.
        """
        config = self.config
        loss = config.loss
        with torch.autocast(vectors.device.type, enabled=False):
            if loss is EmbeddingLoss.cosine_similarity:
                return contrastive.cosine_similarity(vectors, batch[SCORES])
            if loss is EmbeddingLoss.cosent:
                return contrastive.cosent(vectors, batch[SCORES], scale=config.scale)
            if loss is EmbeddingLoss.triplet:
                return contrastive.triplet(
                    vectors, distance=config.distance.value, margin=config.margin
                )
            return contrastive.multiple_negatives_ranking(
                vectors,
                batch[TEXTS],
                scale=config.scale,
                symmetric=loss is EmbeddingLoss.multiple_negatives_symmetric_ranking,
            )

    def loss(self, outputs: ModelOutput, batch: Batch) -> Tensor:
        """Compute the loss of a batch; shape ().

        The negatives are those of its own rows; the training step compares larger ones by
        `compare`.
        """
        return self.compare(self.represent(outputs, batch), batch)

    # Evaluation
    # ----------------------------------------------------------------------------------------------

    def predictions(self, outputs: ModelOutput, batch: Batch) -> PredictionsAndLabels:
        """Return the cosine of the first two texts of each row, and its score; shape (batch,)."""
        similarities = contrastive.cosines(self.represent(outputs, batch))
        return similarities.cpu().numpy(), batch[SCORES].cpu().numpy()

    def running_metrics(self) -> MetricAccumulator:
        """Construct the mean loss for pairs with scores, else also metrics of retrieval."""
        if self.has_scores:
            return super().running_metrics()
        return RetrievalMetrics(self.represent, self.config.recall_at, negatives=self.width > 2)


@dataclass(eq=False)
class ComparedTexts:
    """Examples of several texts each, with a number of each text."""

    examples: Examples
    """The texts of all rows, one after another."""
    width: int
    """Texts of a row."""
    scores: np.ndarray
    """Shape (rows,), float32; 0 if the rows have none."""

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> Example:
        assert self.examples.hashes is not None
        first = index * self.width
        texts = range(first, first + self.width)
        rows = [self.examples[text] for text in texts]
        inputs: Example = {name: [row[name] for row in rows] for name in rows[0]}
        hashes = np.array(self.examples.hashes[first : first + self.width]).view(np.int64)
        return {**inputs, "labels": self.scores[index], TEXTS: hashes}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all texts of each row; shape (rows,), int64."""
        return self._sum_by_row(self.examples.lengths)

    @property
    def lost(self) -> np.ndarray | None:
        """Tokens cut off each row; shape (rows,), int64."""
        if self.examples.lost is None:
            return None
        return self._sum_by_row(self.examples.lost)

    def _sum_by_row(self, values: np.ndarray) -> np.ndarray:
        sums: np.ndarray = values.reshape(-1, self.width).sum(1)
        return sums

    def fingerprint(self) -> str:
        """Digest token ids, the number of texts in a row, and scores."""
        scores = np.ascontiguousarray(self.scores).tobytes()
        return digest(self.examples.fingerprint(), str(self.width), scores)


def pad_texts(examples: list[Example], padding: int) -> Batch:
    """Pad all texts of all rows to one batch, as `pad_inputs`; shape (rows * texts, longest).

    examples: Each with the `input_ids` of all its texts, a list of arrays.
    """
    names = [name for name in ("input_ids", "token_type_ids") if name in examples[0]]
    texts: list[Example] = []
    for example in examples:
        for text in range(len(example["input_ids"])):
            texts.append({name: example[name][text] for name in names})
    return pad_inputs(texts, padding)
