"""Metrics of classification and regression; the tests compare them with scikit-learn and scipy.

All take NumPy arrays of shape (n,) with n of 1 or more, and return Python floats.
"""

from __future__ import annotations

import math

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of predictions equal to their label."""
    return float((predictions == labels).mean())


def confusion(predictions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Count confusions; shape (classes, classes), int64, rows = labels, columns = predictions.

    Example:
        >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [[1, 1], [0, 1]]
    """
    # Row * classes + column is the position of a cell in the flattened matrix.
    cells = labels.astype(np.int64) * classes + predictions.astype(np.int64)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def f1_scores(counts: np.ndarray) -> np.ndarray:
    """Compute F1 of each class from a confusion matrix, 2 TP / (2 TP + FP + FN).

    0 for a class that neither occurs nor is predicted.
    """
    right = np.diag(counts).astype(np.float64)
    total = counts.sum(axis=0) + counts.sum(axis=1)  # predicted + actual = 2 TP + FP + FN
    scores: np.ndarray = np.divide(2 * right, total, out=np.zeros_like(right), where=total > 0)
    return scores


def f1(predictions: np.ndarray, labels: np.ndarray, num_labels: int) -> float:
    """Compute F1 of the second of two classes; otherwise the mean F1, see `mean_f1`.

    num_labels: 0: the largest class number decides, and the result is the mean.
    """
    classes = num_labels or 1 + int(max(predictions.max(), labels.max()))
    counts = confusion(predictions, labels, classes)
    if num_labels == 2:
        return float(f1_scores(counts)[1])
    return mean_f1(counts)


def mean_f1(counts: np.ndarray) -> float:
    """Compute the mean F1 over all true or predicted classes; NaN without any."""
    seen = (counts.sum(axis=0) + counts.sum(axis=1)) > 0
    if not seen.any():
        return math.nan
    return float(f1_scores(counts)[seen].mean())


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute Matthews' correlation for any number of classes (Gorodkin 2004); 0/0 is 0.

    With N examples, c right ones, and p_k, t_k the predictions and labels of class k:
    (c N - sum p_k t_k) / sqrt((N^2 - sum p_k^2) (N^2 - sum t_k^2)).

    Example:
        >>> matthews(np.array([0, 1, 1, 0]), np.array([0, 1, 1, 0]))
        1.0
    """
    # p_k and t_k of each class.
    classes = 1 + int(max(predictions.max(), labels.max()))
    predicted = np.bincount(predictions, minlength=classes).astype(np.float64)
    actual = np.bincount(labels, minlength=classes).astype(np.float64)
    total = float(len(labels))
    right = float((predictions == labels).sum())
    covariance = right * total - predicted @ actual
    variances = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    if variances <= 0:
        return 0.0
    return float(covariance / math.sqrt(variances))


def mean_squared_error(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute the mean of the squared differences, in float64."""
    return float(((predictions.astype(np.float64) - labels.astype(np.float64)) ** 2).mean())


def mean_absolute_error(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute the mean of the absolute differences, in float64."""
    return float(np.abs(predictions.astype(np.float64) - labels.astype(np.float64)).mean())


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute the linear correlation.

    NaN if a side is constant, empty or not finite, as in scipy.
    """
    x = _centred_to_length_1(predictions)
    y = _centred_to_length_1(labels)
    if x is None or y is None:
        return math.nan
    return min(max(float(x @ y), -1.0), 1.0)  # rounding may exceed 1


def _centred_to_length_1(values: np.ndarray) -> np.ndarray | None:
    """Subtract the mean, and scale to length 1, in float64.

    None if values are not finite, or there are no two different ones.

    Example:
        >>> _centred_to_length_1(np.array([1, 2, 3])).round(3).tolist()
        [-0.707, 0.0, 0.707]
    """
    exact = values.astype(np.float64)
    if not exact.size or not np.isfinite(exact).all() or (exact == exact[0]).all():
        return None
    exact = exact / np.abs(exact).max()  # squares neither overflow nor vanish
    exact -= exact.mean()
    length = float(np.linalg.norm(exact))
    return exact / length if length > 0 else None


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank values from 1; equal values share the mean of their ranks.

    Example:
        >>> ranks(np.array([7, 5, 7])).tolist()
        [2.5, 1.0, 2.5]
    """
    # Of the sorted values: the last rank of each distinct one, less half of the ranks before it.
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    mean_ranks = last_ranks - (counts - 1) / 2
    return mean_ranks[inverse]


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute the correlation of the ranks; NaN if a side is constant or has a NaN, as in scipy."""
    if np.isnan(predictions).any() or np.isnan(labels).any():
        return math.nan
    return pearson(ranks(predictions), ranks(labels))


def perplexity(loss: float) -> float:
    """Compute the exponential of a mean loss in nats.

    Infinite if it overflows, from a loss of 700 on.
    """
    return math.exp(loss) if loss < 700 else math.inf
