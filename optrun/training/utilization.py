"""What a device could do at most, for `perf/mfu`: the share of it that training uses."""

from __future__ import annotations

_TERA = 1e12

PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "fp32": 75}),
    ("H200", {"bf16": 989, "fp16": 989, "fp32": 67}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "fp32": 51}),
    ("H100", {"bf16": 989, "fp16": 989, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "fp32": 19.5}),
    ("L40S", {"bf16": 362, "fp16": 362, "fp32": 91.6}),
    ("L4", {"bf16": 121, "fp16": 121, "fp32": 30.3}),
    ("A10G", {"bf16": 70, "fp16": 70, "fp32": 31.5}),
    ("A10", {"bf16": 125, "fp16": 125, "fp32": 31.2}),
    ("V100", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "fp32": 35.6}),
    ("MI300X", {"bf16": 1307, "fp16": 1307, "fp32": 163.4}),
)
"""Part of a device's name -> TFLOP/s of dense matrix products by `training.precision`, as the makers' data sheets say:
without sparsity, 16-bit products added up in float32, float32 without TF32. The first that fits
counts.
"""


def peak_flops(device: str, precision: str) -> float | None:
    """Look up the peak of one device, in FLOP/s.

    Args:
        device: Name, as `torch.cuda.get_device_name` says it.
        precision: `fp32`, `bf16` or `fp16`.

    Returns:
        None where it is not known.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16"), peak_flops("NVIDIA L4", "fp32"), peak_flops("cpu", "fp32")
        (989000000000000.0, 30300000000000.0, None)
    """
    words = device.replace("-", " ").split()
    for name, peaks in PEAKS:
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return peaks[precision] * _TERA if precision in peaks else None
    return None
