"""Checkpoints: saved in a temporary folder, committed by rename, verified before use.

Everything is safetensors and JSON; no pickle is read or written. `manifest` defines a complete
checkpoint, and `retention` decides how many are kept. If tensors are divided among ranks, each rank
writes its shard into the same temporary folder (`sharded`), and rank 0 commits the folder when it
has the checksums of all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import (
    MARGIN,
    commit_folder,
    refuse_without_room,
    remove_folder,
    replace_text,
    sync_folder,
)
from optrun.artifacts.checkpoint_files import (
    Sections,
    refuse_disagreement,
    write_content,
    write_manifest,
)
from optrun.artifacts.checksum import Entry
from optrun.artifacts.manifest import problems, read_manifest, refuse_other_format
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import to_json
from optrun.artifacts.ranks import call_on_first, gather_results, rank_of
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.sharded import StoredTensors
from optrun.artifacts.tensor_file import first_not_finite
from optrun.base.errors import CheckpointError, NonFiniteError, StorageError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.base.reading import parse_json, read_bytes

TEMPORARY = ".saving-"
REPLACED = ".replaced-"


@dataclass
class Snapshot:
    """Everything on which the next step depends: tensors and metadata."""

    global_step: int
    model: Mapping[str, torch.Tensor]
    """Weights and buffers by name; a tied tensor stands under one name only.

    To be saved by several ranks: on the CPU, a DTensor where it is divided among them.
    """
    optimizer: Mapping[str, torch.Tensor]
    """`<parameter name>/<state key>` to tensor, in the same way."""
    metadata: CheckpointMetadata
    """Everything in a checkpoint but tensors: counters, schedule, random states, configuration."""
    finite: Sequence[str] = ()
    """Names in `model` that may hold neither NaN nor infinity."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.optimizer.values()))


def save_checkpoint(
    run: RunDir,
    snapshot: Snapshot,
    before_commit: Callable[[], None] | None = None,
    saving: ProcessGroup | None = None,
) -> Path:
    """Write one checkpoint, atomically: a single rename makes it exist.

    Args:
        run: The run directory; the first rank must hold its lock.
        snapshot: The content; tensors on any device, but on the CPU if `saving` is given.
        before_commit: Called on the first rank when everything is written, before the rename.
        saving: CPU group of the ranks that save together, each its part of the state; no other
            thread may use it. None: this process holds the whole state.

    Returns:
        The committed folder, on every rank. An existing checkpoint of this step is left as it is if
        it is complete and has the same counters. One saved in the middle of the step is replaced;
        if the process is killed meanwhile, the next start restores it.

    Raises:
        StorageError: The disk refused the write or is full. Older checkpoints are untouched, the
            unfinished folder is deleted. All ranks raise it, with the number of the failing rank.
        NonFiniteError: A weight is NaN or infinite, or the optimizer's state is NaN; nothing was
            written.
        RankLostError: A rank no longer answers; older checkpoints are untouched.
    """
    # 1. Refuse a state that must not be saved; every rank raises if one does.
    gather_results(saving, lambda: refuse_not_finite(snapshot))
    refuse_disagreement(snapshot.global_step, _sections(snapshot), saving)
    folder = run.checkpoint(snapshot.global_step)
    temporary = run.checkpoints / f"{TEMPORARY}{folder.name}-{os.getpid()}"
    try:
        # 2. Write the tensors. All ranks write into the first rank's folder, whose name has the id
        # of its process.
        shared = call_on_first(saving, lambda: _make_temporary_folder(folder, temporary, snapshot))
        if shared is None:
            return folder  # the same checkpoint exists already
        content = write_content(shared, _sections(snapshot), saving)

        # 3. Commit, on the first rank: the manifest, then the rename, then `last`, which may name
        # only a checkpoint that exists.
        def commit() -> None:
            write_manifest(temporary, snapshot.metadata, content)
            if before_commit is not None:
                before_commit()
            _put_in_place(temporary, folder)
            replace_text(run.last, folder.name + "\n")

        call_on_first(saving, commit)
    except OSError as error:
        _discard(temporary, folder, saving)
        raise StorageError(
            f"{folder}: the checkpoint could not be saved: {error.strerror or error}. Older"
            f" checkpoints are untouched; {_advise_on_space(run, snapshot)}, then use"
            f" resume={run.path}"
        ) from error
    except BaseException:
        _discard(temporary, folder, saving)
        raise
    return folder


