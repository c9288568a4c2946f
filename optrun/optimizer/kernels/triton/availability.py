"""Find out why the Triton kernels do not step tensors on a device, if they do not."""

from __future__ import annotations

from functools import cache

import torch


@cache
def why_not(device: str) -> str:
    """Say why the Triton kernels do not step tensors on a type of device; empty if they do.

    The first call for a CUDA device compiles and checks them there (`trial`); the result is cached.

    Args:
        device: Such as "cuda", which is what torch calls ROCm's devices too.
    """
    if device not in ("cpu", "cuda"):
        return f"they are for CUDA and ROCm devices, not for {device}"
    if device == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA or ROCm device"
    try:
        from optrun.optimizer.kernels.triton import device as kernels
    except ImportError as error:
        return (
            "triton is not installed"
            if error.name == "triton"
            else f"triton does not load: {error}"
        )
    if kernels.INTERPRETED:
        return (
            ""
            if device == "cpu"
            else "TRITON_INTERPRET is set, and Triton's interpreter computes on the CPU"
        )
    if device == "cpu":
        return "they need a CUDA or ROCm device, or Triton's interpreter: TRITON_INTERPRET=1"
    from optrun.optimizer.kernels.triton.trial import trial

    return trial(torch.device(device))
