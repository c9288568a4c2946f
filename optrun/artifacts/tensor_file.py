"""safetensors files, written in one pass with a checksum.

The format: 8 bytes with the length of a JSON header (little-endian), the header with dtype, shape
and offsets of every tensor, then the tensors' bytes without gaps.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryFile

import torch
import xxhash
from torch.distributed.tensor import DTensor

from optrun.artifacts.atomic import Output, name_in_errors
from optrun.artifacts.checksum import Entry, TensorEntry

_CHUNK = 4 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, by reference.

    That is the whole tensor unless it is a DTensor.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of this rank's part of a tensor, in row-major order.

    A contiguous CPU tensor is not copied.
    """
    flat = local_part(tensor).to("cpu").contiguous().reshape(-1)
    if flat.numel():
        return flat.view(torch.uint8).numpy().data
    return memoryview(b"")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the 128-bit xxh3 of this rank's part of a tensor, in row-major order.

    The digest is hexadecimal.
    """
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))


def describe(tensor: torch.Tensor) -> TensorEntry:
    """Describe a tensor for a manifest."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Entry:
    """Write tensors to a new safetensors file and flush it to the disk.

    As `safetensors.torch.save_file`, but without a copy of all bytes in memory, and with a checksum
    that is computed while they are written.

    Args:
        path: Path of the new file; an existing one is refused.
        tensors: Tensors on any device.
        metadata: Additional metadata for the header.

    Returns:
        Size and checksum (xxh3) of the file.

    Raises:
        OSError: The disk refused the write, or the file exists.
        TypeError: The format lacks the dtype of a tensor; the message names it.
        ValueError: This rank holds only a part of a tensor.
    """
    # 1. The header: where each tensor begins and ends, counted from the end of the header. Larger
    # elements come first, so that every tensor is aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in ordered:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be saved.")
        if local_part(tensor).shape != tensor.shape:
            raise ValueError(f"{name}: divided among ranks: all of them have to save together.")
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # spaces up to a multiple of 8 bytes
    head = len(head).to_bytes(8, "little") + head

    # 2. The bytes. A second thread computes the checksum meanwhile: that waits for the memory,
    # writing for the disk. It is one thread, so the chunks keep their order.
    digest = xxhash.xxh3_128(head)
    with Output(path, exclusive=True) as file, ThreadPoolExecutor(1) as helper:
        file.write(head)
        last_update = None
        for name in ordered:
            for chunk in _chunks(tensor_bytes(tensors[name])):
                last_update = helper.submit(digest.update, chunk)
                file.write(chunk)
        if last_update is not None:
            last_update.result()  # all earlier ones are done, too
        file.sync()
    return Entry(len(head) + offset, digest.hexdigest(), "xxh3")


def tensors_on_disk(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path
) -> dict[str, torch.Tensor]:
    """Write tensors into a file without a name, and return them as memory-mapped tensors.

    They take disk space in place of memory; the file vanishes when the last of them is freed.

    Args:
        tensors: Name and tensor, on any device; each is released before the next is requested.
        folder: A folder on a disk with room for all tensors.

    Returns:
        Name -> tensor on the CPU.

    Raises:
        OSError: The disk refused the write.
    """
    records = []
    with name_in_errors(folder), TemporaryFile(dir=folder) as file:
        for name, tensor in tensors:
            records.append((name, tensor.dtype, tensor.shape, file.tell()))
            content = tensor_bytes(tensor)
            file.write(content)
            file.write(bytes(-content.nbytes % 64))  # every tensor is aligned
            del tensor, content  # before the next one is made
        file.flush()
        memory = mmap(file.fileno(), 0)  # all of the file, which stays as long as it is mapped
    return {
        name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, dtype, shape, offset in records
    }


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, content.nbytes, _CHUNK):
        yield content[begin : begin + _CHUNK]


def first_not_finite(tensors: Mapping[str, torch.Tensor], *, infinite: bool = True) -> str | None:
    """Find the first floating-point tensor with a NaN or an infinity; None if all are finite.

    Args:
        tensors: Name -> tensor; of a DTensor only this rank's part is checked.
        infinite: Whether infinities count; NaN always does.
    """
    for name, parameter in tensors.items():
        tensor = local_part(parameter)
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        values = tensor if tensor.element_size() > 1 else tensor.float()  # float8 has no aminmax
        # Both bounds are NaN if any value is, and an infinity is always one of them.
        bounds = [float(bound) for bound in torch.aminmax(values)]
        has_infinity = any(map(math.isinf, bounds))
        if any(map(math.isnan, bounds)) or (infinite and has_infinity):
            return name
    return None
