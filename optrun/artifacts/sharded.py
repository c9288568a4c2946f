"""Tensors divided among ranks: each rank writes a shard file, and a reader reads what it needs.

The files are those of `torch.distributed.checkpoint` with its safetensors writer: one per rank, and
the header says where each piece lies in the full tensor. torch plans which rank writes what, so
that each element is written once. The bytes go through `write_tensors`, which needs no copy of the
shard in memory, and computes the checksum while it writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from optrun.artifacts.checksum import Entry, TensorEntry
from optrun.artifacts.ranks import error_of_rank, lost_rank_errors
from optrun.artifacts.tensor_file import local_part, write_tensors
from optrun.base.errors import CheckpointError
from optrun.base.reading import parse_json

_OFFSETS = "DCP_SHARDING_INFO"
"""Key of a header's metadata: name to `saved_offsets`, as JSON."""


class ShardWriter(HuggingFaceStorageWriter):
    """Writes the shard of this rank as `HuggingFaceStorageWriter(save_distributed=True)` does.

    Args:
        folder: Folder for the shards of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self.written: dict[str, Entry] = {}
        """The files of this rank, by name; empty if other ranks write everything that it holds."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of this rank's plan to one file, flushed to the disk.

        torch calls it in `save`. The file is recorded in `self.written`, and its header says where
        each piece begins in the full tensor. Without tensors nothing is written.

        Args:
            plan: Which pieces this rank writes: an item per tensor with its name and its chunk,
                the offsets and sizes of the piece in the full tensor.
            planner: Returns the tensor of an item.

        Returns:
            A future that is done, with index and size of each piece, as torch expects.

        Raises:
            OSError: The disk refused the write.
            TypeError: The format lacks a dtype.
        """
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        results = []
        # Torch's own file name. The index is that of the rank, from 1; each rank has one file.
        name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        for item in plan.items:
            piece = planner.resolve_data(item)
            # Always so: `write_shards` saves nothing but tensors.
            assert isinstance(piece, torch.Tensor)
            assert item.tensor_data is not None
            tensor_name = item.index.fqn  # fully qualified name
            tensors[tensor_name] = piece
            offsets[tensor_name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, piece.nbytes, None))
        if tensors:
            # The header that torch's readers look for.
            metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
            self.written[name] = write_tensors(Path(self.path) / name, tensors, metadata)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def write_shards(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: ProcessGroup
) -> dict[str, Entry]:
    """Write this rank's part of tensors to a shard file; every rank must call it.

    The files are flushed to the disk, the entries of the folder are not.

    Args:
        folder: A folder that all ranks share; created if missing.
        tensors: Tensors on the CPU. Of a DTensor this rank's part is written. Any other must be
            equal on all ranks, and one of them writes it.
        group: CPU group of the ranks.

    Returns:
        The file of this rank by name, or an empty mapping if it has nothing to write.

    Raises:
        OSError: The disk of one rank refused the write; every rank raises, with its number.
        OptrunError: A rank failed otherwise; every rank raises.
        RankLostError: A rank no longer answers.
    """
    writer = ShardWriter(folder)
    try:
        with lost_rank_errors():
            # A collective: the ranks agree on a plan, and each calls its `writer.write_data`.
            save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        # `failures` maps each rank that failed to its error and traceback.
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise error_of_rank(rank, cause) from error
    return writer.written


def mesh_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, object] | None:
    """Describe the mesh of divided tensors; None if no tensor is divided."""
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh  # the same for all of a model
            return {"dim_names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.shape)}
    return None


@contextmanager
def _safetensors_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a safetensors file into a CheckpointError that names the file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        yield
    except (
        SafetensorError,
        OSError,
        RuntimeError,  # torch maps the file: "unable to open"
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, stored in one file."""

    file: Path
    offsets: tuple[int, ...]
    """Index in the full tensor at which it begins, for each dimension."""
    shape: tuple[int, ...]
    """Of the part."""


