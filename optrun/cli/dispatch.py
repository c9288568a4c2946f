"""Which module runs a command line. Imports nothing heavy."""

from __future__ import annotations

import importlib
import os
import sys

from optrun import __version__
from optrun.base.errors import EXIT_DONE
from optrun.cli.verbs import VERBS, module

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
            from optrun.config.registry import plugins

            argv = plugins.take(argv)
        if "--version" in argv and argv[0] not in VERBS:  # Hydra would tell its own
            sys.stdout.write(f"optrun {__version__}\n")
            return EXIT_DONE
        argv = _verb_first(argv)
        if argv and argv[0] in VERBS:
            verb = importlib.import_module(module(argv[0]))
            arguments = verb.parser().parse(argv[1:])
            code: int = EXIT_DONE if arguments is None else verb.run(arguments)
            return code
        if argv[:1] == ["-sc"] and argv[1:2] in ASKED and "COMP_LINE" in os.environ:
            from optrun.cli import completion

            return completion.run(argv[1:])
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


def _verb_first(argv: list[str]) -> list[str]:
    """Put a verb before the options that were given before it."""
    if not argv[:1] or argv[0][:1] != "-" or not VERBS.keys() & set(argv):
        return argv
    from optrun.cli import hydra_options

    parsers = [
        hydra_options.parser(),
        *(importlib.import_module(module(verb)).parser() for verb in VERBS),
    ]
    with_value = {
        name
        for made in parsers
        for action in made._actions
        if action.nargs != 0
        for name in action.option_strings
    }
    at = 0
    while argv[at : at + 1] and argv[at][:1] == "-":
        at += 2 if argv[at] in with_value else 1
    return (
        [argv[at], *argv[:at], *argv[at + 1 :]] if argv[at : at + 1] and argv[at] in VERBS else argv
    )
