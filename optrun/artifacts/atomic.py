"""Write aside, flush to the disk, commit by one rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Ask the operating system to put a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk; no rename."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a small file so that a reader sees the old text or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(aside, text.encode())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def commit_folder(aside: Path, place: Path) -> None:
    """Rename a finished folder into place and flush the entry.

    Raises:
        OSError: The disk refused, or something else stands there.
    """
    sync_folder(aside)
    aside.rename(place)
    sync_folder(place.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder of our own: renamed first, so that a killed deletion leaves nothing that looks whole."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(f".deleting-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)
