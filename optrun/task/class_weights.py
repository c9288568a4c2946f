"""The weight of each class in the training loss: `task.class_weights`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from optrun.base.errors import ConfigError, did_you_mean


def class_weights(
    given: str | Sequence[float] | Mapping[str, float] | None,
    labels: Sequence[str],
    counts: Mapping[str, int],
    examples: int | None = None,
) -> torch.Tensor | None:
    """Return weights by class number.

    Args:
        given: As configured: `balanced`, a list, or a mapping from label to weight.
        labels: Names of the classes by number.
        counts: How often each stands in the training examples.
        examples: How many there are, where each has any number of labels; None: each has one.

    Returns:
        Shape (classes,), float32; None: all alike. `balanced` is scikit-learn's: examples /
        (classes * count); of any number of labels (examples - count) / count, what torch calls
        `pos_weight`.

    Raises:
        ConfigError: Weights that do not fit the classes.
    """
    if given is None:
        return None
    label_names = ", ".join(labels[:12]) + (", ..." if len(labels) > 12 else "")
    if given == "balanced":
        missing = [label for label in labels if not counts.get(label)]
        if missing:
            raise ConfigError(
                f"task.class_weights=balanced: no training example has the label {missing[0]}. Give"
                " its rows, or weights by hand, such as {" + missing[0] + ": 1.0}."
            )
        weights = [sum(counts.values()) / (len(labels) * counts[label]) for label in labels]
        if examples is not None:
            everywhere = [label for label in labels if counts[label] >= examples]
            if everywhere:
                raise ConfigError(
                    "task.class_weights=balanced: every training example has the label"
                    f" {everywhere[0]}, so there is nothing to balance it with. Give weights by"
                    " hand, such as {" + everywhere[0] + ": 1.0}."
                )
            weights = [(examples - counts[label]) / counts[label] for label in labels]
    elif isinstance(given, Mapping):
        by_label = {str(label): float(weight) for label, weight in given.items()}
        unknown = next((label for label in by_label if label not in labels), None)
        if unknown is not None:
            raise ConfigError(
                f"task.class_weights.{unknown}: no such label. {did_you_mean(unknown, labels)}"
            )
        weights = [by_label.get(label, 1.0) for label in labels]
    else:
        weights = [float(weight) for weight in given]
        if len(weights) != len(labels):
            raise ConfigError(
                f"task.class_weights: {len(weights)} weights for {len(labels)} classes, which are"
                f" {label_names}."
            )
    return torch.tensor(weights)
