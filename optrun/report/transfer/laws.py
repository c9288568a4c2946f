"""Look up what the literature says of how lr moves.

Printed beside a prediction, never mixed into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_KINDS = {
    "width": ("n_embd", "hidden_size", "d_model", "dim"),
    "depth": ("n_layer", "num_hidden_layers", "num_layers", "n_layers"),
    "length": ("max_steps", "num_train_epochs"),
    "batch": ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
}
"""Last pieces of keys, by what they scale."""


@dataclass(frozen=True)
class KnownLaw:
    """A published exponent of lr in one key."""

    key: str
    exponent: float
    lr: float
    """What it makes of the optimum at the nearest size that was swept."""
    says: str
    source: str


_LAWS = {
    "width": [
        (-1.426, "lr* ~ N^-0.713 of N parameters without embeddings, and N ~ width^2", "Step Law")
    ],
    "depth": [
        (-0.713, "lr* ~ N^-0.713 of N parameters without embeddings, and N ~ depth", "Step Law")
    ],
    "length": [
        (-0.32, "lr* ~ D^-0.32 of D tokens, the batch fixed", "Token horizons"),
        (0.307, "lr* ~ D^0.307 of D tokens, with a batch that grows as D^0.571", "Step Law"),
    ],
    "batch": [
        (
            0.5,
            "lr ~ the square root of the batch, with 1 - beta and warm-up in proportion to it",
            "Square root",
        )
    ],
}
_SOURCES = {
    "Step Law": ("Li et al. 2025, arXiv:2503.04715", ("adam",)),
    "Token horizons": ("Bjorck et al. 2024, arXiv:2409.19913", ("adam",)),
    "Square root": (
        "Malladi et al. 2022, arXiv:2205.10287 (Adam); You et al. 2020, arXiv:1904.00962 (LAMB)",
        ("adam", "lamb"),
    ),
}
"""Where a law stands, and what is part of the name of each optimizer that it was found with."""


def known_laws(
    optimizer: str,
    lr: float,
    seen: Mapping[str, float],
    target: Mapping[str, float],
    *,
    scaled: bool,
) -> list[KnownLaw]:
    """Apply the published exponents to one step from a size that was swept to the target.

    Args:
        optimizer: Its name; a law is told of the optimizers that it was found with.
        lr: The optimum at that size.
        seen: That size.
        target: The size that is asked for.
        scaled: Whether the parametrization carries lr over sizes of the model; no law of these is
            told then.
    """
    kinds = {
        kind: ends for kind, ends in _KINDS.items() if not (scaled and kind in ("width", "depth"))
    }
    return [
        KnownLaw(
            key,
            exponent,
            lr * (target[key] / value) ** exponent,
            says,
            f"{name}: {_SOURCES[name][0]}",
        )
        for key, value in seen.items()
        for kind, ends in kinds.items()
        if key.rpartition(".")[2] in ends
        for exponent, says, name in _LAWS[kind]
        if any(part in optimizer for part in _SOURCES[name][1])
    ]
