"""Checksums of `model/` and `tokenizer/` of a run, kept inside of each folder.

`checksums.json` has the format of `manifest`. It is written before the folder takes its place, by
one rename. The model card is not in it, because people edit it.
"""

from __future__ import annotations

import os
from pathlib import Path

from optrun.artifacts.atomic import write_bytes
from optrun.artifacts.checksum import Entry, digest_of, file_problem
from optrun.artifacts.manifest import checksummed_text, manifest_errors, read_checksummed
from optrun.base.errors import CheckpointError
from optrun.base.reading import open_file

FORMAT = 1
CHECKSUMS = "checksums.json"
CARD = "README.md"


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` of a folder, and flush all of its files to the disk.

    Raises:
        OSError: The disk refused the write.
    """
    entries = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == CARD:  # `rglob` lists the files of folders, too
            continue
        with open_file(path) as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            entries[name] = Entry(size, digest_of(file).hexdigest())
    write_bytes(folder / CHECKSUMS, checksummed_text(FORMAT, {}, entries))


def read_checksums(folder: Path) -> dict[str, Entry]:
    """Read `checksums.json` of a folder, by path inside of it.

    Raises:
        CheckpointError: The file is missing, damaged or a link, or names a file outside the folder.
    """
    path = folder / CHECKSUMS
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder}: a link: what lies outside of a run directory is not read."
        )
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: missing, so whether this folder is whole is not known.")
    with manifest_errors(path):
        entries = read_checksummed(path, FORMAT)[1]
    for name in entries:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path}: names {name}, which lies outside of the folder.")
    return entries


def folder_problems(folder: Path) -> list[str]:
    """List the damage of a folder's files; empty if it is whole."""
    try:
        entries = read_checksums(folder)
        problems = [file_problem(folder / name, entry) for name, entry in entries.items()]
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or folder}: cannot be read: {error.strerror or error}."]
    return [problem for problem in problems if problem is not None]


def refuse_damaged(folder: Path) -> None:
    """Refuse an existing folder with damaged files.

    Raises:
        CheckpointError: The message names each file and a way out.
    """
    if not os.path.lexists(folder):
        return
    problems = folder_problems(folder)
    if problems:
        raise CheckpointError(
            f"{' '.join(problems)} Restore it from a copy, or let the run write it anew with"
            f" resume={folder.parent} training.max_steps=N."
        )
