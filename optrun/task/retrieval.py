"""Retrieval metrics: at which ranks a text finds its positives among all texts of a set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from optrun.data.loader import TEXTS, Batch
from optrun.task.evaluation import MetricAccumulator, interleave

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

Embedded = tuple[np.ndarray, np.ndarray]
"""Vectors of a batch, shape (batch, texts, width), float32; and a number of each text, equal for
equal texts, shape (batch, texts), int64."""
_QUERIES = 256
"""Queries that are ranked together."""
_AT = 10
"""The k of mrr and ndcg."""


class RetrievalMetrics(MetricAccumulator):
    """Loss, recall at each k, mrr and ndcg at 10, and with negatives accuracy.

    Each first text of a row is a query; the documents are all other texts of the set. Accuracy is
    the share of negatives that are less similar to their query than its positive.

    Args:
        represent: Computes vectors of shape (batch, texts, width) from the model's outputs and the
            batch.
        recall_at: The k of each recall.
        negatives: Whether rows have negatives behind their positive.
    """

    reads_loss = True

    def __init__(
        self,
        represent: Callable[[ModelOutput, Batch], Tensor],
        recall_at: Sequence[int],
        *,
        negatives: bool,
    ) -> None:
        self.represent = represent
        self.recall_at = recall_at
        self.names = ["loss", *_names(recall_at)]
        if negatives:
            self.names.append("accuracy")
        self.losses: list[float] = []
        self.embedded: list[Embedded] = []

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Store the vectors of one batch, scaled to length 1, on the host."""
        vectors = self.represent(outputs, batch).float()
        unit_vectors = functional.normalize(vectors, dim=-1).cpu().numpy()
        self.losses.append(float(outputs.loss) * len(unit_vectors))
        self.embedded.append((unit_vectors, batch[TEXTS].cpu().numpy()))

    def partial(self) -> tuple[list[float], list[Embedded]]:
        """Return the summed loss and the vectors of each batch."""
        return self.losses, self.embedded

    def merge(self, partials: Sequence[tuple[list[float], list[Embedded]]]) -> None:
        """Merge losses and vectors of all ranks, in the order of their batches."""
        self.losses = interleave(losses for losses, _ in partials)
        self.embedded = interleave(batches for _, batches in partials)

    def compute(self) -> dict[str, float]:
        """Compute the mean loss and the metrics of `score_retrieval`; NaN if there was no row.

        With negatives also accuracy: the share of them less similar to the query than its positive.
        """
        if not self.embedded:
            return dict.fromkeys(self.names, math.nan)
        # Join all batches: (rows, texts, width) and (rows, texts).
        vectors = np.concatenate([batch_vectors for batch_vectors, _ in self.embedded])
        texts = np.concatenate([batch_texts for _, batch_texts in self.embedded])
        values = {
            "loss": math.fsum(self.losses) / len(vectors),
            **score_retrieval(vectors, texts, self.recall_at),
        }
        if "accuracy" in self.names:
            # The cosine of each query with its positive, then with its negatives.
            cosines = np.einsum("rw,rtw->rt", vectors[:, 0], vectors[:, 1:])
            values["accuracy"] = float((cosines[:, :1] > cosines[:, 1:]).mean())
        return values


def _names(recall_at: Sequence[int]) -> list[str]:
    """List the names of the metrics of ranks."""
    return [*(f"recall_at_{k}" for k in recall_at), f"mrr_at_{_AT}", f"ndcg_at_{_AT}"]


