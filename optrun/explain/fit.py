"""How large a batch fits the memory that is there."""

from __future__ import annotations

import os

import torch

from optrun.explain.facts import Facts

USUAL_BATCH = 16
_SHARE = 0.6
"""Of the memory, that a run may take."""
_KEPT = 2.0
"""Activations that backward needs, over those that weights read and write.

Norms, dropout, attention.
"""


def memory_there() -> int:
    """Return the bytes that a run may use: free on the GPU, else half of the machine's."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def bytes_of_batch(facts: Facts, batch: int, length: int) -> int:
    """Estimate the memory of a step.

    Weights, gradients, states, and float32 activations of every matrix.

    Args:
        facts: Of the configuration.
        batch: Examples.
        length: Tokens of each.
    """
    fixed = (
        facts.weight_bytes + facts.gradient_bytes + (facts.state_bytes or 2 * facts.weight_bytes)
    )
    matrices = [
        tensor.shape
        for tensor in facts.tensors
        if len(tensor.shape) == 2 and "embed" not in tensor.name
    ]
    widths = sum(rows + columns for rows, columns in matrices)
    vocabulary = max(
        (tensor.shape[0] for tensor in facts.tensors if "embed" in tensor.name), default=0
    )
    logits = vocabulary * ("lm" in facts.task or facts.task == "sft") * 2
    return fixed + int(4 * batch * length * (_KEPT * widths + logits))


def fitting_batch(facts: Facts, length: int, there: int) -> int | None:
    """Pick the largest batch up to the usual one that fits; None: not even one example does."""
    sizes = [USUAL_BATCH >> power for power in range(5)]
    return next(
        (size for size in sizes if bytes_of_batch(facts, size, length) <= _SHARE * there), None
    )
