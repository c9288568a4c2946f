"""Pick the checkpoint to resume from, and rename damaged ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import Snapshot, open_verified, set_aside
from optrun.artifacts.forks import Trunk, reading
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import refuse_foreign, refuse_other_format
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.metrics import read_metrics, try_read_summary
from optrun.artifacts.retention import clean_leftovers, step_of
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, read_pointer
from optrun.artifacts.tensor_file import first_not_finite
from optrun.base.errors import CheckpointError, ConfigError, ForeignCheckpointError, StorageError
from optrun.base.reading import kind_of
from optrun.config.original_cwd import original_cwd
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.run import RunConfig
from optrun.runner.resume.state_file import read_checkpoint

if TYPE_CHECKING:
    from optrun.runner.run_start import RunStart


@dataclass
class ResumePoint:
    """The run and checkpoint of `resume=`."""

    checkpoint: Path | None
    """The checkpoint that the user named; None: the newest undamaged one."""
    started_from: Path | None = None
    """Folder that the run was started from, for relative paths of its configuration; None: the
    current one."""
    saved: bool = True
    """Whether the run saved checkpoints before this start. If they were removed, checkpoint=none
    does not let it start over."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on the configuration that was read."""


@dataclass
class OpenedCheckpoint:
    """The checkpoint to continue from, and the skipped ones."""

    snapshot: Snapshot | None = None
    """None: the run begins at step 0."""
    folder: Path | None = None
    """Folder of the snapshot."""
    trunk: Trunk | None = None
    """The same checkpoint, if it is of another run, from which this one branches."""
    started_from: Path | None = None
    """Folder that relative paths of the saved configuration start from; None: the current one."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""
    skipped: dict[Path, str] = field(default_factory=dict)
    """Skipped checkpoints -> reason: `damaged`, `superseded` by new steps, or `foreign` (of another
    run)."""

    @property
    def saved(self) -> CheckpointMetadata | None:
        """Metadata of the snapshot."""
        if self.snapshot is None:
            return None
        return self.snapshot.metadata

    def set_aside_skipped(self) -> list[str]:
        """Rename the skipped checkpoints, when the run is sure to continue.

        The files `best` and `last` are deleted if they name one of them or nothing; the next save
        writes them anew.

        Returns:
            A note for the user on each, such as "step-00000100 was renamed to
            damaged-step-00000100-1".
        """
        notes = []
        for folder, why in self.skipped.items():
            for pointer in (folder.with_name(names.BEST), folder.with_name(names.LAST)):
                # None: it names no folder that exists.
                if pointer.is_file() and read_pointer(pointer) in (folder, None):
                    pointer.unlink()
            notes.append(f"{folder.name} was renamed to {set_aside(folder, why).name}")
        return notes


@contextmanager
def open_checkpoint_to_resume(
    run_start: RunStart, resume: ResumePoint | None
) -> Iterator[OpenedCheckpoint]:
    """Open the checkpoint to resume from, or the parent checkpoint of a new branch.

    For any other new run the yielded object has no snapshot. Rank 0 picks and verifies the
    checkpoint, and writes the configuration of a new run; then the other ranks read the same
    checkpoint. A parent checkpoint is protected from deletion during the block.

    Args:
        run_start: The start of the run; its lock is held.
        resume: The run and checkpoint of `resume=`; None: a new run.

    Yields:
        The checkpoint with its snapshot, the same on every rank.

    Raises:
        ConfigError: As `open_checkpoint`.
        CheckpointError: As `open_checkpoint`; or the parent checkpoint is gone, damaged or changed.
    """
    world = run_start.world
    with ExitStack() as locks:
        # If rank 0 finds no checkpoint to go on with, all ranks raise.
        opened = world.call_on_all(
            lambda: (
                _pick_checkpoint(run_start, resume, locks) if world.is_main else OpenedCheckpoint()
            )
        )
        # Other ranks read what rank 0 has verified.
        folder, trunk, started_from = world.broadcast(
            (opened.folder, opened.trunk, opened.started_from)
        )
        if folder is not None and not world.is_main:
            if trunk is not None:
                locks.enter_context(reading(trunk.folder))
            opened = OpenedCheckpoint(
                open_verified(folder, lazy=_is_lazy(run_start.config)), folder, trunk, started_from
            )
        yield opened


def _pick_checkpoint(
    run_start: RunStart, resume: ResumePoint | None, locks: ExitStack
) -> OpenedCheckpoint:
    """Pick and read the checkpoint that training begins from; on rank 0.

    What a killed process left in the run directory is removed first. `config.yaml` is written if
    the run begins anew.

    Args:
        run_start: The start of the run; its lock is held.
        resume: The run and checkpoint of `resume=`; None: a new run.
        locks: Gets the lock of a parent checkpoint.

    Returns:
        The checkpoint to resume from; else the parent checkpoint of a branch; else without a
        snapshot.
    """
    # 0. Clean up, so that a checkpoint that was about to be replaced has its name again.
    config = run_start.config
    for name in clean_leftovers(run_start.run):
        run_start.display.note(
            f"{name} was removed: left by a process that was killed while it wrote"
        )
    trunk = Trunk.parse(config.branch_from)  # None: this run is no branch
    # 1. A run to resume, a branch too. It has no snapshot if it ended before its first save.
    opened = OpenedCheckpoint()
    if resume is not None:
        opened = open_checkpoint(
            run_start.run,
            resume,
            config,
            "step 0" if trunk is None else f"its trunk {trunk.folder}",
        )
        for note in (*resume.notes, *opened.notes):
            run_start.display.note(note)
    if opened.snapshot is not None:
        return opened
    # 2. A branch at its first step. The lock keeps the parent checkpoint on disk; `require` refuses
    # it if its content is no longer what `branch_from` names.
    if trunk is not None:
        locks.enter_context(reading(trunk.folder))
        trunk.require()
        started_from = original_cwd(RunDir(trunk.folder.parent.parent).hydra)
        opened = OpenedCheckpoint(
            _load_usable(trunk.folder, config), trunk.folder, trunk, started_from
        )
    # 3. A new run, or one that starts over. If it is killed before its first step, it can be
    # restarted from this file.
    run_start.write_config()
    return opened


def refuse_links(run: RunDir) -> None:
    """Refuse links and special files, so that a run writes only inside its directory.

    Files and folders that a run does not write are left alone, and so are those in `checkpoints/`,
    because links among them are never followed. The library of a tracker may link to files inside
    the run directory, and have special files.

    Raises:
        StorageError: One of the run's files or folders is a link or no regular file.
    """
    inside = run.path.resolve()
    for folder, folders, files in os.walk(run.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            # 1. Whose file or folder it lies in, by the name at the top.
            top = path.relative_to(run.path).parts[0]
            if not names.is_written(top):
                continue
            by_tracker = names.is_of_tracker(top)
            # 2. A link; one of a tracker may stay inside.
            if path.is_symlink():
                if by_tracker and path.resolve().is_relative_to(inside):
                    continue
                raise StorageError(
                    f"{path}: a link; a run writes only inside its own directory. Remove the link."
                )
            # 3. A special file; `kind_of` returns None for a regular one.
            kind = None if path.is_dir() else kind_of(path)
            if kind is not None and not by_tracker:
                raise StorageError(
                    f"{path}: {kind}; expected a regular file, which this run writes. Remove it."
                )
        # `os.walk` enters the folders that are left in its list.
        folders[:] = [name for name in folders if Path(folder, name) != run.checkpoints]


def refuse_other_formats(run: RunDir) -> None:
    """Refuse a run of a newer optrun before anything in it is moved or rewritten.

    Raises:
        OtherFormatError: A newer optrun wrote one of its checkpoints.
    """
    for folder in checkpoint_folders(run):
        refuse_other_format(folder)


def open_checkpoint(
    run: RunDir, resume: ResumePoint, config: RunConfig, first: str
) -> OpenedCheckpoint:
    """Pick the checkpoint to resume from and read it, without changing the disk.

    In this order: the checkpoint that `resume=` names; the newest of the run that is undamaged, its
    own and finite; nothing, if the run never saved one. Later or damaged checkpoints are only
    listed, in `skipped`.

    Args:
        run: The run directory; its lock is held.
        resume: The run and checkpoint of `resume=`.
        config: Has `checkpoint.allow_nonfinite`, and decides whether tensors are read lazily.
        first: Where the run starts without a checkpoint, for messages.

    Returns:
        The checkpoint, verified; without a snapshot if the run starts over.

    Raises:
        CheckpointError: The named checkpoint is damaged or of another run; or all checkpoints are,
            and the message lists each with its fault; or they were deleted.
        ConfigError: The run is finished and saved no checkpoint to continue from.
    """
    folders = checkpoint_folders(run)
    run_id = run_id_of(run)
    # 1. The named one.
    if resume.checkpoint is not None:
        refuse_foreign(resume.checkpoint, run_id)
        snapshot = _load_usable(resume.checkpoint, config)
        # Later checkpoints are superseded by the steps that follow now.
        skipped = {
            folder: "superseded" for folder in folders if step_of(folder) > snapshot.global_step
        }
        notes = [f"resuming from {resume.checkpoint}"]
        return OpenedCheckpoint(
            snapshot, resume.checkpoint, None, resume.started_from, notes, skipped
        )
    # 2. The newest one that is usable.
    faults = []
    skipped = {}
    for folder in folders:
        try:
            refuse_foreign(folder, run_id)
            snapshot = _load_usable(folder, config)
        except CheckpointError as error:
            faults.append(str(error))
            skipped[folder] = "foreign" if isinstance(error, ForeignCheckpointError) else "damaged"
            continue
        notes = [f"{fault} Passed over." for fault in faults]
        notes.append(f"resuming from {folder}")
        return OpenedCheckpoint(snapshot, folder, None, resume.started_from, notes, skipped)
    # 3. None: start over only if nothing is lost by that.
    if faults:
        reasons = "".join(f"\n  {fault}" for fault in faults)
        raise CheckpointError(
            f"{run.path}: no checkpoint of this run is usable, and optrun does not start over"
            f" unasked:{reasons}\nRestore one from a backup, or start a new run in another"
            " directory."
        )
    _refuse_lost_history(run, saves=resume.saved)
    if not resume.saved:
        _refuse_finished(run)
    why = "ended before its first save" if resume.saved else "saves nothing (checkpoint=none)"
    return OpenedCheckpoint(notes=[f"{run.path}: this run {why}; it starts over from {first}."])


def _is_lazy(config: RunConfig) -> bool:
    """Tell whether tensors stay in their files until they are used.

    They do for a sharded model, since no rank needs all tensors.
    """
    return isinstance(config.distributed, FsdpConfig)


def _load_usable(folder: Path, config: RunConfig) -> Snapshot:
    """Read a checkpoint, and refuse one with NaN or infinite weights.

    Frozen weights and the optimizer's state are not checked for these.

    Raises:
        CheckpointError: It is damaged, or a trained weight is NaN or infinite and
            `checkpoint.allow_nonfinite` is false.
    """
    snapshot = read_checkpoint(folder, lazy=_is_lazy(config))
    if config.checkpoint.allow_nonfinite:
        return snapshot
    trained = {}
    for name in snapshot.metadata.trainable or ():
        if name in snapshot.model:
            trained[name] = snapshot.model[name]
    bad = first_not_finite(trained)
    if bad is not None:
        raise CheckpointError(
            f"{folder}: weight {bad} holds NaN or infinity, so it is not used."
            " checkpoint.allow_nonfinite=true uses it."
        )
    return snapshot


def _refuse_lost_history(run: RunDir, *, saves: bool) -> None:
    """Refuse to start over if checkpoints of earlier starts were deleted.

    Two traces show that: other files in `checkpoints/`, such as `last`; or metrics of a run that
    saves, without the folder.

    Args:
        run: A run without checkpoints.
        saves: Whether the run was configured to save checkpoints.

    Raises:
        CheckpointError: The run's files show that it had checkpoints.
    """
    if run.checkpoints.is_dir():
        traces = [path.name for path in run.checkpoints.iterdir() if not path.name.startswith(".")]
        if traces:
            raise CheckpointError(
                f"{run.checkpoints}: none of its checkpoints is left to continue from (found:"
                f" {', '.join(sorted(traces)[:5])}). Start a new run in another directory."
            )
    elif saves and run.metrics.is_file() and read_metrics(run.metrics).records:
        raise CheckpointError(
            f"{run.checkpoints}: this folder was removed after training had begun, so there is"
            " nothing to continue from. Start a new run in another directory."
        )


def _refuse_finished(run: RunDir) -> None:
    """Refuse to start a finished run over: its result would be lost.

    Raises:
        ConfigError: The run is finished. No other error class: the summary would record it, and
            lose the status `finished`.
    """
    if try_read_summary(run.summary).get("status") == "finished":
        raise ConfigError(
            f"{run.path}: this run is finished, and it saved nothing to continue from"
            " (checkpoint=none). Start a new run in another directory."
        )
