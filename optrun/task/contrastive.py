"""Contrastive losses of sentence-transformers, by their names.

`vectors` has the shape (batch, texts, width): anchor, positive, then negatives of each row.
Similarities are cosines. Losses are means over the batch, shape ().
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cosines(vectors: Tensor) -> Tensor:
    """Compute the cosine of anchor and positive of each row, shape (batch,)."""
    return functional.cosine_similarity(vectors[:, 0], vectors[:, 1], dim=-1)


def multiple_negatives_ranking(
    vectors: Tensor, texts: Tensor, *, scale: float, symmetric: bool = False
) -> Tensor:
    """Compute the cross-entropy of each anchor's positive among the other texts of all rows.

    Texts that `mark_false_negatives` marks, such as a second copy of the positive, are left out.

    Source: Henderson et al. 2017, arXiv:1705.00652, section 4.4; both directions: Radford et al.
    2021, arXiv:2103.00020. L = -mean_i log(exp(s cos(a_i, p_i)) / sum_j exp(s cos(a_i, d_j))), d
    all positives and negatives.

    Args:
        vectors: Anchor, positive, then negatives of each row, shape (batch, texts, width).
        texts: A number of each text, equal for equal texts, shape (batch, texts), int64.
        scale: Inverse temperature.
        symmetric: Whether the loss is the mean of this one and of the cross-entropy of each
            positive's anchor among the anchors of all rows.
    """
    unit = functional.normalize(vectors, dim=-1)
    rows = len(unit)
    # 1. The cosine of each anchor with each document, shape (batch, documents). The documents are
    # all positives, then all first negatives, and so on: the positive of row i is document i.
    documents = unit[:, 1:].transpose(0, 1).flatten(0, 1)
    logits = scale * unit[:, 0] @ documents.T
    logits = logits.masked_fill(mark_false_negatives(texts), -torch.inf)

    # 2. Anchors among documents; and, if symmetric, positives among anchors.
    own_index = torch.arange(rows, device=logits.device)
    loss = functional.cross_entropy(logits, own_index)
    if symmetric:
        return (loss + functional.cross_entropy(logits[:, :rows].T, own_index)) / 2
    return loss


def mark_false_negatives(texts: Tensor) -> Tensor:
    """Mark false negatives of each row: its anchor, and all positives of this anchor.

    They are found wherever they are in the batch, also among the negatives of other rows.

    Args:
        texts: A number of each text, equal for equal texts, shape (batch, texts): anchor, positive,
            negatives.

    Returns:
        Shape (batch, batch * (texts - 1)), bool. The columns are the positives of all rows, then
        their first negatives, and so on. A row's own positive is not marked.

    Example: two rows with the same anchor 1, whose positives are 2 and 3.

        >>> mark_false_negatives(torch.tensor([[1, 2], [1, 3]])).tolist()
        [[False, True], [True, False]]
    """
    rows = len(texts)
    anchors = texts[:, :1]
    positives = texts[:, 1:2]
    documents = texts[:, 1:].T.reshape(-1)

    # 1. A document that is the anchor itself, or a positive of some row with the same anchor. The
    # product counts these rows.
    has_same_anchor = (anchors == anchors.T).float()  # (batch, batch)
    is_positive_of = (documents == positives).float()  # (batch, documents)
    belongs = (documents == anchors) | (has_same_anchor @ is_positive_of > 0)

    # 2. Not the row's own positive: document i of row i.
    belongs[:, :rows].fill_diagonal_(False)
    return belongs


def cosine_similarity(vectors: Tensor, scores: Tensor) -> Tensor:
    """Compute the mean square of the differences between cosines and scores."""
    return functional.mse_loss(cosines(vectors), scores.to(vectors.dtype))


def cosent(vectors: Tensor, scores: Tensor, *, scale: float) -> Tensor:
    """Compute the CoSENT loss: cosines should be in the order of the scores.

    Source: Huang et al. 2024, doi:10.1109/TASLP.2024.3402087.
    L = log(1 + sum exp(s (cos_k - cos_i))), over all i, k with score_i > score_k.
    """
    scaled = scale * cosines(vectors)
    differences = scaled[None, :] - scaled[:, None]  # [i, k]: s (cos_k - cos_i)
    is_higher = scores[:, None] > scores[None, :]  # [i, k]: score_i > score_k
    exponents = differences[is_higher]
    # exp(0) is the 1 in the sum.
    return torch.cat([exponents.new_zeros(1), exponents]).logsumexp(0)


def triplet(vectors: Tensor, *, distance: str, margin: float) -> Tensor:
    """Compute the triplet loss: positives should be nearer than negatives by a margin.

    Source: Schroff et al. 2015, arXiv:1503.03832, equation 2, without squares as in
    sentence-transformers. L = mean max(d(a, p) - d(a, n) + margin, 0).
    """
    anchor, positive, negative = vectors.unbind(1)
    difference = distances(anchor, positive, distance) - distances(anchor, negative, distance)
    return functional.relu(difference + margin).mean()


def distances(first: Tensor, second: Tensor, kind: str) -> Tensor:
    """Compute the distance of each pair of vectors, shape (batch,).

    kind: `cosine` (1 - cosine), `euclidean` or `manhattan`.
    """
    if kind == "cosine":
        return 1 - functional.cosine_similarity(first, second, dim=-1)
    order = 2 if kind == "euclidean" else 1
    norms: Tensor = torch.linalg.vector_norm(first - second, ord=order, dim=-1)
    return norms