def _join_equal_texts(numbers: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give equal texts one vector.

    Args:
        numbers: A number of each text, equal for equal texts; of any shape.
        vectors: The vector of each text, shape (..., width).

    Returns:
        The vectors of the distinct texts, shape (distinct, width), float32; and the index of each
        text in them, of the shape of `numbers`.
    """
    distinct, indices = np.unique(numbers, return_inverse=True)
    indices = indices.reshape(numbers.shape)
    distinct_vectors = np.empty((len(distinct), vectors.shape[-1]), "f4")
    distinct_vectors[indices] = vectors
    return distinct_vectors, indices


def score_retrieval(
    vectors: np.ndarray, texts: np.ndarray, recall_at: Sequence[int]
) -> dict[str, float]:
    """Rank all documents for each query by cosine, and score the ranks of its positives.

    A query is a distinct first text, a document a distinct other text. The positives of a query are
    the second texts of all rows that begin with it. Recall at k is the share of the positives
    among the k nearest documents; mrr the inverse rank of the first positive, 0 beyond rank 10;
    ndcg the sum of 1 / log2(1 + rank) over the positives within rank 10, divided by that of the
    best possible ranking. All are means over the queries.

    Args:
        vectors: Of length 1, shape (rows, texts, width): query, positive, negatives.
        texts: A number of each text, equal for equal texts, shape (rows, texts).
        recall_at: The k of each recall.

    Returns:
        By name, such as `recall_at_1`, `mrr_at_10` and `ndcg_at_10`.
    """
    # 1. Equal texts are one query, or one document. A row has one query, shape (rows,), and as many
    # documents as further texts, shape (rows, texts - 1), of which the first is a positive.
    query_vectors, query_of_row = _join_equal_texts(texts[:, 0], vectors[:, 0])
    document_vectors, documents_of_row = _join_equal_texts(texts[:, 1:], vectors[:, 1:])

    # 2. Distinct pairs of a query and a positive of it: a row of queries, a row of documents.
    positives = np.unique(np.stack([query_of_row, documents_of_row[:, 0]]), axis=1)

    # 3. Rank the documents for some queries at a time, as deep as a metric looks.
    depth = min(max(*recall_at, _AT), len(document_vectors))
    sums = np.zeros(len(recall_at) + 2)
    for begin in range(0, len(query_vectors), _QUERIES):
        queries = query_vectors[begin : begin + _QUERIES]
        # Which documents are positives of these queries, shape (queries, documents).
        is_positive = np.zeros((len(queries), len(document_vectors)), dtype=bool)
        of_these = (positives[0] >= begin) & (positives[0] < begin + len(queries))
        query, document = positives[:, of_these]
        is_positive[query - begin, document] = True
        # Which of the nearest documents are positives, nearest first, shape (queries, depth). The
        # product of vectors of length 1 is their cosine.
        nearest = torch.from_numpy(queries @ document_vectors.T).topk(depth).indices.numpy()
        hits = np.take_along_axis(is_positive, nearest, axis=1)
        sums += _summed_scores(hits, is_positive.sum(1), recall_at)
    return dict(zip(_names(recall_at), (sums / len(query_vectors)).tolist(), strict=True))


def _summed_scores(
    hits: np.ndarray, positives: np.ndarray, recall_at: Sequence[int]
) -> list[float]:
    """Sum recalls, mrr and ndcg over queries, in the order of `_names`.

    Args:
        hits: Whether the document at each rank is a positive, shape (queries, ranks).
        positives: The number of positives of each query, at least 1.
        recall_at: The k of each recall.

    Example: one query, whose two positives have the ranks 2 and 4.
        >>> hits = np.array([[False, True, False, True]])
        >>> recall, mrr, ndcg = _summed_scores(hits, np.array([2]), [2])
        >>> float(recall), float(mrr), round(float(ndcg), 3)
        (0.5, 0.5, 0.651)
    """
    recalls = [(hits[:, :k].sum(1) / positives).sum() for k in recall_at]

    # 1 / (rank of the first positive), which argmax finds; 0 if none is among the first 10.
    top = hits[:, :_AT]
    inverse_rank = np.where(top.any(1), 1 / (1 + top.argmax(1)), 0.0)

    # The sum of gains over that of the best ranking, which has the positives at the first ranks:
    # for three positives the sum of the first three gains.
    gains = 1 / np.log2(np.arange(2, _AT + 2))
    best_sum = np.cumsum(gains)[np.minimum(positives, _AT) - 1]
    ndcg = top @ gains[: top.shape[1]] / best_sum
    return [*recalls, inverse_rank.sum(), ndcg.sum()]
