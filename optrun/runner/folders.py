"""Write a folder aside, and move it to its place when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optrun.artifacts.atomic import remove_folder, storing


def aside_of(folder: Path) -> Path:
    """Name the place where a folder is written first."""
    return folder.with_name(f".{folder.name}-{os.getpid()}")


@contextmanager
def written_aside(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder.

    Afterwards it takes its place, and nothing is left of it after an error.

    Args:
        folder: Where to write; new or empty.
        replaces: Whether one that is not empty goes, too; the folder that it lies in is there then.

    Raises:
        StorageError: The disk refused the write, or the destination appeared meanwhile.
    """
    aside = aside_of(folder)
    with storing(folder):
        aside.mkdir(parents=not replaces)
    try:
        with storing(folder):
            yield aside
            if folder.exists():
                (remove_folder if replaces else Path.rmdir)(folder)
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
