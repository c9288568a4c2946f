"""`optrun verify`: are the checkpoints and the exported model intact?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_NO_CHECKPOINT, CheckpointError, printable
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from pathlib import Path

    from optrun.artifacts.run_dir import RunDir


def parser() -> VerbParser:
    """Build the parser of `optrun verify RUN_DIR|CHECKPOINT ...`."""
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
            " resume=RUN_DIR continues from an older checkpoint."
        },
    )


def run(arguments: VerbArguments) -> int:
    """Check each path; damaged files are named on stderr.

    Returns:
        0 if everything is intact, else 4.
    """
    return max(_verify(path) for path in arguments.positional)


def _verify(path: str) -> int:
    """Check one path, and print a table of its folders; problems go to stderr.

    Returns:
        0, or 4 if there is a problem.

    Raises:
        ConfigError: The path is neither a run nor a checkpoint.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from optrun.artifacts.target import locate
    from optrun.base.formatting import size

    target = locate(path)
    console = Console()
    with console.status("reading"):
        # `folders` maps each folder to its damage. `problems` has all damage and what is missing.
        folders, problems, strangers = _examine(target.run, target.checkpoint)
    title = Text(printable(str(target.checkpoint or target.run.path)))
    table = Table(title=title, title_justify="left", title_style="dim")
    table.add_column("folder", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("verdict")
    for folder, damage in folders.items():
        total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        verdict = Text("damaged", "red") if damage else Text("intact", "green")
        table.add_row(Text(printable(folder.name)), size(total), verdict)
    console.print(table)
    notes = [f"{file}: not of the checkpoint; never read" for file in strangers]
    for line in (*notes, *problems):
        sys.stderr.write(f"optrun: {printable(line)}\n")
    if problems:
        return EXIT_NO_CHECKPOINT
    return EXIT_DONE


def _examine(
    run: RunDir, checkpoint: Path | None
) -> tuple[dict[Path, list[str]], list[str], list[Path]]:
    """Compare folders with their manifests: one checkpoint, or all saved folders of a run.

    These are the checkpoints, newest first, the model and the tokenizer. A checkpoint that the run
    deletes meanwhile is left out.

    Args:
        run: The run directory.
        checkpoint: The only checkpoint to check; None: the whole run.

    Returns:
        The damage of each folder; all problems, also missing folders; and the files in checkpoints
        that do not belong there.
    """
    from optrun.artifacts.identity import run_id_of
    from optrun.artifacts.manifest import foreign_files
    from optrun.artifacts.manifest import problems as checkpoint_problems
    from optrun.artifacts.run_dir import checkpoint_folders

    problems: list[str] = []
    run_id = None
    try:
        run_id = run_id_of(run)
    except CheckpointError as error:
        problems.append(str(error))
    checkpoints = checkpoint_folders(run)[::-1] if checkpoint is None else [checkpoint]
    folders = {}
    strangers: list[Path] = []
    for folder in checkpoints:
        damage = checkpoint_problems(folder, run_id)  # empty: intact
        if folder.is_dir():
            folders[folder] = damage
            if not folder.is_symlink():
                strangers += foreign_files(folder)
    if checkpoint is None:
        from optrun.artifacts.run_check import saved_folders
        from optrun.artifacts.saved_folder import folder_problems

        folders |= {folder: folder_problems(folder) for folder in saved_folders(run)}
        problems += _missing_folders(run, checkpoints)
    for damage in folders.values():
        problems += damage
    return folders, problems, strangers


def _missing_folders(run: RunDir, checkpoints: list[Path]) -> list[str]:
    """Describe missing folders of a run: its model, a checkpoint, the target of a pointer.

    Args:
        run: The run directory.
        checkpoints: Its checkpoints.
    """
    from optrun.artifacts.run_check import missing_model
    from optrun.artifacts.run_dir import read_pointer

    problems = missing_model(run)
    if not checkpoints and not run.model.is_dir():
        problems.append(f"{run.checkpoints}: no checkpoint there.")
    for pointer in (run.best, run.last):
        if pointer.is_file() and read_pointer(pointer) is None:
            problems.append(f"{pointer}: names a checkpoint that is not there.")
    return problems
