"""Which module runs a command line. Imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import sys

from optrun import __version__
from optrun.commands.verbs import VERBS
from optrun.errors import EXIT_DONE

TRAIN = "optrun.commands.train"
ASKED = (["query=bash"], ["query=fish"], ["query=zsh"])
"""What the function of a shell says after `-sc` at each TAB; answered before Hydra is imported."""


def dispatch(argv: list[str]) -> int:
    """Load the plugins that are named, and run the verb.

    Args:
        argv: Command-line arguments after `optrun`.

    Returns:
        The exit code.

    Raises:
        OptrunError: Of the verb.
    """
    try:
        if any(token.startswith(("--plugin", "--allow-changed-plugins")) for token in argv):
            from optrun.registry import plugins

            argv = plugins.take(argv)
        if "--version" in argv and argv[0] not in VERBS:  # Hydra would tell its own
            sys.stdout.write(f"optrun {__version__}\n")
            return EXIT_DONE
        if argv and argv[0] in VERBS:
            module, args = VERBS[argv[0]], argv[1:]
        elif argv[:1] == ["-sc"] and argv[1:2] in ASKED and "COMP_LINE" in os.environ:
            module, args = "optrun.commands.completion", argv[1:]
        else:
            module, args = TRAIN, argv
        code: int = importlib.import_module(module).run(args)
        return code
    except BrokenPipeError:
        # The reader of a pipe left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
