"""`optrun verify`: is every file whole?"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from optrun.base.errors import (
    EXIT_DONE,
    EXIT_NO_CHECKPOINT,
    CheckpointError,
    ConfigError,
    StorageError,
    printable,
)
from optrun.cli.parser import VerbArguments, VerbParser

_STRANGER = "not of the checkpoint; never read"
_STYLES = {"whole": "green", "damaged": "red", "not covered": "yellow", _STRANGER: "yellow"}


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "verify",
        "RUN_DIR|CHECKPOINT [...]",
        """
Reads every file of a checkpoint, or of a run with all its checkpoints, and holds it against the manifests: size,
checksum, and every tensor; files of a run that are missing, or that nothing of optrun's put there, are named as well.
What a run that goes on, or was killed, wrote after its last checkpoint is not covered yet. Logs, curves and reports,
which nothing reads again, are not covered at all. That is said, and no damage.
Nothing is changed. Exit code 0: all whole; 4: file and tensor are named.

--accept takes one file of a run as it is now, or as gone, and records that in the manifest: when, by which command,
and both checksums. Weights and checkpoints are never accepted, and what a run needs may not be gone. A manifest that
is lost or damaged is accepted by its own name, run_manifest.json, and with it every file as it is.
""",
    )
    made.add_argument(
        "--accept", metavar="FILE", help="take a changed file of the run as it is, with a record"
    )
    return made


def run(arguments: VerbArguments) -> int:
    """Check, and name what is damaged.

    Returns:
        0 where everything is whole, else 4.
    """
    if arguments.options.accept is not None:
        _accept(arguments.positional, arguments.options.accept)
    return max(_verify(path) for path in arguments.positional)


def _accept(paths: list[str], file: str) -> None:
    from optrun.artifacts.run_check import accept
    from optrun.runner.resume.target import locate

    target = locate(paths[0])
    if len(paths) > 1 or target.checkpoint is not None:
        raise ConfigError(
            f"optrun verify --accept {file}: expected one run directory: a checkpoint is whole or"
            " not."
        )
    try:
        accept(target.run, file)
    except OSError as error:
        raise StorageError(
            f"{target.run.manifest}: cannot be written: {error.strerror or error}."
        ) from error


def _verify(path: str) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from optrun.artifacts.identity import run_id_of
    from optrun.artifacts.retention import pointed
    from optrun.artifacts.run_check import Checked, check_run
    from optrun.artifacts.run_dir import MANIFEST, checkpoint_folders
    from optrun.artifacts.run_manifest import CHECKPOINT, matches
    from optrun.base.formatting import size
    from optrun.runner.resume.target import locate

    target, console = locate(path), Console()
    folders = (
        [target.checkpoint]
        if target.checkpoint is not None
        else checkpoint_folders(target.run)[::-1]
    )
    title = Text(printable(str(target.checkpoint or target.run.path)))
    table = Table(title=title, title_justify="left", title_style="dim")
    for name in ("checkpoint", "file", "size", "tensors", "verdict"):
        table.add_column(
            name, justify="right" if name in ("size", "tensors") else "left", overflow="fold"
        )

    def add(verdict: str, name: str, shown: str = "", tensors: str = "", folder: str = "") -> None:
        table.add_row(
            folder, Text(printable(name)), shown, tensors, Text(verdict, style=_STYLES[verdict])
        )

    wrong: list[str] = []
    try:
        run_id = run_id_of(target.run)
    except CheckpointError as error:
        run_id, wrong = None, [str(error)]
    with console.status("reading"):
        of_run = Checked() if target.checkpoint is not None else check_run(target.run)
        wrong += of_run.wrong.values()
        for name in sorted({*of_run.wrong, *of_run.whole, *of_run.open}):
            verdict = (
                "damaged"
                if name in of_run.wrong
                else "not covered"
                if name in of_run.open
                else "whole"
            )
            if verdict != "whole" or not matches(
                name, (CHECKPOINT,)
            ):  # a checkpoint has rows of its own
                add(verdict, name, size(_bytes(target.run.path / name)))
        for folder in folders:
            report = examine(folder, run_id)
            if not folder.is_dir():
                continue  # the run goes on, and deleted it meanwhile
            wrong += report.problems
            for index, file in enumerate(report.files):
                tensors = "" if file.tensors is None else str(file.tensors)
                verdict = "damaged" if file.damaged else "whole"
                add(verdict, file.name, size(file.size), tensors, "" if index else folder.name)
            for stranger in report.foreign:
                add(_STRANGER, stranger.relative_to(folder).as_posix())
    if not folders and not of_run.sealed:
        wrong.append(f"{target.run.checkpoints}: no checkpoint there.")
    for pointer in () if target.checkpoint is not None else (target.run.best, target.run.last):
        if pointer.is_file() and pointed(pointer) is None:
            wrong.append(f"{pointer}: names a checkpoint that is not there.")
    console.print(table)
    for reason in dict.fromkeys(of_run.open.values()):
        listed = ", ".join(name for name, why in of_run.open.items() if why == reason)
        console.print(Text(printable(f"{listed}: {reason}")), soft_wrap=True)
    for record in of_run.accepted:
        was, now = (str(side or "none")[:12] for side in (record.was, record.now))
        sealed = (
            "every file as it was then"
            if record.name == MANIFEST
            else f"sha256 was {was}, is {now}"
        )
        console.print(
            Text(printable(f"{record.name}: accepted at {record.at}: {sealed}")), soft_wrap=True
        )
    for problem in wrong:
        sys.stderr.write(f"optrun: {printable(problem)}\n")
    return EXIT_NO_CHECKPOINT if wrong else EXIT_DONE


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@dataclass
class _File:
    """File of a checkpoint."""

    name: str
    size: int
    damaged: bool
    tensors: int | None = None


@dataclass
class Report:
    """What was found in one checkpoint."""

    problems: list[str]
    files: list[_File] = field(default_factory=list)
    foreign: list[Path] = field(default_factory=list)


def examine(folder: Path, run_id: str | None = None) -> Report:
    """Hold a checkpoint against its manifest, file by file and tensor by tensor.

    Args:
        folder: A checkpoint, whole or not.
        run_id: Of the run it lies in; None: it is not known.
    """
    from optrun.artifacts import run_dir as names
    from optrun.artifacts.checksum import file_problem
    from optrun.artifacts.manifest import CONTENT, foreign_files, problems, read_manifest
    from optrun.artifacts.tensor_file import damaged_tensors

    report = Report(problems(folder, run_id))
    if folder.is_dir() and not folder.is_symlink():
        report.foreign = foreign_files(folder)

    def add(name: str, damaged: bool, tensors: int | None = None) -> None:
        report.files.append(_File(name, _bytes(folder / name), damaged, tensors))

    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        for name in (names.CHECKPOINT_MANIFEST, *CONTENT):
            add(name, damaged=True)
        return report
    add(names.CHECKPOINT_MANIFEST, damaged=False)
    for name, entry in manifest.files.items():
        path, tensors = folder / name, manifest.tensors.get(name)
        if tensors is not None and path.is_file() and not path.is_symlink():
            report.problems += damaged_tensors(path, tensors)
        add(name, file_problem(path, entry) is not None, None if tensors is None else len(tensors))
    return report
