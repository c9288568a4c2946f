"""Picks the checkpoint to resume from; what was passed over is told and put out of the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from optrun.artifacts.checkpoint import Snapshot, load_checkpoint, set_aside
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import refuse_foreign, refuse_other_format
from optrun.artifacts.metrics import read_metrics, read_summary
from optrun.artifacts.retention import pointed, step_of
from optrun.artifacts.run_check import check_run, refuse_damaged
from optrun.artifacts.run_dir import (
    BEST,
    HYDRA,
    LAST,
    MANIFEST,
    METRICS,
    MODEL,
    SAMPLES,
    SUMMARY,
    TOKENIZER,
    RunDir,
    checkpoint_folders,
)
from optrun.artifacts.run_manifest import APART, WRITTEN, RunManifest, matches, read_run_manifest, refuse_other_manifest
from optrun.artifacts.tensor_file import first_not_finite
from optrun.artifacts.trunk import Trunk
from optrun.base.errors import CheckpointError, ConfigError, ForeignCheckpointError, StorageError
from optrun.base.reading import kind_of
from optrun.runner.resume.state_file import refuse_garbage


@dataclass
class ResumePoint:
    """What `resume=` asked for."""

    checkpoint: Path | None
    """A checkpoint asked for by name; None: the newest that is whole."""
    started_from: Path | None = None
    """Folder that the run was started from, for relative paths of its configuration; None: the current one."""
    saved: bool = True
    """Whether the run was one that saves before this start: one whose checkpoints were removed does not begin again by
    checkpoint=none."""
    notes: list[str] = field(default_factory=list)
    """What the user is to know of the configuration that was read."""


@dataclass
class OpenedCheckpoint:
    """The checkpoint to resume from, and those that were passed over."""

    snapshot: Snapshot | None
    """None: nothing was ever saved, and the run begins again."""
    notes: list[str]
    """For the user."""
    folder: Path | None = None
    """Where the snapshot was read."""
    trunk: Trunk | None = None
    """That place, if it is of another run, from which this one branches."""
    damaged: list[Path] = field(default_factory=list)
    superseded: list[Path] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)
    """Of another run."""

    def set_aside_skipped(self) -> list[str]:
        """Put out of the way what was passed over; called when the run is certain to go on.

        Returns:
            Notes for the user.
        """
        notes = []
        for folders, why in (
            (self.damaged, "damaged"),
            (self.superseded, "superseded"),
            (self.foreign, "foreign"),
        ):
            for folder in folders:
                for pointer in (folder.with_name(BEST), folder.with_name(LAST)):
                    if pointer.is_file() and pointed(pointer) in (folder, None):
                        pointer.unlink()  # the next save says anew which ones they are
                notes.append(f"{folder.name} was renamed to {set_aside(folder, why).name}")
        return notes


def refuse_links(run: RunDir) -> None:
    """Refuse links: a run writes nothing outside of its own directory.

    Raises:
        StorageError: One of its files or folders is a link. Those in the folder of checkpoints are never followed, and
            a tracker's library may link to its own files.
    """
    for folder, folders, files in os.walk(run.path):
        for path in (Path(folder, name) for name in (*folders, *files)):
            inside = path.relative_to(run.path).as_posix()
            theirs = matches(inside, APART) and path.resolve().is_relative_to(run.path.resolve())
            if path.is_symlink() and matches(inside.split("/")[0], WRITTEN) and not theirs:
                raise StorageError(f"{path}: a link: a run writes nothing outside of its own directory. Remove it.")
            kind = None if path.is_symlink() or path.is_dir() else kind_of(path)
            if kind and matches(inside.split("/")[0], WRITTEN) and not matches(inside, APART):
                raise StorageError(f"{path}: {kind}; expected a regular file, which this run writes. Remove it.")
        folders[:] = [name for name in folders if Path(folder, name) != run.checkpoints]


def open_manifest(run: RunDir, note: Callable[[str], None]) -> tuple[RunManifest, bool]:
    """Open the manifest of a run that goes on; what is read again is checked against it first.

    Args:
        run: The run directory; its lock is held.
        note: Tells the user what is damaged and not needed.

    Returns:
        The manifest, and whether the summary is what the run wrote.

    Raises:
        CheckpointError: The metrics, or what Hydra noted of the start, were changed: nothing is written behind them.
    """
    refuse_damaged(run, METRICS, f"{HYDRA}/hydra.yaml")
    wrong = check_run(run, (SUMMARY, f"{TOKENIZER}/*", f"{MODEL}/*", SAMPLES)).wrong
    for name, fault in wrong.items():
        note(f"warning: {fault} {'They are taken as they are.' if name == MANIFEST else 'Nothing of it is used.'}")
    return RunManifest(run, read_run_manifest(run)), SUMMARY not in wrong


def refuse_other_formats(run: RunDir) -> None:
    """Refuse a run of a newer optrun, before anything of it is put out of the way or written anew.

    Raises:
        OtherFormatError: A newer optrun wrote one of its checkpoints, or its manifest.
    """
    refuse_other_manifest(run)
    for folder in checkpoint_folders(run):
        refuse_other_format(folder)


def open_trunk(trunk: Trunk, *, allow_nonfinite: bool, lazy: bool = False) -> OpenedCheckpoint:
    """Read the checkpoint that a branch starts from; nothing on the disk is changed.

    Args:
        trunk: Where it lies, and what is in it.
        allow_nonfinite: Whether weights with NaN or infinity will do.
        lazy: Leave the tensors in their files until one is asked for.

    Raises:
        CheckpointError: It is gone, damaged, or another one than was named.
    """
    trunk.require()
    return OpenedCheckpoint(_load(trunk.folder, allow_nonfinite, lazy=lazy), [], trunk.folder, trunk)


def open_checkpoint(
    run: RunDir, resume: ResumePoint, *, allow_nonfinite: bool, lazy: bool = False, first: str = "step 0"
) -> OpenedCheckpoint:
    """Pick the checkpoint to resume from and read it; nothing on the disk is changed.

    Args:
        run: The run directory; its lock is held.
        resume: What was asked for.
        allow_nonfinite: Whether weights with NaN or infinity will do.
        lazy: Leave the tensors in their files until one is asked for.
        first: Where the run begins, in words.

    Raises:
        CheckpointError: The checkpoint that was asked for is damaged or of another run, or none is whole; every one is
            listed with its reason.
        ConfigError: The run is finished, and saved nothing that it could be prolonged from.
    """
    folders = checkpoint_folders(run)
    run_id = run_id_of(run)
    if resume.checkpoint is not None:
        refuse_foreign(resume.checkpoint, run_id)
        snapshot = _load(resume.checkpoint, allow_nonfinite, lazy=lazy)
        # What comes after it belongs to a future that is now written anew.
        later = [folder for folder in folders if step_of(folder) > snapshot.global_step]
        return OpenedCheckpoint(snapshot, [f"going on from {resume.checkpoint}"], resume.checkpoint, superseded=later)
    wrong: dict[Path, str] = {}
    foreign: list[Path] = []
    for folder in folders:
        try:
            refuse_foreign(folder, run_id)
            snapshot = _load(folder, allow_nonfinite, lazy=lazy)
        except ForeignCheckpointError as error:
            wrong[folder] = str(error)
            foreign.append(folder)
            continue
        except CheckpointError as error:
            wrong[folder] = str(error)
            continue
        notes = [f"{reason} Passed over." for reason in wrong.values()]
        damaged = [folder for folder in wrong if folder not in foreign]
        return OpenedCheckpoint(snapshot, [*notes, f"going on from {folder}"], folder, damaged=damaged, foreign=foreign)
    if wrong:
        listed = "".join(f"\n  {reason}" for reason in wrong.values())
        raise CheckpointError(
            f"{run.path}: no checkpoint of this run is whole, and nothing is started over unasked:{listed}\nRestore "
            "one from a backup, or start a new run in another directory."
        )
    _refuse_lost_history(run, saves=resume.saved)
    if not resume.saved:
        _refuse_finished(run)
    why = "ended before its first save" if resume.saved else "saves nothing (checkpoint=none)"
    return OpenedCheckpoint(None, [f"{run.path}: this run {why}; it starts over from {first}."])


def _load(folder: Path, allow_nonfinite: bool, *, lazy: bool) -> Snapshot:
    snapshot = load_checkpoint(folder, lazy=lazy)
    refuse_garbage(folder, snapshot.metadata)
    if not allow_nonfinite:
        names = snapshot.metadata.trainable or ()
        bad = first_not_finite({name: snapshot.model[name] for name in names if name in snapshot.model})
        if bad is not None:
            raise CheckpointError(
                f"{folder}: weight {bad} holds NaN or infinity: whole, but nothing to go on from "
                "(checkpoint.allow_nonfinite=true would)."
            )
    return snapshot


def _refuse_lost_history(run: RunDir, *, saves: bool) -> None:
    """Refuse to begin again where checkpoints were made once and are gone: it would hide that.

    Args:
        run: Has no checkpoint.
        saves: Whether it was one that makes them.

    Raises:
        CheckpointError: There are traces of checkpoints.
    """
    if run.checkpoints.is_dir():
        traces = [path.name for path in run.checkpoints.iterdir() if not path.name.startswith(".")]
        if traces:
            raise CheckpointError(
                f"{run.checkpoints}: there were checkpoints, and none is left to go on from (found: "
                f"{', '.join(sorted(traces)[:5])}). Start a new run in another directory."
            )
    elif saves and run.metrics.is_file() and read_metrics(run.metrics).records:
        raise CheckpointError(
            f"{run.checkpoints}: missing, although the run had begun: it was removed. Start a new run in another "
            "directory."
        )


def _refuse_finished(run: RunDir) -> None:
    """Refuse to throw away a result to begin again.

    Raises:
        ConfigError: The run is finished; no other error, since its summary is to stay what it is.
    """
    try:
        finished = read_summary(run.summary).get("status") == "finished"
    except (OSError, ValueError):
        return
    if finished:
        raise ConfigError(
            f"{run.path}: this run is finished, and it saved nothing to go on from (checkpoint=none). Start a new run "
            "in another directory."
        )
