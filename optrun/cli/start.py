"""`optrun start`: say what data hold, which task and model fit, and the commands to run."""

from __future__ import annotations

import shlex
import sys
import textwrap

from optrun.base.errors import EXIT_DONE, ConfigError, printable
from optrun.cli.parser import VerbArguments, VerbParser

_WIDTH = 108
"""Characters of a line, behind its heading."""


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "start",
        ["FILE|FOLDER|NAME"],
        """
Reads data and prints what it understood: columns and their roles, three rows, labels, what would
be cut. Proposes a task, a model and a small comparison of optimizers, as two commands to copy;
nothing where it is not sure. Keys given here go into every command and decide what they name, such
as task=masked_lm or data.label_column=verdict. Nothing is written, but with run=true, which runs
the first command.
""",
        keys={"run": "true"},
        overrides="KEY",
    )
    made.add_config_dir()
    return made


def run(arguments: VerbArguments) -> int:
    """Print what is there and what to do with it, and with `run=true` do the first of it.

    Returns:
        0, or the exit code of the run.
    """
    runs, config_dir = arguments.flag("run"), arguments.options.config_dir
    place = arguments.positional[0]
    if not place.strip():
        raise ConfigError("optrun start '': expected a file, a folder or a name.")
    for token in arguments.overrides:
        if token.startswith(("data=", "data.train=")):
            raise ConfigError(
                f"{token}: optrun start finds it by FILE, here {place}; leave it out."
            )
        if token.lstrip("+").startswith(("resume=", "branch_from=", "search.", "hydra.sweep")):
            raise ConfigError(
                f"{token}: has no effect on optrun start, which proposes a new run; leave it out."
            )
    from optrun.cli.proposal import propose

    made = propose(place, arguments.overrides, config_dir, _say)
    more = [] if config_dir is None else ["--config-dir", config_dir]
    for number, (what, words) in enumerate(made.commands(), 1):
        sys.stdout.write(f"\n{number}. {what}\n   optrun {shlex.join([*words, *more])}\n")
    if not runs:
        sys.stdout.write("\nrun=true runs the first; nothing was written.\n")
        return EXIT_DONE
    from optrun.cli.train import run as train

    return train([*made.overrides, *more])


def _say(name: str, *lines: str) -> None:
    """Print a heading of ten characters and its lines."""
    wrapped = [part.rstrip() for line in lines for part in _wrapped(printable(line))]
    for at, line in enumerate(wrapped):
        sys.stdout.write(f"{'' if at else name:<10}{line}".rstrip() + "\n")
    sys.stdout.flush()


def _wrapped(line: str) -> list[str]:
    """Split a line between words, each part as far in as it begins."""
    inside = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, _WIDTH, subsequent_indent=inside, replace_whitespace=False) or [""]
