"""Shell completion: what Hydra offers, and the verbs."""

import contextlib
import io
import os
import re

from optrun.cli.verbs import VERBS
from optrun.config.hydra_internals import Hydra
from optrun.config.registry import plugins

_SAFE = re.compile(r"[\w./=+,@%~:-]+")
"""What is offered: bash expands candidates, so that the name of a file could be a command."""


def candidates(hydra: Hydra, config_name: str, line: str) -> list[str]:
    """Complete the last word of a line.

    Empty if the line has an error, whose message would break the prompt.

    Args:
        hydra: Composes configurations, also from the user's folders.
        config_name: The recipe to compose.
        line: The command so far, with the program's name; a blank at the end begins a new word.
    """
    tokens = line.split()[1:]
    last = "" if line[-1:].isspace() or not tokens else tokens[-1]
    verbs = VERBS if tokens in ([], [last]) else ()
    if tokens and tokens[0] in VERBS and tokens != [last]:
        overrides = [word for word in tokens[1:] if "=" in word]
        tokens = overrides if overrides[-1:] == [last] or not last else [*overrides, last]
    answer = io.StringIO()
    with (
        contextlib.suppress(Exception, SystemExit),
        contextlib.redirect_stdout(answer),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        tokens = plugins.take(tokens)
        os.environ["COMP_LINE"] = " ".join(["optrun", *tokens, *([] if last else [""])])
        hydra.shell_completion(config_name=config_name, overrides=["query=bash"])
    offered = {*answer.getvalue().split(), *verbs}
    return sorted(word for word in offered if word.startswith(last) and _SAFE.fullmatch(word))
