"""Checkpoints: saved aside, committed by rename, verified before anything of them is used.

A folder is a checkpoint when its manifest is there and every file agrees with it. That one predicate, `problems`,
answers for loading, for retention and for `optrun verify`. Everything is safetensors and JSON; no pickle is read or
written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import commit_folder, remove_folder, replace_text, write_bytes
from optrun.artifacts.metrics import from_json, to_json
from optrun.artifacts.run_dir import RunDir, parse_step, step_name
from optrun.errors import CheckpointError, StorageError

FORMAT = 1
_CONTENT = (names.CHECKPOINT_MODEL, names.CHECKPOINT_OPTIMIZER, names.CHECKPOINT_STATE)
_MANIFEST_LIMIT = 64 * 2**20
_TEMPORARY = ".saving-"


@dataclass
class Snapshot:
    """Everything the next step depends on."""

    global_step: int
    model: dict[str, torch.Tensor]
    """Weights and buffers by name; a tied tensor stands under one name only."""
    optimizer: dict[str, torch.Tensor]
    """`<parameter name>/<state key>` to tensor."""
    state: dict[str, Any]
    """Counters, schedule, random states, configuration; plain values."""


def save_checkpoint(run: RunDir, snapshot: Snapshot) -> Path:
    """Write one checkpoint; it exists from the moment of a single rename.

    Args:
        run: The run directory; the lock on it must be held.
        snapshot: What to write; tensors on any device.

    Returns:
        The committed folder. A checkpoint of this step that is there already and whole is left as it is.

    Raises:
        StorageError: The disk refused; older checkpoints are untouched and the unfinished folder is gone.
    """
    place = run.checkpoint(snapshot.global_step)
    if place.exists():
        if not problems(place):
            return place
        set_aside(place)
    aside = run.checkpoints / f"{_TEMPORARY}{place.name}-{os.getpid()}"
    try:
        run.checkpoints.mkdir(exist_ok=True)
        aside.mkdir()
        contents = {
            names.CHECKPOINT_MODEL: save(_portable(snapshot.model)),
            names.CHECKPOINT_OPTIMIZER: save(_portable(snapshot.optimizer)),
            names.CHECKPOINT_STATE: json.dumps(to_json(snapshot.state), allow_nan=False).encode(),
        }
        for name, content in contents.items():
            write_bytes(aside / name, content)
        manifest = {
            "format": FORMAT,
            "step": snapshot.global_step,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": [
                {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in contents.items()
            ],
            "tensors": {
                names.CHECKPOINT_MODEL: _describe(snapshot.model),
                names.CHECKPOINT_OPTIMIZER: _describe(snapshot.optimizer),
            },
        }
        write_bytes(aside / names.CHECKPOINT_MANIFEST, json.dumps(manifest, indent=1).encode())
        commit_folder(aside, place)
        replace_text(run.last, place.name + "\n")
    except OSError as error:
        _discard(aside)
        raise StorageError(
            f"{place}: the checkpoint could not be saved: {error.strerror or error}. Older checkpoints are untouched; "
            "make room, then go on with resume=" + str(run.path)
        ) from error
    except BaseException:
        _discard(aside)
        raise
    return place


def _discard(aside: Path) -> None:
    if aside.exists():
        remove_folder(aside)


def _portable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors that share no memory, as safetensors wants them."""
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": tensor_digest(tensor),
        }
        for name, tensor in tensors.items()
    }


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 over a tensor's bytes, row by row; hexadecimal."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, torn, of another format, or names files outside the folder.
    """
    path = folder / names.CHECKPOINT_MANIFEST
    if not path.is_file() or path.is_symlink():
        raise CheckpointError(f"{path}: missing: this folder is no complete checkpoint.")
    if path.stat().st_size > _MANIFEST_LIMIT:
        raise CheckpointError(f"{path}: larger than {_MANIFEST_LIMIT:,} bytes: no manifest of optrun's.")
    try:
        manifest = json.loads(path.read_bytes())
        listed = {entry["name"]: (int(entry["size"]), str(entry["sha256"])) for entry in manifest["files"]}
        step, version = int(manifest["step"]), int(manifest["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__} while reading it.") from error
    if version != FORMAT:
        raise CheckpointError(f"{path}: format {version}, this optrun reads format {FORMAT}.")
    if set(listed) != set(_CONTENT):
        raise CheckpointError(f"{path}: names {', '.join(sorted(listed))}; expected {', '.join(_CONTENT)}.")
    manifest["listed"] = listed
    manifest["step"] = step
    return dict(manifest)


def problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file; an empty list means it is whole."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    found = []
    named = parse_step(folder.name)
    if named is not None and named != manifest["step"]:
        found.append(f"{folder}: the folder says step {named}, its manifest step {manifest['step']}.")
    for name, (size, checksum) in manifest["listed"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            found.append(f"{path}: missing.")
        elif path.stat().st_size != size:
            found.append(f"{path}: {path.stat().st_size:,} bytes, {size:,} expected.")
        elif _file_digest(path) != checksum:
            found.append(f"{path}: its bytes changed since it was written (checksum differs).")
    return found


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_checkpoint(folder: Path) -> Snapshot:
    """Read a checkpoint, everything verified first.

    Returns:
        The snapshot, tensors on the CPU.

    Raises:
        CheckpointError: It is not whole; the message names the file.
    """
    wrong = problems(folder)
    if wrong:
        raise CheckpointError(wrong[0])
    state = json.loads((folder / names.CHECKPOINT_STATE).read_bytes())
    return Snapshot(
        global_step=int(state["global_step"]),
        model=load((folder / names.CHECKPOINT_MODEL).read_bytes()),
        optimizer=load((folder / names.CHECKPOINT_OPTIMIZER).read_bytes()),
        state=state,
    )


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` alone, for what needs no tensors.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    try:
        return dict(json.loads((folder / names.CHECKPOINT_STATE).read_bytes()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / names.CHECKPOINT_STATE}: cannot be read: {error}") from error


def checkpoint_folders(run: RunDir) -> list[Path]:
    """Folders named as checkpoints, newest step first; whole or not."""
    if not run.checkpoints.is_dir():
        return []
    found = [
        (step, path)
        for path in run.checkpoints.iterdir()
        if (step := parse_step(path.name)) is not None and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def latest_whole(run: RunDir) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with the newer ones."""
    said: list[str] = []
    for folder in checkpoint_folders(run):
        wrong = problems(folder)
        if not wrong:
            return folder, said
        said += wrong
    return None, said


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint so that it is in nobody's way and still there to be looked at."""
    number = 1
    while (place := folder.with_name(f"{why}-{folder.name}-{number}")).exists():
        number += 1
    folder.rename(place)
    return place


