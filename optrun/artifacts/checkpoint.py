"""Checkpoints: saved aside, committed by rename, verified before anything of them is used.

Everything is safetensors and JSON; no pickle is read or written. What a whole checkpoint is stands in `manifest`, which
ones are kept in `retention`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import Output, commit_folder, remove_folder, replace_text, sync_folder, write_bytes
from optrun.artifacts.manifest import make_manifest, problems, read_manifest, refuse_newer_format
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import to_json
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import first_not_finite, read_tensors, tensor_digest, write_tensors
from optrun.errors import CheckpointError, NonFiniteError, StorageError

TEMPORARY = ".saving-"
REPLACED = ".replaced-"
MARGIN = 2**20
"""Room left for the manifest, folders and metrics."""


@dataclass
class Snapshot:
    """Everything the next step depends on."""

    global_step: int
    model: dict[str, torch.Tensor]
    """Weights and buffers by name; a tied tensor stands under one name only."""
    optimizer: dict[str, torch.Tensor]
    """`<parameter name>/<state key>` to tensor."""
    metadata: CheckpointMetadata
    """Counters, schedule, random states, configuration."""
    finite: Sequence[str] = ()
    """Names in `model` that may hold neither NaN nor infinity."""
    digests: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Of a loaded one: file name to tensor name to `dtype`, `shape`, `xxh3` from its manifest."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for tensors in (self.model, self.optimizer) for t in tensors.values())


def save_checkpoint(run: RunDir, snapshot: Snapshot, before_commit: Callable[[], None] | None = None) -> Path:
    """Write one checkpoint; it exists from the moment of a single rename.

    Args:
        run: The run directory; the lock on it must be held.
        snapshot: What to write; tensors on any device.
        before_commit: Called when everything is written, before the rename.

    Returns:
        The committed folder. A checkpoint of this step that is there already, whole and of the same counters, is left
        as it is; one that was saved before the end of its step is replaced, and back in its place at the next start
        should this one be killed in between.

    Raises:
        StorageError: The disk refused or has no room; older checkpoints are untouched, the unfinished folder is gone.
        NonFiniteError: A weight holds NaN or infinity, or the optimizer's state NaN; nothing was written.
    """
    refuse_not_finite(snapshot)
    folder = run.checkpoint(snapshot.global_step)
    aside = run.checkpoints / f"{TEMPORARY}{folder.name}-{os.getpid()}"
    try:
        if folder.exists():
            if problems(folder, snapshot.metadata.run_id):
                refuse_newer_format(folder)
                set_aside(folder)
            elif _same_counters(folder, snapshot):
                return folder
        free = shutil.disk_usage(run.checkpoints).free
        if free < snapshot.size + MARGIN:
            raise StorageError(
                f"{folder}: not saved: it needs {snapshot.size + MARGIN:,} bytes, {free:,} are free. Older checkpoints "
                "are untouched; make room."
            )
        if aside.is_dir() and not aside.is_symlink():
            remove_folder(aside)
        aside.mkdir()
        _write(aside, snapshot)
        if before_commit is not None:
            before_commit()
        replaced = folder.with_name(f"{REPLACED}{folder.name}") if folder.exists() else None
        if replaced is not None:
            os.rename(folder, replaced)  # noqa: PTH104
        commit_folder(aside, folder)
        if replaced is not None:
            remove_folder(replaced)
        replace_text(run.last, folder.name + "\n")
    except OSError as error:
        _discard(aside, folder)
        raise StorageError(
            f"{folder}: the checkpoint could not be saved: {error.strerror or error}. Older checkpoints are untouched; "
            f"{_room(run, snapshot)}, then go on with resume={run.path}"
        ) from error
    except BaseException:
        _discard(aside, folder)
        raise
    return folder


def _same_counters(folder: Path, snapshot: Snapshot) -> bool:
    """Whether a checkpoint on the disk says the same as a snapshot, but for the clock."""

    def counters(state: Mapping[str, Any]) -> dict[str, Any]:
        train = {key: value for key, value in state.get("train", {}).items() if key not in ("seconds", "last")}
        return {"train": train, "callbacks": state.get("callbacks"), "stop": state.get("stop")}

    return counters(read_state(folder)) == counters(to_json(snapshot.metadata.to_dict()))


def _write(aside: Path, snapshot: Snapshot) -> None:
    """All files of a checkpoint, the manifest last."""
    files, tensors = {}, {}
    for name, content in ((names.CHECKPOINT_MODEL, snapshot.model), (names.CHECKPOINT_OPTIMIZER, snapshot.optimizer)):
        written = write_tensors(aside / name, content)
        files[name] = (written.size, written.sha256)
        tensors[name] = written.tensors
    text = json.dumps(to_json(snapshot.metadata.to_dict()), allow_nan=False).encode()
    with Output(aside / names.CHECKPOINT_STATE, exclusive=True) as file:
        file.write(text)
        file.sync()
    files[names.CHECKPOINT_STATE] = (len(text), hashlib.sha256(text).hexdigest())
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    digest = snapshot.metadata.config_digest or ""
    manifest = make_manifest(snapshot.global_step, created_at, files, tensors, digest, snapshot.metadata.run_id)
    write_bytes(aside / names.CHECKPOINT_MANIFEST, manifest)


def _room(run: RunDir, snapshot: Snapshot) -> str:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(run.path).free
        return f"it takes {snapshot.size + MARGIN:,} bytes, {free:,} are free: make room"
    return "make room"


def _discard(aside: Path, folder: Path) -> None:
    replaced = folder.with_name(f"{REPLACED}{folder.name}")
    with contextlib.suppress(OSError):  # what cannot be done now is done before the next save, or at the next start
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        if aside.is_dir():
            remove_folder(aside)


def refuse_not_finite(snapshot: Snapshot) -> None:
    """A checkpoint with such numbers would end every run that goes on from it.

    Raises:
        NonFiniteError: Naming the first tensor.
    """
    if not snapshot.finite:
        return
    name = first_not_finite({name: snapshot.model[name] for name in snapshot.finite})
    name = name or first_not_finite(snapshot.optimizer, infinite=False)
    if name is not None:
        raise NonFiniteError(
            f"step {snapshot.global_step}: {name} holds NaN or infinity after the update, so this state was not saved. "
            "Older checkpoints are untouched."
        )


def make_checkpoints_dir(run: RunDir) -> None:
    """The folder of checkpoints, on the disk for good; made once, before the first step.

    Raises:
        StorageError: The disk refused, or a link stands there.
    """
    if run.checkpoints.is_symlink():
        raise StorageError(f"{run.checkpoints}: a link: a run writes nothing outside of its own directory.")
    try:
        run.checkpoints.mkdir(exist_ok=True)
        sync_folder(run.path)
    except OSError as error:
        raise StorageError(f"{run.checkpoints}: cannot be made: {error.strerror or error}.") from error


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
    manifest = read_manifest(folder)
    path = folder / names.CHECKPOINT_STATE
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != manifest["listed"][names.CHECKPOINT_STATE][1]:
        raise CheckpointError(f"{path}: its bytes change while it is read.")
    state = _parsed(path, text)
    if state.get("global_step") != manifest["step"]:
        raise CheckpointError(f"{path}: step {state.get('global_step')}, the manifest says {manifest['step']}.")
    optimizer = read_tensors(folder / names.CHECKPOINT_OPTIMIZER)
    try:
        metadata = CheckpointMetadata.from_dict(state, optimizer)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}. Its checksums are right, but no run saved this.") from error
    return Snapshot(
        global_step=manifest["step"],
        model=read_tensors(folder / names.CHECKPOINT_MODEL),
        optimizer=optimizer,
        metadata=metadata,
        digests=manifest["tensors"],
    )


def refuse_mutated(file: str, saved: dict[str, dict[str, Any]], now: dict[str, torch.Tensor]) -> None:
    """After loading: is what stands in memory what was saved?

    Args:
        file: Which of a checkpoint's files, for the message.
        saved: Name to `xxh3`, from the manifest; None in its first format.
        now: Name to the tensor in use.

    Raises:
        CheckpointError: Naming the first tensor that differs.
    """
    for name, entry in saved.items():
        if name not in now:
            raise CheckpointError(f"{file}: tensor {name} was read and is not in use: nothing is trained on this.")
        if entry["xxh3"] not in (None, tensor_digest(now[name])):
            raise CheckpointError(
                f"{file}: tensor {name} differs in memory from what it is in the checkpoint (checksum, after loading): "
                "nothing is trained on this."
            )


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` alone, for what needs no tensors.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path = folder / names.CHECKPOINT_STATE
    try:
        return _parsed(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}.") from error


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint so that it is in nobody's way and still there to be looked at."""
    number = 1
    while (aside := folder.with_name(f"{why}-{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
