"""`optrun report`: compare finished and unfinished runs or sweeps."""

from __future__ import annotations

from pathlib import Path

from optrun.commands.words import take_apart
from optrun.errors import EXIT_DONE, ConfigError

USAGE = """
optrun report DIR [DIR ...] [--out DIR] [--baseline NAME] [--metric NAME]

Compares runs, sweeps, or folders of them: a ranked table here, report.html, report.md and report.csv on disk (in the
first DIR, or --out). Reads files only.
"""


def run(argv: list[str]) -> int:
    """Compare and tell.

    Returns:
        0.
    """
    words = take_apart("report", argv, USAGE, {"--out": True, "--baseline": True, "--metric": True})
    if words is None:
        return EXIT_DONE
    if words.overrides or not words.positional:
        raise ConfigError("optrun report takes directories: optrun report DIR [DIR ...]")
    from rich.console import Console

    from optrun.report.build import report

    folders = [Path(word).expanduser() for word in words.positional]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such directory.")
    out = words.flags.get("--out")
    report(
        folders,
        out=None if out is None else Path(out),
        baseline=words.flags.get("--baseline"),
        metric=words.flags.get("--metric"),
        console=Console(),
    )
    return EXIT_DONE
