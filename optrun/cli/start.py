"""`optrun start`: describe data, and propose a task, a model and two commands."""

import sys
import textwrap

from optrun.base import shell
from optrun.base.errors import EXIT_DONE, ConfigError, printable
from optrun.cli.parser import VerbArguments, VerbParser

_WIDTH = 118
"""Characters of a line, with its heading."""
_WITHOUT_EFFECT = ("data=", "data.train=", "resume=", "branch_from=", "search.", "hydra.sweep")
"""Beginnings of overrides that a proposed run cannot use: FILE gives the data, the run is new, and
the searched values are proposed."""


def parser() -> VerbParser:
    """Build the parser of `optrun start FILE|FOLDER|NAME`; `run=true` starts the run."""
    parser_of_verb = VerbParser(
        "start",
        ["FILE|FOLDER|NAME"],
        """
Reads data, prints what it detected, and suggests two commands: one trains, the other compares two
optimizers. If it is not sure, it suggests nothing. Keys that you give, such as task=masked_lm or
data.label_column=verdict, go into both commands. run=true runs the first one.
""",
        keys={"run": "true"},
        overrides="KEY",
    )
    parser_of_verb.add_config_dir()
    return parser_of_verb


def run(arguments: VerbArguments) -> int:
    """Describe the data and print two commands; with `run=true` run the first.

    Returns:
        0, or the exit code of the run.

    Raises:
        ConfigError: The name is empty, an override has no effect here, the data cannot be read, or
            the task is not clear from them.
    """
    config_dir = arguments.options.config_dir
    name = arguments.positional[0]
    if not name.strip():
        raise ConfigError("optrun start '': expected a file, a folder or a name.")
    for token in arguments.overrides:
        if token.lstrip("+").startswith(_WITHOUT_EFFECT):
            raise ConfigError(
                f"{token}: has no effect on optrun start, which reads {name} and proposes a new"
                " run; leave it out."
            )
    # 1. The proposal.
    from optrun.cli.proposal import propose

    proposal = propose(name, arguments.overrides, config_dir, _say)
    more = [] if config_dir is None else ["--config-dir", config_dir]
    for number, (title, tokens) in enumerate(proposal.commands(), 1):
        sys.stdout.write(f"\n{number}. {title}\n   optrun {shell.join([*tokens, *more])}\n")
    # 2. The run.
    if not arguments.flag("run"):
        sys.stdout.write(
            "\nYou can write these keys into a YAML file of your own: optrun -cn mine.yaml\n"
            "run=true runs the first command. Nothing was written.\n"
        )
        return EXIT_DONE
    from optrun.cli.train import run as train

    return train([*proposal.overrides, *more])  # the first command


def _say(heading: str, *lines: str) -> None:
    """Print lines, wrapped and indented, with a heading before the first one."""
    for line in lines:
        indented = f"{heading:<10}{printable(line)}"
        sys.stdout.write(textwrap.fill(indented, _WIDTH, subsequent_indent=" " * 10) + "\n")
        heading = ""
    sys.stdout.flush()
