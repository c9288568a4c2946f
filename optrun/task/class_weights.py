"""The weight of each class in the training loss: `task.class_weights`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optrun.base.errors import ConfigError, did_you_mean


def class_weights(
    configured: str | Mapping[str, float] | None,
    labels: Sequence[str],
    counts: Mapping[str, int],
    examples_with_label_sets: int | None = None,
) -> Tensor | None:
    """Compute the weight of each class in the training loss.

    Args:
        configured: `task.class_weights`: `balanced`, or a mapping from label to weight; a label
            that it does not name has the weight 1. None: there are no weights.
        labels: Names by class number.
        counts: Number of training examples of each label.
        examples_with_label_sets: Number of training examples if each may have any number of labels;
            None if each has exactly one.

    Returns:
        By class number, shape (classes,), float32; None without weights. `balanced` is that of
        scikit-learn: examples / (classes * examples of the class). For sets of labels it is the
        `pos_weight` of torch: examples without the label / examples with it.

    Raises:
        ConfigError: A mapping names an unknown label; or `balanced`, and no training example has
            one of the labels, or all have it.

    Example:
        >>> class_weights({"spam": 3.0}, ["ham", "spam"], {"ham": 9, "spam": 3}).tolist()
        [1.0, 3.0]
        >>> class_weights("balanced", ["ham", "spam"], {"ham": 9, "spam": 3})
        tensor([0.6667, 2.0000])
    """
    if configured is None:
        return None
    if configured == "balanced":
        return torch.tensor(_balanced_weights(labels, counts, examples_with_label_sets))
    assert isinstance(configured, Mapping)  # the configuration has refused anything else
    by_label = {str(label): float(weight) for label, weight in configured.items()}
    for label in by_label:
        if label not in labels:
            raise ConfigError(
                f"task.class_weights.{label}: no such label. {did_you_mean(label, labels)}"
            )
    return torch.tensor([by_label.get(label, 1.0) for label in labels])


def _balanced_weights(
    labels: Sequence[str], counts: Mapping[str, int], examples_with_label_sets: int | None
) -> list[float]:
    """Weigh each class inversely to its number of training examples, see `class_weights`.

    Raises:
        ConfigError: No training example has a label; or all have it, and examples have sets of
            labels.
    """
    for label in labels:
        if not counts.get(label):
            raise ConfigError(
                f"task.class_weights=balanced: no training example has the label {label}. Add rows"
                f" with it, or give the weights yourself, such as {{{label}: 1.0}}."
            )
        if counts[label] == examples_with_label_sets:
            raise ConfigError(
                f"task.class_weights=balanced: every training example has the label {label}. Give"
                f" the weights yourself, such as {{{label}: 1.0}}."
            )
    if examples_with_label_sets is not None:
        return [(examples_with_label_sets - counts[label]) / counts[label] for label in labels]
    examples = sum(counts.values())
    return [examples / (len(labels) * counts[label]) for label in labels]
