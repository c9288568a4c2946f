"""Find out why the Triton kernels do not step tensors on a device, if they do not."""

from __future__ import annotations

from functools import cache

import torch


@cache
def why_unavailable(device: str) -> str:
    """Say why the Triton kernels cannot step tensors on a type of device; empty if they can.

    The first call for a CUDA device compiles the kernels and checks them there (`trial`). The
    result is cached.

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
        is_missing = error.name == "triton"
        return "triton is not installed" if is_missing else f"triton does not load: {error}"
    if device == "cpu":
        needed = "they need a CUDA or ROCm device, or Triton's interpreter: TRITON_INTERPRET=1"
        return "" if kernels.INTERPRETED else needed
    if kernels.INTERPRETED:
        return "TRITON_INTERPRET is set, and Triton's interpreter computes on the CPU"
    from optrun.optimizer.kernels.triton.trial import trial

    return trial(torch.device(device))