def _sections(snapshot: Snapshot) -> Sections:
    """Return the tensors of the model and of the optimizer."""
    return snapshot.model, snapshot.optimizer


def _make_temporary_folder(folder: Path, temporary: Path, snapshot: Snapshot) -> Path | None:
    """Create the temporary folder of a checkpoint; None if the same checkpoint exists already.

    A damaged checkpoint of this step is renamed first. One with other counters stays until the new
    one replaces it. A temporary folder that an earlier save left is emptied.

    Args:
        folder: Where the checkpoint will be.
        temporary: The folder to create.
        snapshot: What is to be saved.

    Returns:
        `temporary`, or None.

    Raises:
        StorageError: The disk has no room.
        OSError: The disk refused the write.
    """
    # 1. A checkpoint of this step: rename a damaged one, and keep one that is the same.
    if folder.exists():
        if problems(folder, snapshot.metadata.run_id):
            refuse_other_format(folder)
            set_aside(folder)
        elif _same_counters(folder, snapshot):
            return None
    # 2. An empty folder. A link of its name is not followed: `mkdir` fails.
    refuse_without_room(folder, snapshot.size, "Older checkpoints are untouched; make room.")
    if temporary.is_dir() and not temporary.is_symlink():
        remove_folder(temporary)
    temporary.mkdir()
    return temporary


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a finished temporary folder to its final name; delete an older checkpoint there.

    The older one is renamed first, so that a kill in between loses neither.
    """
    replaced = folder.with_name(f"{REPLACED}{folder.name}")
    is_replacing = folder.exists()
    if is_replacing:
        os.rename(folder, replaced)  # noqa: PTH104
    commit_folder(temporary, folder)
    if is_replacing:
        remove_folder(replaced)


def _same_counters(folder: Path, snapshot: Snapshot) -> bool:
    """Tell whether a checkpoint on disk has the counters and callback states of a snapshot.

    Then both were saved at the same point of training, and with the same weights. Counters are
    `train` (steps, examples, tokens, metrics, sums since the last log line). Two of its entries do
    not count, because they may differ for the same weights: `seconds`, since a resumed run has
    trained for another time, and `last`, since the end of a run evaluates more.
    """

    def counters(state: PlainMapping) -> PlainDict:
        train = {
            key: value
            for key, value in state.get("train", {}).items()
            if key not in ("seconds", "last")
        }
        return {"train": train, "callbacks": state.get("callbacks"), "stop": state.get("stop")}

    return counters(read_state(folder)) == counters(to_json(snapshot.metadata.to_dict()))


def _advise_on_space(run: RunDir, snapshot: Snapshot) -> str:
    """Write the request to make room, with needed and free bytes if the latter are known."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(run.path).free
        return f"it takes {snapshot.size + MARGIN:,} bytes, {free:,} are free: make room"
    return "make room"


def _discard(temporary: Path, folder: Path, saving: ProcessGroup | None) -> None:
    """Delete the leftovers of a failed save and restore what it replaced.

    Other ranks than the first do nothing. Errors of the disk are ignored: the next save or the next
    start of the run cleans up.

    Args:
        temporary: The unfinished folder.
        folder: Where the checkpoint would be; an older one may have been renamed to make room.
        saving: Ranks that save together.
    """
    if rank_of(saving) != 0:
        return
    replaced = folder.with_name(f"{REPLACED}{folder.name}")
    with contextlib.suppress(OSError):
        # `_put_in_place` was interrupted between its two renames.
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        if temporary.is_dir():
            remove_folder(temporary)


def refuse_not_finite(snapshot: Snapshot) -> None:
    """Refuse a snapshot with NaN or infinite weights, or NaN in the optimizer's state.

    They would end every run that continues from the checkpoint. Only the weights in
    `snapshot.finite` are checked; if it is empty, so that none is expected to be finite, nothing
    is. Infinities in the optimizer's state pass.

    Raises:
        NonFiniteError: The message names the first such tensor.
    """
    if not snapshot.finite:
        return
    # The name of the first such tensor; None: there is none.
    name = first_not_finite({name: snapshot.model[name] for name in snapshot.finite})
    name = name or first_not_finite(snapshot.optimizer, infinite=False)
    if name is not None:
        raise NonFiniteError(
            f"step {snapshot.global_step}: {name} holds NaN or infinity after the update, so this"
            " state was not saved. Older checkpoints are untouched."
        )


