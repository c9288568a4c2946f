"""Learning rates, and the figures of the sources of a mixture, as metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def learning_rates(groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return `train/lr`, the largest of all groups, and `lr/<layer>` if layers have different ones.

    Args:
        groups: Parameter groups, with `lr` and, where they were divided by layer, `layer`.

    Example:
        >>> learning_rates([{"lr": 0.1, "layer": "head"}, {"lr": 0.05, "layer": "block 3"}])
        {'train/lr': 0.1, 'lr/head': 0.1, 'lr/block_03': 0.05}
    """
    layers: dict[str, float] = {}
    for group in groups:
        if group.get("layer"):
            name = f"lr/{metric_name(group)}"
            layers[name] = max(layers.get(name, 0.0), float(group["lr"]))
    peak = {"train/lr": max(float(group["lr"]) for group in groups)}
    return {**peak, **layers} if len(set(layers.values())) > 1 else peak


def metric_name(group: Mapping[str, Any]) -> str:
    """Name a group's layer in a metric: `layer_03`, `head`, `embeddings`.

    Example:
        >>> metric_name({"layer": "block 3", "layer_id": 4})
        'block_03'
    """
    pieces = str(group["layer"]).split()
    return "_".join(f"{int(piece):02d}" if piece.isdecimal() else piece for piece in pieces)


def source_metrics(window: Mapping[str, list[float]]) -> dict[str, float]:
    """Compute the loss of each source of a mixture, and its share of the examples."""
    examples = sum(count for _, _, count in window.values())
    losses = {f"train/loss/{name}": loss / targets for name, (loss, targets, _) in window.items() if targets}
    return {**losses, **{f"train/share/{name}": count / examples for name, (_, _, count) in window.items()}}
