"""Find the newest complete checkpoint, delete old ones, and clean up after a killed process.

Steps decide, as integers; never the time of a file. A folder counts when it is complete, whatever
its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from optrun.artifacts.atomic import DOOMED, remove_folder, replace_text
from optrun.artifacts.checkpoint import REPLACED, TEMPORARY
from optrun.artifacts.forks import deleting
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import SHARD_FOLDERS, problems, refuse_other_format
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, parse_step, step_name

_TEMPORARY_IN_RUN = re.compile(
    r"(\.deleting-)?\.(model|tokenizer)-\d+|"
    r"\.(config\.yaml|metrics\.jsonl|summary\.json|tracking\.json|curves\.png|"
    r"report(\.html|\.md|\.csv|-[\w-]+\.(png|csv)))\.\d+\.tmp"
)
"""Names of temporary files and folders in a run directory; a killed process leaves them."""


def step_of(folder: Path) -> int:
    """Read the step in the name of a checkpoint folder."""
    step = parse_step(folder.name)
    assert step is not None
    return step


def latest_complete(run: RunDir) -> tuple[Path | None, dict[Path, list[str]]]:
    """Find the newest complete checkpoint of a run, and the faults of newer ones.

    Returns:
        The folder, or None; and folder -> messages for each damaged checkpoint after it, newest
        first.

    Raises:
        OtherFormatError: A newer optrun wrote one of the newer checkpoints.
        CheckpointError: The id of the run is ambiguous, see `run_id_of`.
    """
    damaged: dict[Path, list[str]] = {}
    run_id = run_id_of(run)
    for folder in checkpoint_folders(run):
        refuse_other_format(folder)
        messages = problems(folder, run_id)
        if not messages:
            return folder, damaged
        damaged[folder] = messages
    return None, damaged


def clean_leftovers(run: RunDir) -> list[str]:
    """Remove what a killed process left in a run directory; the lock must be held.

    Removed are temporary files and folders, unfinished saves and half-deleted checkpoints. A
    checkpoint that was to be replaced gets its name back if nothing has taken its place. Links are
    left alone.

    Returns:
        Names of the removed files and folders, except temporary files of `best` and `last`.
    """
    removed = []
    # 1. Files and folders beside `checkpoints/`.
    for path in sorted(run.path.iterdir()):
        if path.is_symlink() or not _TEMPORARY_IN_RUN.fullmatch(path.name):
            continue
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink()
        removed.append(path.name)
    if run.checkpoints.is_symlink() or not run.checkpoints.is_dir():
        return removed
    # 2. In `checkpoints/`.
    for path in sorted(run.checkpoints.iterdir()):
        if path.is_symlink():
            continue
        original = path.with_name(path.name.removeprefix(REPLACED))
        # A checkpoint that a save had renamed, before the new one took its place.
        if path.name.startswith(REPLACED) and path.is_dir() and not original.exists():
            path.rename(original)
        # An unfinished save, a half-deleted checkpoint, or one whose replacement is in place.
        elif path.name.startswith((TEMPORARY, DOOMED, REPLACED)) and path.is_dir():
            remove_folder(path)
            removed.append(path.name)
        # `best` or `last`, half written.
        elif path.name.startswith((".best.", ".last.")) and path.name.endswith(".tmp"):
            path.unlink()
    return removed


class Retention:
    """Deletes checkpoints beyond the newest ones and those that a caller keeps.

    Only complete checkpoints of this run count, so that a damaged folder never replaces a good one.
    An existing folder is verified once, every byte; one that was just written is trusted.

    Args:
        run: The run directory; its lock is held.
        keep_last: Number of newest complete checkpoints to keep, at least 1.
    """

    def __init__(self, run: RunDir, keep_last: int) -> None:
        self.run = run
        self.keep_last = keep_last
        self._run_id = run_id_of(run)
        self._signatures: dict[str, str] = {}
        """Checkpoint to the signature of its files when they were last known to be complete."""

    def trust(self, folder: Path) -> None:
        """Remember a checkpoint as complete without reading it.

        Only for one that was just written, flushed and committed.
        """
        self._signatures[folder.name] = _signature(folder)

    def complete(self, steps: Iterable[int], count: int) -> list[int]:
        """List the first `count` of these steps that have a complete checkpoint."""
        complete_steps = (step for step in steps if self._is_complete(self.run.checkpoint(step)))
        return list(islice(complete_steps, count))

    def delete_expired(self, keep: Collection[int]) -> list[Path]:
        """Delete all checkpoints except the `keep_last` newest and those to keep.

        Damaged folders are never deleted, so that a user can inspect them, and do not count among
        the newest. A checkpoint that a branch is reading stays until a later call.

        Args:
            keep: Steps to keep besides the newest.

        Returns:
            The deleted folders, newest first.
        """
        # From the newest back: `keep_last` complete ones stay, and after these the steps to keep.
        expired = []
        newest = 0
        for folder in checkpoint_folders(self.run):
            if not self._is_complete(folder):
                continue
            if newest < self.keep_last:
                newest += 1
            elif step_of(folder) not in keep:
                expired.append(folder)
        # `deleting` yields false for a checkpoint that somebody reads.
        with contextlib.ExitStack() as locks:
            deleted = [folder for folder in expired if locks.enter_context(deleting(folder))]
            for folder in deleted:
                remove_folder(folder)
                self._signatures.pop(folder.name, None)
        return deleted

    def _is_complete(self, folder: Path) -> bool:
        """Tell whether a folder, and no link, is a complete checkpoint.

        Its bytes are verified only if its files changed since the last call, or since `trust`.
        """
        if folder.is_symlink() or not folder.is_dir():
            return False
        signature = _signature(folder)
        if self._signatures.get(folder.name) == signature:
            return True
        if problems(folder, self._run_id):
            return False
        self._signatures[folder.name] = signature
        return True


def _signature(folder: Path) -> str:
    """Digest name, size, time and inode of every file of a checkpoint."""
    facts = []
    for path in sorted(_entries(folder)):
        stat = path.lstat()
        facts.append(
            (path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a checkpoint, and the files in its folders of shards."""
    for path in folder.iterdir():
        yield path
        if path.name in SHARD_FOLDERS and path.is_dir() and not path.is_symlink():
            yield from path.iterdir()


def point_best(run: RunDir, global_step: int | None) -> None:
    """Write the best step into `checkpoints/best`; remove the file for None."""
    if global_step is not None:
        replace_text(run.best, step_name(global_step) + "\n")
    elif run.best.is_file():
        run.best.unlink()