def clean_leftovers(run: RunDir) -> list[str]:
    """Remove what a killed save or deletion left behind; the lock must be held.

    Returns:
        Names of the removed folders.
    """
    if not run.checkpoints.is_dir():
        return []
    removed = []
    for path in run.checkpoints.iterdir():
        if path.name.startswith((_TEMPORARY, ".deleting-")) and path.is_dir() and not path.is_symlink():
            remove_folder(path)
            removed.append(path.name)
    return removed


def retain(run: RunDir, *, keep_last: int, best: list[int]) -> list[Path]:
    """Delete checkpoints that are neither among the newest nor among the best.

    Args:
        run: The run directory.
        keep_last: How many of the newest whole ones stay, 1 or more.
        best: Steps that stay because of their metric.

    Returns:
        The deleted folders. Folders that are not whole are left alone: they are nobody's to delete unseen.
    """
    keep = set(best)
    folders = [folder for folder in checkpoint_folders(run) if (folder / names.CHECKPOINT_MANIFEST).is_file()]
    deleted = []
    for rank, folder in enumerate(folders):
        step = parse_step(folder.name)
        if rank >= keep_last and step not in keep:
            remove_folder(folder)
            deleted.append(folder)
    return deleted


def point_best(run: RunDir, global_step: int) -> None:
    """Let `checkpoints/best` say which one is best."""
    replace_text(run.best, step_name(global_step) + "\n")


def pointed(pointer: Path) -> Path | None:
    """The checkpoint that `best` or `last` names; None where it names none that is there."""
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = pointer.parent / name
    return folder if parse_step(name) is not None and folder.is_dir() else None


def plain_numbers(section: Any) -> Any:
    """A section of `state.json` with its non-finite numbers as numbers again."""
    return from_json(section)
