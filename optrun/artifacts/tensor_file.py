"""safetensors files, written in one pass with a checksum of the file and of every tensor.

The format: 8 bytes with the length of a JSON header (little-endian), the header with dtype, shape
and offsets of every tensor, then the tensors' bytes without gaps.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from optrun.artifacts.atomic import Output, naming
from optrun.artifacts.checksum import ALGORITHMS, Entry, Hash, TensorEntry
from optrun.base.reading import open_file, parse_json

_CHUNK = 4 * 2**20
_HEADER_LIMIT = 100_000_000
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


@dataclass
class Written:
    """What went into a file."""

    entry: Entry
    tensors: dict[str, TensorEntry]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, by reference.

    All of it, unless it is divided among ranks.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, row by row.

    Of one on the CPU that is contiguous they are not copied.
    """
    flat = local_part(tensor).to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the 128-bit xxh3 of this rank's bytes of a tensor, row by row.

    Hexadecimal.

    The file around it has a sha256; this one is for looking at tensors one by one, in memory too,
    and costs a tenth.
    """
    return xxhash.xxh3_128_hexdigest(tensor_bytes(tensor))


def describe(tensor: torch.Tensor) -> TensorEntry:
    """Describe a tensor for a manifest, besides its checksum."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    algorithm: str = "xxh3",
) -> Written:
    """Write a new file and flush it to the disk.

    Args:
        path: Where nothing is yet.
        tensors: On any device.
        metadata: For the header, in addition.
        algorithm: Of the file's checksum, one of `optrun.artifacts.checksum.ALGORITHMS`.

    Raises:
        OSError: The disk refused.
        TypeError: A dtype that the format does not have; the tensor is named.
        ValueError: This rank holds a part of a tensor alone.
    """
    ordered = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in ordered:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be saved.")
        if local_part(tensor).shape != tensor.shape:
            raise ValueError(f"{name}: divided among ranks: all of them have to save together.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    file_hash = ALGORITHMS[algorithm]()
    file_hash.update(head)
    digests: dict[str, Hash] = {}
    # One thread more than the one that writes: checksums wait for the memory, writing for the disk.
    with Output(path, exclusive=True) as file, ThreadPoolExecutor(1) as helper:
        file.write(head)
        pending = None
        for name in ordered:
            tensor_hash = xxhash.xxh3_128()
            for chunk in _chunks(tensor_bytes(tensors[name])):
                pending = helper.submit(
                    _update, chunk, tensor_hash, file_hash
                )  # one worker: in the order of the file
                file.write(chunk)
            digests[name] = tensor_hash
        if pending is not None:
            pending.result()
        file.sync()
    described: dict[str, TensorEntry] = {
        name: {**describe(tensor), "xxh3": digests[name].hexdigest()}
        for name, tensor in tensors.items()
    }
    return Written(Entry(len(head) + offset, file_hash.hexdigest(), algorithm), described)


def tensors_on_disk(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path
) -> dict[str, torch.Tensor]:
    """Write tensors into a file without a name.

    Which goes with the last of them, and map it into memory.

    They take room on the disk and in the system's cache, which it empties where memory is short.

    Args:
        tensors: On any device; each is let go before the next one is asked for.
        folder: On a disk with room for all of them.

    Returns:
        On the CPU, by name.

    Raises:
        OSError: The disk refused.
    """
    tensor_places = []
    with naming(folder), TemporaryFile(dir=folder) as file:
        for name, tensor in tensors:
            tensor_places.append((name, tensor.dtype, tensor.shape, file.tell()))
            content = tensor_bytes(tensor)
            file.write(content)
            file.write(bytes(-content.nbytes % 64))  # every tensor is aligned
            del tensor, content  # before the next one is made
        file.flush()
        memory = mmap(file.fileno(), 0)
    return {
        name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, dtype, shape, offset in tensor_places
    }


def _update(chunk: memoryview, *digests: Hash) -> None:
    for digest in digests:
        digest.update(chunk)


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, content.nbytes, _CHUNK):
        yield content[begin : begin + _CHUNK]


def damaged_tensors(path: Path, expected: Mapping[str, TensorEntry]) -> list[str]:
    """Find the damaged tensors of a file, one message each.

    Args:
        path: A file as written by `write_tensors`; may be damaged anywhere.
        expected: From the manifest.

    Returns:
        Sentences; that of a header that cannot be read stands for all tensors.
    """
    messages = []
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, path.stat().st_size):
            return [f"{path}: its header says it is {length:,} bytes long: no tensor can be found."]
        try:
            header = dict(parse_json(file.read(length), path))
        except (ValueError, TypeError):
            return [f"{path}: its header is damaged: no tensor can be found."]
        for name, saved in expected.items():
            problem = _problem(file, 8 + length, header.get(name), saved)
            if problem:
                messages.append(f"{path}: tensor {name}: {problem}.")
    return messages


def _problem(file: BufferedReader, begin: int, entry: Any, saved: TensorEntry) -> str | None:
    try:
        first, last = (int(offset) for offset in entry["data_offsets"])
        shape = [int(size) for size in entry["shape"]]
    except (TypeError, KeyError, ValueError):
        return "missing from the file"
    if shape != saved["shape"] or first < 0 or last < first:
        return f"shape {shape}, {saved['shape']} expected"
    file.seek(begin + first)
    digest = xxhash.xxh3_128()
    rest = last - first
    while rest > 0:
        chunk = file.read(min(_CHUNK, rest))
        if not chunk:
            return "cut off"
        digest.update(chunk)
        rest -= len(chunk)
    if saved["xxh3"] not in (None, digest.hexdigest()):
        return "its bytes changed (checksum differs)"
    return None


def first_not_finite(tensors: Mapping[str, torch.Tensor], *, infinite: bool = True) -> str | None:
    """Find the first floating tensor with a NaN or an infinity in it; None: none has.

    Args:
        tensors: By name; of those divided among ranks, what this one holds is looked at.
        infinite: Whether infinities count; NaN always does.
    """
    for name, parameter in tensors.items():
        tensor = local_part(parameter)
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        values = tensor if tensor.element_size() > 1 else tensor.float()
        low, high = (float(value) for value in torch.aminmax(values))
        if (
            math.isnan(low)
            or math.isnan(high)
            or (infinite and (math.isinf(low) or math.isinf(high)))
        ):
            return name
    return None
