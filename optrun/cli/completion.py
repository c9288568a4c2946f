"""Shell completion: what Hydra offers, and the verbs."""

from __future__ import annotations

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

    An error in the line offers nothing: its message would stand in the middle of a prompt.

    Args:
        hydra: Over the user's folders.
        config_name: What is composed.
        line: The command so far, the program's name first; a blank at its end begins a new word.
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
