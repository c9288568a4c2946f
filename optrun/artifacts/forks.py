"""Forks: runs that `branch_from=` begins at another run's checkpoint, their trunk.

Users know a fork as a branch, because the key is called `branch_from`.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts.manifest import refuse_other_format
from optrun.artifacts.run_dir import CHECKPOINT_MANIFEST, CHECKPOINTS
from optrun.base.errors import CheckpointError
from optrun.base.formatting import plain
from optrun.base.reading import open_file, read_bytes

KEY = "branch_from"
MORE_TRUNKS = "train trunks of more seeds and branch from each: branch_from=TRUNK_0,TRUNK_1,TRUNK_2"
_PINNED = re.compile(r"(?P<folder>.+)@(?P<digest>[0-9a-f]{16})", re.DOTALL)


@dataclass(frozen=True)
class Trunk:
    """The checkpoint of another run that a fork starts from, written `FOLDER@DIGEST`."""

    folder: Path
    digest: str
    """Of its manifest, which has the checksum of every file; 16 hexadecimal digits."""

    def __str__(self) -> str:
        return f"{self.folder}@{self.digest}"

    @classmethod
    def of(cls, folder: Path) -> Trunk:
        """Name a checkpoint by its content.

        Raises:
            CheckpointError: The checkpoint has no manifest.
        """
        return cls(folder.resolve(), checkpoint_digest(folder))

    @classmethod
    def parse(cls, text: str | None) -> Trunk | None:
        """Read `FOLDER@DIGEST`; None for a path alone, or for None.

        Example:
            >>> trunk = Trunk.parse("/runs/a/checkpoints/step-00000100@0123456789abcdef")
            >>> trunk.digest, str(trunk.folder)
            ('0123456789abcdef', '/runs/a/checkpoints/step-00000100')
            >>> Trunk.parse("/runs/a") is None
            True
        """
        match = _PINNED.fullmatch(text or "")
        if match is None:
            return None
        return cls(Path(match["folder"]), match["digest"])

    def require(self) -> None:
        """Refuse a missing checkpoint, or one with other content than named.

        Raises:
            CheckpointError: The message names the folder.
        """
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{KEY}={self.folder}: the trunk's checkpoint is gone: moved, or deleted by"
                " the retention of a run that continues (its checkpoint.keep_last). Name one that"
                " stays, or the place where it lies now."
            )
        refuse_other_format(self.folder)
        digest = checkpoint_digest(self.folder)
        if digest != self.digest:
            raise CheckpointError(
                f"{KEY}={self.folder}: its content is another one now: digest {digest}, and"
                f" {self.digest} when this branch was asked for. A changed trunk makes another"
                " branch: begin it anew."
            )


@dataclass(frozen=True)
class Fork:
    """The point where a run left its trunk, as recorded in `summary.json`."""

    folder: Path
    """The checkpoint."""
    trunk: str
    """Identity of the trunk's run, or its checkpoint if it has none."""
    kind: str
    """Digest of the trunk's configuration without the seed."""
    step: int

    @classmethod
    def of(cls, summary: Mapping[str, object]) -> Fork | None:
        """Read where a run left its trunk; None for a run without one.

        Args:
            summary: Values of `summary.json`; the record is `branch`.
        """
        # As `StartedFork.summary` writes it; a file that was edited has no trunk.
        record = summary.get("branch")
        if not isinstance(record, dict) or "folder" not in record:
            return None
        step = record.get("step")
        if not isinstance(step, int):
            return None
        trunk = record.get("run_id") or record.get("digest")
        return cls(Path(str(record["folder"])), str(trunk), str(record.get("trunk_config")), step)

    @property
    def run(self) -> Path:
        """Run directory of the trunk; it may be gone."""
        if self.folder.parent.name == CHECKPOINTS:
            return self.folder.parents[1]
        return self.folder

    @property
    def name(self) -> str:
        """The trunk's directory name and the step."""
        return plain(f"{self.run.name} step {self.step:,}")


def checkpoint_digest(folder: Path) -> str:
    """Digest a checkpoint's manifest, and with it all of its files.

    The digest has 16 hexadecimal digits.

    Raises:
        CheckpointError: There is no manifest.
    """
    try:
        return hashlib.sha256(read_bytes(folder / CHECKPOINT_MANIFEST)).hexdigest()[:16]
    except OSError as error:
        raise CheckpointError(
            f"{folder / CHECKPOINT_MANIFEST}: {error.strerror}: no complete checkpoint."
        ) from error


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Lock a checkpoint for reading: its run does not delete it inside the `with` block.

    It holds a shared kernel lock on the manifest, which ends with the process; nothing is written,
    and any number of processes may hold one. On a file system without locks nothing is protected.

    Args:
        folder: A checkpoint.

    Raises:
        CheckpointError: The checkpoint is being deleted, or gone.
    """
    with _locked(folder, fcntl.LOCK_SH) as granted:
        if not granted:
            raise CheckpointError(
                f"{folder}: its run is deleting this checkpoint (checkpoint.keep_last)."
            )
        yield


@contextmanager
def deleting(folder: Path) -> Iterator[bool]:
    """Lock a checkpoint for its deletion, unless a process holds it by `reading`.

    Yields:
        Whether it may be deleted within the block: false if a process reads it; true without a
        manifest, since then nobody can, and on a file system without locks.
    """
    with ExitStack() as lock:
        try:
            granted = lock.enter_context(_locked(folder, fcntl.LOCK_EX))
        except CheckpointError:  # it has no manifest: nobody can read it
            granted = True
        yield granted


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[bool]:
    """Try to lock the manifest of a checkpoint, and yield at once whether that was granted.

    A file system without locks grants everything.

    Args:
        folder: The checkpoint.
        kind: `fcntl.LOCK_SH`, which several processes may hold, or `fcntl.LOCK_EX`.

    Raises:
        CheckpointError: There is no manifest.
    """
    path = folder / CHECKPOINT_MANIFEST
    try:
        file = open_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}: no complete checkpoint.") from error
    with file:
        granted = True
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            # BlockingIOError: another process holds it. Any other: there are no locks here.
            granted = not isinstance(error, BlockingIOError)
        yield granted
