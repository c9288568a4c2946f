"""Write the files of a checkpoint into its temporary folder, by one process or several ranks."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import Output, sync_folder, write_bytes
from optrun.artifacts.checksum import Entry, TensorEntry
from optrun.artifacts.manifest import (
    FORMAT,
    SHARD_FOLDERS,
    TENSOR_FILES,
    checksummed_text,
    refuse_larger,
)
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import to_json
from optrun.artifacts.ranks import gather_results, size_of
from optrun.artifacts.sharded import mesh_of, write_shards
from optrun.artifacts.tensor_file import describe, write_tensors
from optrun.base.errors import OptrunError

Sections = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Tensors of the model and of the optimizer, by name."""


@dataclass(frozen=True)
class Content:
    """The manifest's entries about tensors."""

    files: dict[str, Entry]
    tensors: dict[str, dict[str, TensorEntry]]
    """By section, as in `CheckpointManifest`."""
    ranks: dict[str, object] | None = None
    """`world_size` and `mesh`; None: one process wrote it."""


def write_content(temporary: Path, sections: Sections, saving: ProcessGroup | None) -> Content:
    """Write all tensors of a checkpoint, flushed to the disk.

    Args:
        temporary: The temporary folder, shared by all ranks.
        sections: Tensors by section; with several ranks, this rank's part.
        saving: Ranks that write together, as for `save_checkpoint`.

    Returns:
        The entries of all ranks, on every rank.

    Raises:
        OSError: The disk of one rank refused the write; every rank raises.
        OptrunError: A rank failed otherwise; every rank raises.
    """
    if saving is not None:
        return _write_sharded(temporary, sections, saving)
    # Two files, `model.safetensors` and `optimizer.safetensors`.
    files = {
        name: write_tensors(temporary / name, part)
        for name, part in zip(TENSOR_FILES, sections, strict=True)
    }
    return Content(files, dict(zip(TENSOR_FILES, _described(sections), strict=True)))


def _write_sharded(temporary: Path, sections: Sections, saving: ProcessGroup) -> Content:
    """Write this rank's shards of all sections, flushed; return the entries of all ranks.

    Every rank must call it. A rank writes at most one file in each of the folders `model/` and
    `optimizer/`.

    Returns:
        The same on every rank. Its files are sorted by path, and its mesh is that of the model.
    """
    # 1. This rank's files: one shard in each folder, or none if other ranks write all of it.
    rank_files: dict[str, Entry] = {}
    for folder, part in zip(SHARD_FOLDERS, sections, strict=True):
        shards = write_shards(temporary / folder, part, saving)
        rank_files |= {f"{folder}/{name}": entry for name, entry in shards.items()}

    # 2. `write_shards` has flushed the files; now their folders. A disk may refuse on one rank
    # alone, so every rank hears of it when the entries are gathered.
    def flush_folders() -> dict[str, Entry]:
        for folder in SHARD_FOLDERS:
            sync_folder(temporary / folder)
        return rank_files

    files: dict[str, Entry] = {}
    for written in gather_results(saving, flush_folders):
        files |= written
    # 3. The entries of all ranks. The full shapes are known to each of them.
    tensors = dict(zip(SHARD_FOLDERS, _described(sections), strict=True))
    return Content(
        dict(sorted(files.items())),
        tensors,
        {"world_size": size_of(saving), "mesh": mesh_of(sections[0])},
    )


def _described(sections: Sections) -> list[dict[str, TensorEntry]]:
    """Describe the tensors of each section: name -> dtype and shape."""
    return [{name: describe(tensor) for name, tensor in section.items()} for section in sections]


def refuse_disagreement(global_step: int, sections: Sections, saving: ProcessGroup | None) -> None:
    """Refuse ranks with different steps or tensors to save.

    Their checkpoint would hold a state of the run that never existed. Compared are the step and the
    name, dtype and full shape of each tensor, not the values.

    Args:
        global_step: The step that this rank saves.
        sections: Its tensors.
        saving: Ranks that save together; None: this process alone, with nothing to compare.

    Raises:
        OptrunError: Raised on every rank; the message names the first rank that differs from rank
            0.
    """
    if saving is None:
        return

    def summary() -> tuple[int, int, str]:
        text = json.dumps(_described(sections), sort_keys=True)
        # Step, number of tensors, and a digest of their names, dtypes and shapes.
        return global_step, sum(map(len, sections)), hashlib.sha256(text.encode()).hexdigest()

    first, *further = gather_results(saving, summary)
    for rank, rank_summary in enumerate(further, start=1):
        if rank_summary != first:
            raise OptrunError(
                f"not saved: rank 0 saves step {first[0]} with {first[1]} tensors, rank {rank} step"
                f" {rank_summary[0]} with {rank_summary[1]}; names, dtypes and shapes"
                " have to be the same."
            )


def write_manifest(temporary: Path, metadata: CheckpointMetadata, content: Content) -> None:
    """Write the metadata of a checkpoint beside its tensors, the manifest last.

    Args:
        temporary: The temporary folder; `state.json` and `manifest.json` are new in it.
        metadata: Becomes `state.json`; the manifest repeats run, step and digest of the config.
        content: What the manifest says of the tensors.

    Raises:
        OSError: The disk refused the write.
        ValueError: One of the two files would be too large to be read back.
    """
    # 1. `state.json`.
    text = json.dumps(to_json(metadata.to_dict()), allow_nan=False).encode()
    refuse_larger(text, names.CHECKPOINT_STATE)
    with Output(temporary / names.CHECKPOINT_STATE, exclusive=True) as file:
        file.write(text)
        file.sync()
    # 2. `manifest.json`. It has a checksum of every file, so it is the last one.
    facts = {
        "run_id": metadata.run_id,
        "step": metadata.global_step,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config_digest": metadata.config_digest or "",
        **(content.ranks or {}),
        "tensors": content.tensors,
    }
    manifest = checksummed_text(
        FORMAT, facts, {**content.files, names.CHECKPOINT_STATE: Entry.of(text)}
    )
    refuse_larger(manifest, names.CHECKPOINT_MANIFEST)
    write_bytes(temporary / names.CHECKPOINT_MANIFEST, manifest)
