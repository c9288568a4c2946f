"""Compile the Triton kernels for devices that need not be there, and print what they became, a
JSON object a line.

python -m tests.triton_compiled
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optrun.optimizer.kernels.triton import device

KERNELS = (
    "adam",
    "adamax",
    "lamb_moments",
    "set_ratios",
    "lamb_update",
    "lion",
    "schedule_free",
    "ademamix",
    "mars_norm",
    "mars_update",
)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {
    "tensor_table": "*i64",
    "grad_addresses": "*i64",
    "row_of": "*i64",
    "chunks": "*i64",
    "scalar_table": "*fp64",
    "sums": "*fp64",
}


def compiled(kernel: Any, target: GPUTarget, real: Any) -> str:
    """The assembly of a kernel over aligned tensors of a dtype."""
    constants = {"DTYPE": real, "ALIGNED": True}
    pointers = {**POINTERS, "ratios": f"*{real}"}
    signature = {name: pointers.get(name, "constexpr") for name in kernel.arg_names}
    given = {name: value for name, value in constants.items() if name in signature}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in pointers
    }
    source = ASTSource(kernel, signature, given, aligned)
    assembly = triton.compile(source, target=target, options=dict(device.OPTIONS)).asm
    return assembly["ptx" if target.backend == "cuda" else "amdgcn"]


def main() -> None:
    for name in KERNELS:
        for arch, target in TARGETS.items():
            for real in (tl.float32, tl.float64):
                text = compiled(getattr(device, name), target, real)
                loads = re.findall(
                    r"ld\.global\S*\.v[24]|(?:buffer|global|flat)_load_dwordx4", text
                )
                row = {"kernel": name, "target": arch, "dtype": str(real)}
                print(
                    json.dumps({**row, "atomics": text.count("atom"), "vector loads": len(loads)})
                )


if __name__ == "__main__":
    main()
