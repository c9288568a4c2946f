"""How high the texts that belong to a text rank among all of an evaluation set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from optrun.data.loader import TEXTS, Batch
from optrun.task.evaluation import MetricAccumulator, interleave

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

Kept = tuple[np.ndarray, np.ndarray]
"""Vectors of a batch, shape (batch, texts, width), float32; and numbers of its texts, shape (batch,
texts), int64."""
_QUERIES = 256
"""Queries that are ranked together."""
_AT = 10


class RetrievalMetrics(MetricAccumulator):
    """Loss, recall at each k, mrr and ndcg at 10; accuracy where rows have negatives.

    Every first text of the set is asked for among all its other texts, each of these once.

    Args:
        represent: What the model returned, and the batch, to vectors of shape (batch, texts,
            width).
        recall_at: The k of each recall.
        negatives: Whether rows have texts that do not belong to the first one.
    """

    reads_loss = True

    def __init__(
        self,
        represent: Callable[[ModelOutput, Batch], torch.Tensor],
        recall_at: Sequence[int],
        *,
        negatives: bool,
    ) -> None:
        self.represent = represent
        self.recall_at = recall_at
        self.names = [
            "loss",
            *(f"recall_at_{k}" for k in recall_at),
            f"mrr_at_{_AT}",
            f"ndcg_at_{_AT}",
        ]
        self.names += ["accuracy"] if negatives else []
        self.losses: list[float] = []
        self.kept: list[Kept] = []

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Keep the vectors of one batch."""
        vectors = functional.normalize(self.represent(outputs, batch).float(), dim=-1).cpu().numpy()
        self.losses.append(float(outputs.loss) * len(vectors))
        self.kept.append((vectors, batch[TEXTS].cpu().numpy()))

    def partial(self) -> tuple[list[float], list[Kept]]:
        """Return losses and vectors of each batch."""
        return self.losses, self.kept

    def merge(self, partials: Sequence[tuple[list[float], list[Kept]]]) -> None:
        """Merge the vectors of all ranks, in the order of their batches."""
        self.losses = interleave(losses for losses, _ in partials)
        self.kept = interleave(batches for _, batches in partials)

    def compute(self) -> dict[str, float]:
        """Rank every text of the set; NaN if there was none."""
        if not self.kept:
            return dict.fromkeys(self.names, math.nan)
        vectors, texts = (np.concatenate(side) for side in zip(*self.kept, strict=True))
        values = {
            "loss": math.fsum(self.losses) / len(vectors),
            **retrieval(vectors, texts, self.recall_at),
        }
        if "accuracy" in self.names:
            similarities = np.einsum("rw,rtw->rt", vectors[:, 0], vectors[:, 1:])
            values["accuracy"] = float((similarities[:, :1] > similarities[:, 1:]).mean())
        return values


def retrieval(vectors: np.ndarray, texts: np.ndarray, recall_at: Sequence[int]) -> dict[str, float]:
    """Rank all other texts for each first text, and score the ranks of its positives.

    Recall at k is the share of a text's own among the k nearest; mrr the inverse rank of the first
    of them, or 0; ndcg the sum of 1 / log2(1 + rank) over the best possible one. Means over the
    first texts, each once.

    Args:
        vectors: Of length 1, shape (rows, texts, width): a text, one that belongs to it, others
            that do not.
        texts: A number of each text, equal for equal ones, shape (rows, texts).
        recall_at: The k of each recall.
    """
    query_ids, question = np.unique(texts[:, 0], return_inverse=True)
    document_ids, document = np.unique(texts[:, 1:], return_inverse=True)
    document = document.reshape(len(texts), -1)
    queries = np.empty((len(query_ids), vectors.shape[-1]), "f4")
    corpus = np.empty((len(document_ids), vectors.shape[-1]), "f4")
    queries[question] = vectors[:, 0]
    corpus[document] = vectors[:, 1:]
    relevant = np.unique(np.stack([question, document[:, 0]]), axis=1)
    most = min(max(*recall_at, _AT), len(document_ids))
    sums = np.zeros(len(recall_at) + 2)
    gains = 1 / np.log2(np.arange(2, _AT + 2))
    for begin in range(0, len(query_ids), _QUERIES):
        rows = queries[begin : begin + _QUERIES]
        belongs = np.zeros((len(rows), len(document_ids)), dtype=bool)
        relevant_here = relevant[:, (relevant[0] >= begin) & (relevant[0] < begin + len(rows))]
        belongs[relevant_here[0] - begin, relevant_here[1]] = True
        nearest = torch.from_numpy(rows @ corpus.T).topk(most).indices.numpy()
        hits = np.take_along_axis(belongs, nearest, axis=1)
        count = belongs.sum(1)
        first = np.where(hits[:, :_AT].any(1), 1 / (1 + hits[:, :_AT].argmax(1)), 0.0)
        best = np.cumsum(gains)[np.minimum(count, _AT) - 1]
        ndcg = hits[:, :_AT] @ gains[: hits.shape[1]] / best
        sums += [*((hits[:, :k].sum(1) / count).sum() for k in recall_at), first.sum(), ndcg.sum()]
    return dict(
        zip(
            [*(f"recall_at_{k}" for k in recall_at), f"mrr_at_{_AT}", f"ndcg_at_{_AT}"],
            (sums / len(query_ids)).tolist(),
            strict=True,
        )
    )
