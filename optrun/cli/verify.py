"""`optrun verify`: are the checkpoints and the exported model intact?"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_NO_CHECKPOINT, CheckpointError, printable
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from optrun.artifacts.run_dir import RunDir

_INTACT = "intact"
_DAMAGED = "damaged"
_STRANGER = "not of the checkpoint; never read"
_STYLES = {_INTACT: "green", _DAMAGED: "red", _STRANGER: "yellow"}


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "verify",
        ["RUN_DIR|CHECKPOINT", "..."],
        """
Compares every file of a checkpoint with the size and checksum in its manifest; for a run, the
files of all checkpoints, the model and the tokenizer. Metrics, summary, logs and reports have no
checksums. Changes nothing. Exit code 0: all are intact; 4: a file is damaged, and named.
""",
        instead={
            "accept": "Restore the file from a copy, or delete the damaged folder:"
            " resume=RUN_DIR goes on from an older checkpoint."
        },
    )


def run(arguments: VerbArguments) -> int:
    """Check each path, and name damaged files and tensors.

    Returns:
        0 if everything is intact, else 4.
    """
    return max(_verify(path) for path in arguments.positional)


def _verify(path: str) -> int:
    """Check one path, print a table of its files, and return the exit code."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from optrun.artifacts.target import locate
    from optrun.base.formatting import size

    target = locate(path)
    run_dir = target.run
    console = Console()
    with console.status("reading"):
        if target.checkpoint is not None:
            reports, problems = _examine_checkpoints(run_dir, [target.checkpoint])
        else:
            reports, problems = _examine_run(run_dir)
    title = Text(printable(str(target.checkpoint or run_dir.path)))
    table = Table(title=title, title_justify="left", title_style="dim")
    table.add_column("folder", overflow="fold")
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", overflow="fold")
    table.add_column("tensors", justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for report in reports:
        folder = report.folder.name
        for file in report.files:
            tensors = "" if file.tensors is None else str(file.tensors)
            verdict = _DAMAGED if file.damaged else _INTACT
            name = Text(printable(file.name))
            table.add_row(folder, name, size(file.size), tensors, Text(verdict, _STYLES[verdict]))
            folder = ""
        for stranger in report.foreign:
            name = Text(printable(stranger.relative_to(report.folder).as_posix()))
            table.add_row(folder, name, "", "", Text(_STRANGER, _STYLES[_STRANGER]))
    console.print(table)
    for problem in problems:
        sys.stderr.write(f"optrun: {printable(problem)}\n")
    if problems:
        return EXIT_NO_CHECKPOINT
    return EXIT_DONE


@dataclass
class _File:
    """One file of a folder with a manifest."""

    name: str
    size: int
    damaged: bool
    tensors: int | None = None


@dataclass
class Report:
    """The result of checking one folder with a manifest."""

    folder: Path
    problems: list[str]
    files: list[_File] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)


def _examine_run(run: RunDir) -> tuple[list[Report], list[str]]:
    """Examine every checkpoint, the model and the tokenizer of a run, and its pointers."""
    from optrun.artifacts.retention import pointed
    from optrun.artifacts.run_check import missing_model, saved_folders
    from optrun.artifacts.run_dir import checkpoint_folders

    folders = checkpoint_folders(run)[::-1]
    reports, problems = _examine_checkpoints(run, folders)
    for folder in saved_folders(run):
        report = examine_saved(folder)
        reports.append(report)
        problems += report.problems
    problems += missing_model(run)
    if not folders and not run.model.is_dir():
        problems.append(f"{run.checkpoints}: no checkpoint there.")
    for pointer in (run.best, run.last):
        if pointer.is_file() and pointed(pointer) is None:
            problems.append(f"{pointer}: names a checkpoint that is not there.")
    return reports, problems


def _examine_checkpoints(run: RunDir, folders: list[Path]) -> tuple[list[Report], list[str]]:
    """Examine checkpoints of a run; skip any deleted meanwhile."""
    from optrun.artifacts.identity import run_id_of

    problems: list[str] = []
    try:
        run_id = run_id_of(run)
    except CheckpointError as error:
        run_id = None
        problems.append(str(error))
    reports = []
    for folder in folders:
        report = examine(folder, run_id)
        if folder.is_dir():
            reports.append(report)
            problems += report.problems
    return reports, problems


def examine(folder: Path, run_id: str | None = None) -> Report:
    """Compare a checkpoint with its manifest, file by file.

    Args:
        folder: A checkpoint, damaged or not.
        run_id: Id of the run whose directory holds the checkpoint; None: unknown.
    """
    from optrun.artifacts import run_dir as names
    from optrun.artifacts.checksum import file_problem
    from optrun.artifacts.manifest import CONTENT, foreign_files, problems, read_manifest

    report = Report(folder, problems(folder, run_id))
    if folder.is_dir() and not folder.is_symlink():
        report.foreign = foreign_files(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        for name in (names.CHECKPOINT_MANIFEST, *CONTENT):
            report.files.append(_File(name, _bytes(folder / name), damaged=True))
        return report
    name = names.CHECKPOINT_MANIFEST
    report.files.append(_File(name, _bytes(folder / name), damaged=False))
    for name, entry in manifest.files.items():
        path = folder / name
        tensors = manifest.tensors.get(name)
        damaged = file_problem(path, entry) is not None
        count = None if tensors is None else len(tensors)
        report.files.append(_File(name, _bytes(path), damaged, count))
    return report


def examine_saved(folder: Path) -> Report:
    """Compare `model/` or `tokenizer/` of a run with its `checksums.json`."""
    from optrun.artifacts.checksum import file_problem
    from optrun.artifacts.saved_folder import CHECKSUMS, folder_problems, read_checksums

    report = Report(folder, folder_problems(folder))
    try:
        entries = read_checksums(folder)
    except CheckpointError:
        report.files.append(_File(CHECKSUMS, _bytes(folder / CHECKSUMS), damaged=True))
        return report
    for name, entry in entries.items():
        path = folder / name
        report.files.append(_File(name, _bytes(path), file_problem(path, entry) is not None))
    return report


def _bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return 0
