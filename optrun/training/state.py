"""Where a run stands: the counters and random states that the next step depends on."""

from __future__ import annotations

import base64
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class TrainState:
    """Counters; plain values, so that a checkpoint can hold them."""

    global_step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, padding left out."""
    samples: int = 0
    """Examples trained on."""
    seconds: float = 0.0
    """Wall time of training, over all resumes."""
    skipped_steps: int = 0
    """Updates left out because of non-finite numbers."""
    skipped_in_a_row: int = 0
    window_loss: float = 0.0
    """Sum of losses times weights since the last log line."""
    window_weight: int = 0
    """Tokens or examples in that sum."""
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metric name to its best value and step."""
    last: dict[str, float] = field(default_factory=dict)
    """Metric name to its last value."""
    ranking: dict[str, float] = field(default_factory=dict)
    """Step (as text) to the value of the metric that ranks checkpoints."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainState:
        """The inverse of `to_dict`."""
        return cls(**values)


def random_states(device: torch.device) -> dict[str, Any]:
    """All global generators, as JSON can hold them."""
    version, words, position = random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    states: dict[str, Any] = {
        "torch": _pack(torch.get_rng_state()),
        "python": [version, words, position],
        "numpy": {
            "bit_generator": legacy["bit_generator"],
            "key": [int(word) for word in legacy["state"]["key"]],
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }
    if device.type == "cuda":
        states["cuda"] = _pack(torch.cuda.get_rng_state(device))
    if device.type == "mps":
        states["mps"] = _pack(torch.mps.get_rng_state())
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put all global generators back."""
    torch.set_rng_state(_unpack(states["torch"]))
    version, words, position = states["python"]
    random.setstate((version, tuple(words), position))
    legacy = states["numpy"]
    np.random.set_state(
        {
            "bit_generator": legacy["bit_generator"],
            "state": {"key": np.array(legacy["key"], dtype=np.uint32), "pos": legacy["pos"]},
            "has_gauss": legacy["has_gauss"],
            "gauss": legacy["gauss"],
        }
    )
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_unpack(states["cuda"]), device)
    if device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(_unpack(states["mps"]))


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