class StoredTensors(Mapping[str, torch.Tensor]):
    """A lazy mapping of tensors in safetensors files, whole or in shards.

    Each tensor is read from mapped memory when it is used.

    Args:
        files: All verified files that hold a part of a tensor.
        described: Name -> `dtype` and `shape`, from the manifest.

    Raises:
        CheckpointError: The files do not hold every element of these tensors exactly once.
    """

    def __init__(self, files: Sequence[Path], described: Mapping[str, TensorEntry]) -> None:
        self.described = described
        self._files: dict[Path, Any] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for path in files:
            with _safetensors_errors(path):
                self._open(path)
        self._refuse_gaps(files)

    def _open(self, path: Path) -> None:
        """Open a safetensors file, and record the pieces of tensors in it.

        A tensor that the header does not call a piece is whole, so it begins at 0 everywhere.
        """
        file = self._files[path] = safe_open(path, framework="pt")
        # Name -> `saved_offsets`; empty for a file of one process.
        sharding = parse_json((file.metadata() or {}).get(_OFFSETS, "{}").encode(), path)
        for name in file.keys():  # noqa: SIM118  # no mapping
            shape = tuple(file.get_slice(name).get_shape())
            if name in sharding:
                offsets = tuple(map(int, sharding[name]["saved_offsets"]))
            else:
                offsets = (0,) * len(shape)
            self._pieces.setdefault(name, []).append(_Piece(path, offsets, shape))

    def _refuse_gaps(self, files: Sequence[Path]) -> None:
        """Refuse tensors with missing or repeated elements, or missing in files or manifest.

        Args:
            files: The opened files, for the message.

        Raises:
            CheckpointError: The message names the first such tensor.
        """
        where = files[0].parent if files else "the checkpoint"
        # Names on one side only.
        for name in sorted(self._pieces.keys() ^ self.described.keys()):
            only = "the files" if name in self._pieces else "the manifest"
            raise CheckpointError(f"{where}: tensor {name} is in {only} only.")
        for name, pieces in self._pieces.items():
            shape = tuple(self.described[name]["shape"])
            if not _hold_each_element_once(pieces, shape):
                parts = ", ".join(
                    f"{list(piece.shape)} at {list(piece.offsets)}" for piece in pieces[:4]
                )
                raise CheckpointError(
                    f"{where}: tensor {name} of shape {list(shape)} is not whole: {parts}."
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def read(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """Read a tensor in full on the CPU, or this rank's part of it as a DTensor.

        Args:
            name: Name of the tensor in the checkpoint.
            like: A DTensor of the same shape, not on the meta device: only this rank's part is
                read, with its mesh, placement and device. For anything else the full tensor is
                read. The dtype is always that of the file.

        Raises:
            KeyError: No tensor has this name.
            CheckpointError: The tensor cannot be read.
        """
        pieces = self._pieces[name]
        shape = tuple(self.described[name]["shape"])
        with _safetensors_errors(pieces[0].file):
            first_piece = self._stored(name, pieces[0])  # mapped: nothing is read yet
            # 1. This rank's part: memory of its shape, filled from the pieces that overlap with it.
            if isinstance(like, DTensor) and tuple(like.shape) == shape:
                divided = torch.empty_like(like.detach(), dtype=first_piece.dtype)
                self._fill(local_part(divided), _first_index(divided), name)
                return divided
            # 2. The full tensor that was stored as one piece.
            if pieces[0].shape == shape:
                return first_piece
            # 3. The full tensor, put together from its pieces.
            tensor = torch.empty(shape, dtype=first_piece.dtype)
            self._fill(tensor, (0,) * len(shape), name)
            return tensor

    def _stored(self, name: str, piece: _Piece) -> torch.Tensor:
        """Return a piece from its file, mapped into memory: only the elements used are read."""
        tensor: torch.Tensor = self._files[piece.file].get_tensor(name)
        return tensor

    def _fill(self, target: torch.Tensor, offsets: Sequence[int], name: str) -> None:
        """Fill a part of a tensor from all stored pieces that overlap with it.

        Args:
            target: The part, changed in place; converted to its dtype and device.
            offsets: Index in the full tensor at which the part begins, for each dimension.
            name: Name of the tensor.
        """
        target_piece = _Piece(Path(), tuple(offsets), tuple(target.shape))  # in no file
        for piece in self._pieces[name]:
            overlap = _overlap(target_piece, piece)
            if overlap is not None:
                # The overlap counts in the full tensor; either side is indexed from its own begin.
                source = self._stored(name, piece)[_slices(overlap, piece.offsets)]
                target[_slices(overlap, offsets)].copy_(source)


def _slices(ranges: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Convert ranges in the full tensor to slices of a part of it that begins at `origin`.

    Example:
        >>> _slices([(4, 6), (0, 3)], origin=(3, 0))
        (slice(1, 3, None), slice(0, 3, None))
    """
    slices = []
    for (begin, end), offset in zip(ranges, origin, strict=True):
        slices.append(slice(begin - offset, end - offset))
    return tuple(slices)


def _hold_each_element_once(pieces: Sequence[_Piece], shape: Sequence[int]) -> bool:
    """Tell whether pieces hold every element of a tensor exactly once.

    They do if they lie inside, have as many elements in all, and do not overlap. Pieces without
    elements, of ranks that got nothing, only have to lie inside.

    Args:
        pieces: The pieces of the tensor, in any order.
        shape: Shape of the full tensor.

    Example:
        >>> def rows(begin: int, count: int) -> _Piece:
        ...     return _Piece(Path(), (begin, 0), (count, 3))
        >>> _hold_each_element_once([rows(2, 2), rows(0, 2)], (4, 3))
        True
        >>> _hold_each_element_once([rows(1, 2), rows(0, 2)], (4, 3))
        False
    """
    solid = [piece for piece in pieces if 0 not in piece.shape]  # that have elements
    if sum(math.prod(piece.shape) for piece in solid) != math.prod(shape):
        return False
    if not all(_is_inside(piece, shape) for piece in pieces):
        return False
    # No overlap; only neighbours are compared where that is enough.
    divided = [d for d in range(len(shape)) if any(piece.shape[d] != shape[d] for piece in solid)]
    if len(divided) == 1:
        # As FSDP does, perhaps into thousands of pieces: all pairs would be millions.
        solid.sort(key=lambda piece: piece.offsets)
        pairs: Iterable[tuple[_Piece, _Piece]] = pairwise(solid)
    else:
        pairs = combinations(solid, 2)
    return all(_overlap(first, second) is None for first, second in pairs)


def _overlap(first: _Piece, second: _Piece) -> list[tuple[int, int]] | None:
    """Return the (begin, end) shared by two pieces in each dimension; None if they are disjoint.

    Begin and end count in the full tensor, as the offsets of the pieces do.
    """
    ranges = []
    for d in range(len(first.shape)):
        begin = max(first.offsets[d], second.offsets[d])
        end = min(first.offsets[d] + first.shape[d], second.offsets[d] + second.shape[d])
        if begin >= end:
            return None
        ranges.append((begin, end))
    return ranges


def _is_inside(piece: _Piece, shape: Sequence[int]) -> bool:
    """Tell whether a piece has the dimensions of the tensor and lies within its shape."""
    return len(piece.shape) == len(shape) == len(piece.offsets) and all(
        offset >= 0 and offset + size <= length
        for offset, size, length in zip(piece.offsets, piece.shape, shape, strict=True)
    )


def _first_index(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index in the full tensor at which this rank's part begins."""
    assert isinstance(tensor, DTensor)
    # The protocol of torch.distributed.checkpoint.
    return tuple(tensor.__create_chunk_list__()[0].offsets)
