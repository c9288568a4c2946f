"""Count the floating point operations that a model needs for a batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from optrun.model.attention import one_row
from optrun.model.quantization import quantized

Shape = tuple[int, ...]


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


_NOT_COUNTED_BY_TORCH = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def step_flops(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    autocast: AbstractContextManager[object] | None = None,
) -> float:
    """Count forward and backward of one batch, of which nothing stays.

    Neither gradients nor random states.

    The forward pass is run once, and its matrix products, convolutions and attention are counted.
    The backward pass has a product for the gradient of the activations and one for that of the
    weights, each as large as that of the forward pass; the latter for those weights alone that are
    trained:

        F = F_forward (2 + trained / all)

    With all of them this is the 3 F_forward of Chowdhery et al. 2022 (PaLM, appendix B): what is
    computed again for gradient checkpointing is not counted.

    Args:
        model: Not sharded, not compiled; of one with quantised weights or flash attention nothing
            is known, which is 0.
        batch: As collated, on the model's device.
        autocast: Of training.
    """
    if quantized(model) is not None or one_row(model):
        return 0.0  # torch does not know the products of these kernels
    training = model.training
    devices = [batch_device(batch)] if batch_device(batch).type == "cuda" else []
    counter = FlopCounterMode(display=False, custom_mapping=_NOT_COUNTED_BY_TORCH)
    try:
        model.eval()  # the same operations but dropout, and running averages stay
        with torch.random.fork_rng(devices), torch.no_grad(), autocast or nullcontext(), counter:
            model(**batch)
    finally:
        model.train(training)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    trained = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)
    return float(counter.get_total_flops()) * (
        2 + trained / max(1, sum(each.numel() for each in matrices))
    )


def batch_device(batch: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of a batch."""
    return next(iter(batch.values())).device
