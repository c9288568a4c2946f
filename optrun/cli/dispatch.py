"""Choose the module that runs a command line. Imports nothing heavy."""

import importlib
import os
import sys

from optrun import __version__
from optrun.base.errors import EXIT_DONE
from optrun.cli.verbs import VERBS


def dispatch(argv: list[str]) -> int:
    """Load the named plugins, and run the verb (a subcommand such as `report`), else train.

    `--version` and a lone `--help` are answered here. A closed pipe, as of `| head`, is no error.

    Args:
        argv: Command-line arguments after `optrun`.

    Returns:
        The exit code.

    Raises:
        OptrunError: The verb failed.
    """
    try:
        if any(token.startswith(("--plugin", "--allow-changed-plugins")) for token in argv):
            from optrun.config.registry import plugins

            argv = plugins.take(argv)
        if "--version" in argv and argv[0] not in VERBS:  # Hydra would tell its own
            sys.stdout.write(f"optrun {__version__}\n")
            return EXIT_DONE
        if argv and argv[0] in VERBS:
            verb = importlib.import_module(f"optrun.cli.{argv[0]}")
            arguments = verb.parser().parse(argv[1:])
            return EXIT_DONE if arguments is None else int(verb.run(arguments))
        if argv in (["--help"], ["-h"]):
            from optrun.cli.overview import overview

            sys.stdout.write(overview(None))
            return EXIT_DONE
        from optrun.cli import train

        return train.run(argv)
    except BrokenPipeError:
        # The reader of a pipe left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
