"""The numbers that judge a model.

A few formulas, right against scikit-learn and scipy in the tests.

All take NumPy arrays of shape (n,) with n of 1 or more, and return Python floats.
"""

from __future__ import annotations

import math

import numpy as np


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of predictions equal to their label."""
    return float((predictions == labels).mean())


def confusion(predictions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Count confusions; shape (classes, classes), int64, rows = labels, columns = predictions."""
    flat = np.bincount(
        labels.astype(np.int64) * classes + predictions.astype(np.int64),
        minlength=classes * classes,
    )
    counts: np.ndarray = flat.reshape(classes, classes)
    return counts


def f1_scores(counts: np.ndarray) -> np.ndarray:
    """Compute F1 of each class, 2 TP / (2 TP + FP + FN).

    0 for a class that neither occurs nor is predicted.
    """
    hits = np.diag(counts).astype(np.float64)
    total = counts.sum(axis=0) + counts.sum(axis=1)
    scores: np.ndarray = np.divide(2 * hits, total, out=np.zeros_like(hits), where=total > 0)
    return scores


def f1(predictions: np.ndarray, labels: np.ndarray, num_labels: int) -> float:
    """Compute F1 of the second of two classes, else the mean over classes.

    The mean is over classes that occur or are predicted.
    """
    counts = confusion(
        predictions, labels, num_labels or 1 + int(max(predictions.max(), labels.max()))
    )
    return float(f1_scores(counts)[1]) if num_labels == 2 else mean_f1(counts)


def mean_f1(counts: np.ndarray) -> float:
    """Compute the mean F1 over all true or predicted classes."""
    seen = (counts.sum(axis=0) + counts.sum(axis=1)) > 0
    return float(f1_scores(counts)[seen].mean()) if seen.any() else math.nan


def matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute Matthews' correlation for any number of classes (Gorodkin 2004); 0/0 is 0."""
    classes = 1 + int(max(predictions.max(), labels.max()))
    predicted, actual = (
        np.bincount(side, minlength=classes).astype(np.float64) for side in (predictions, labels)
    )
    total = float(len(labels))
    hits = float((predictions == labels).sum())
    covariance = hits * total - predicted @ actual
    spread = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    return float(covariance / math.sqrt(spread)) if spread > 0 else 0.0


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
    x = _centred(predictions)
    y = _centred(labels)
    return math.nan if x is None or y is None else min(max(float(x @ y), -1.0), 1.0)


def _centred(values: np.ndarray) -> np.ndarray | None:
    """Subtract the mean in float64 and scale to length 1; None if not finite."""
    wide = values.astype(np.float64)
    if not wide.size or not np.isfinite(wide).all() or (wide == wide[0]).all():
        return None
    wide = wide / np.abs(wide).max()  # squares neither overflow nor vanish
    wide -= wide.mean()
    length = float(np.linalg.norm(wide))
    return wide / length if length > 0 else None


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank values from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return mean_rank


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute the correlation of the ranks; NaN if a side is constant or has a NaN, as in scipy."""
    if np.isnan(predictions).any() or np.isnan(labels).any():
        return math.nan
    return pearson(ranks(predictions), ranks(labels))


def perplexity(loss: float) -> float:
    """Compute the exponential of the mean negative log-likelihood in nats.

    Infinite if it overflows.
    """
    return math.exp(loss) if loss < 700 else math.inf
