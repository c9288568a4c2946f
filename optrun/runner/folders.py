"""Write a folder under a temporary name, and rename it when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optrun.artifacts.atomic import remove_folder, storage_errors


def temporary_folder_of(folder: Path) -> Path:
    """Name the temporary folder beside a folder; it is renamed when complete."""
    return folder.with_name(f".{folder.name}-{os.getpid()}")


@contextmanager
def write_through_temporary(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; it gets that name when the block ends.

    An error in the block deletes the temporary folder and leaves `folder` as it was.

    Args:
        folder: Where to write; new or empty.
        replaces: Replace a folder that is not empty, too. Its parent folder must exist then.

    Raises:
        StorageError: The disk refused the write, or the destination appeared meanwhile.
    """
    temporary = temporary_folder_of(folder)
    with storage_errors(folder):
        temporary.mkdir(parents=not replaces)
    try:
        with storage_errors(folder):
            yield temporary
            if folder.exists():
                if replaces:
                    remove_folder(folder)
                else:
                    folder.rmdir()  # fails if it is not empty
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
