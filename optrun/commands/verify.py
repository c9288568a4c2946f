"""`optrun verify`: is every file whole?"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from optrun.commands.words import take_apart
from optrun.errors import EXIT_DONE, EXIT_NO_CHECKPOINT, ConfigError

USAGE = """
optrun verify RUN_DIR|CHECKPOINT [...]

Reads every file of a checkpoint, or of all checkpoints of a run, and holds it against the manifest: size, checksum, and
every tensor. Nothing is changed. Exit code 0: all whole; 4: the file is named.
"""


def run(argv: list[str]) -> int:
    """Check and tell.

    Returns:
        0 where everything is whole, else 4.
    """
    words = take_apart("verify", argv, USAGE)
    if words is None:
        return EXIT_DONE
    if words.overrides or not words.positional:
        raise ConfigError("optrun verify takes run directories or checkpoints: optrun verify RUN_DIR|CHECKPOINT")
    return max(_verify(word) for word in words.positional)


def _verify(word: str) -> int:
    from optrun.artifacts.checkpoint import checkpoint_folders
    from optrun.artifacts.manifest import problems
    from optrun.artifacts.retention import pointed
    from optrun.resume import locate
    from optrun.training.progress import size

    target = locate(word)
    folders = [target.checkpoint] if target.checkpoint is not None else checkpoint_folders(target.run)
    table = Table(title=str(target.checkpoint or target.run.path), title_justify="left", title_style="dim")
    table.add_column("checkpoint")
    table.add_column("size", justify="right")
    table.add_column("verdict")
    wrong: list[str] = []
    for folder in folders:
        found = problems(folder)
        wrong += found
        total = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        table.add_row(folder.name, size(total), "[red]damaged[/]" if found else "[green]whole[/]")
    if not folders:
        wrong.append(f"{target.run.checkpoints}: no checkpoint there.")
    for pointer in () if target.checkpoint is not None else (target.run.best, target.run.last):
        if pointer.is_file() and pointed(pointer) is None:
            wrong.append(f"{pointer}: names a checkpoint that is not there.")
    Console().print(table)
    for sentence in wrong:
        sys.stderr.write(f"optrun: {sentence}\n")
    return EXIT_NO_CHECKPOINT if wrong else EXIT_DONE