def make_checkpoints_dir(run: RunDir) -> None:
    """Create the folder of checkpoints and flush it; called once, before the first step.

    Raises:
        StorageError: The disk refused the write, or the path is a link.
    """
    if run.checkpoints.is_symlink():
        raise StorageError(
            f"{run.checkpoints}: a link: a run writes nothing outside of its own directory."
        )
    try:
        run.checkpoints.mkdir(exist_ok=True)
        sync_folder(run.path)
    except OSError as error:
        raise StorageError(
            f"{run.checkpoints}: cannot be made: {error.strerror or error}."
        ) from error


def load_checkpoint(folder: Path, *, lazy: bool = False) -> Snapshot:
    """Verify and read a checkpoint, sharded or not.

    Args:
        folder: The checkpoint, written by any number of ranks.
        lazy: Leave the tensors in their files until they are used.

    Raises:
        CheckpointError: The checkpoint is damaged; the message names the file.
    """
    wrong = problems(folder)
    if wrong:
        raise CheckpointError(wrong[0])
    return open_verified(folder, lazy=lazy)


def open_verified(folder: Path, *, lazy: bool) -> Snapshot:
    """Read a checkpoint that this rank or another one has just verified.

    The bytes of tensors are not checked again.

    Args:
        folder: The checkpoint.
        lazy: Leave the tensors in their files until they are used.

    Raises:
        CheckpointError: A file changes while it is read, or is deleted.
    """
    manifest = read_manifest(folder)
    path = folder / names.CHECKPOINT_STATE
    text, state = _read(path)
    # This file is read for a second time, so it is compared once more.
    if Entry.of(text) != manifest.files[names.CHECKPOINT_STATE]:
        raise CheckpointError(f"{path}: its bytes change while it is read.")
    if state.get("global_step") != manifest.step:
        raise CheckpointError(
            f"{path}: step {state.get('global_step')}, the manifest says {manifest.step}."
        )
    # Two sections, the model first. Nothing is read but headers.
    model, optimizer = [
        StoredTensors([folder / file for file in files], manifest.tensors[section])
        for section, files in manifest.sections.items()
    ]
    snapshot = Snapshot(manifest.step, model, optimizer, CheckpointMetadata.from_dict(state))
    if lazy:
        return snapshot
    return replace(snapshot, model=dict(model), optimizer=dict(optimizer))


def read_local_parts(snapshot: Snapshot, params: Mapping[str, torch.Tensor]) -> Snapshot:
    """Read this rank's part of each tensor of a checkpoint.

    No rank holds the full state.

    Args:
        snapshot: A snapshot that was loaded lazily; it stays as it is.
        params: Name -> parameter or buffer of the model, in memory. A weight is sharded as the
            parameter of its name, and optimizer state `NAME/KEY` as parameter NAME, if the shapes
            are equal; all other tensors are read in full.

    Returns:
        A copy of the snapshot with the tensors in memory, in the dtypes of the file: a DTensor
        where the parameter is one, else a plain tensor.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    sections: list[dict[str, torch.Tensor]] = []
    for stored in _sections(snapshot):
        assert isinstance(stored, StoredTensors), "load it with lazy=True"
        tensors = {}
        for name in stored:
            # Optimizer state, as `encoder.weight/exp_avg`, is cut as its parameter is. What has no
            # parameter is read in full.
            param_name = name if name in params else name.partition("/")[0]
            tensors[name] = stored.read(name, params.get(param_name))
        sections.append(tensors)
    model, optimizer = sections
    return replace(snapshot, model=model, optimizer=optimizer)


def read_state(folder: Path) -> PlainDict:
    """Read `state.json` alone, without the tensors.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    return _read(folder / names.CHECKPOINT_STATE)[1]


def _read(path: Path) -> tuple[bytes, PlainDict]:
    """Read a JSON object as bytes, for its checksum, and as values.

    Raises:
        CheckpointError: The file is missing, or holds no JSON object.
    """
    try:
        text = read_bytes(path)
        return text, dict(parse_json(text, path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except TypeError as error:
        raise CheckpointError(f"{path}: expected a JSON object.") from error


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint so that nothing uses it, and keep it for inspection.

    `step-00000100` becomes `damaged-step-00000100-1`, or `-2` and so on if that name is taken.

    Args:
        folder: The checkpoint.
        why: First word of the new name.

    Returns:
        The new path.
    """
    for number in count(1):
        renamed = folder.with_name(f"{why}-{folder.name}-{number}")
        if not renamed.exists():
            break
    folder.rename(renamed)
    return renamed
