"""Write a folder aside, and move it to its place when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optrun.artifacts.atomic import remove_folder, storing


def aside_of(folder: Path) -> Path:
    """Name the temporary folder in which a folder is written first."""
    return folder.with_name(f".{folder.name}-{os.getpid()}")


@contextmanager
def written_aside(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `folder` when the block ends.

    An error in the block deletes the temporary folder and leaves `folder` as it was.

    Args:
        folder: Where to write; new or empty.
        replaces: Replace a folder that is not empty, too. Its parent folder must exist then.

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
