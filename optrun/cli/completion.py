"""Shell completion: what Hydra offers, and the verbs."""

import contextlib
import io
import os
import re

from optrun.cli.verbs import VERBS
from optrun.config.hydra_internals import Hydra
from optrun.config.registry import plugins

_SAFE = re.compile(r"[\w./=+,@%~:-]+")
"""Words without characters that bash would expand: the name of a file could be a command."""


def candidates(hydra: Hydra, config_name: str, line: str) -> list[str]:
    """Complete the last word of a line: verbs for the first word, and what Hydra offers.

    Empty if the line has an error, whose message would break the prompt.

    Args:
        hydra: Composes configurations, also from the user's folders.
        config_name: The recipe to compose.
        line: The command so far, with the program's name; a blank at the end begins a new word.
    """
    words = line.split()[1:]
    unfinished = "" if line[-1:].isspace() or not words else words[-1]
    is_first_word = words in ([], [unfinished])
    if words and words[0] in VERBS and not is_first_word:
        # Hydra completes keys; it knows neither the verb nor its paths.
        finished = words[1:-1] if unfinished else words[1:]
        words = [word for word in finished if "=" in word]
        if unfinished:
            words.append(unfinished)
    answer = io.StringIO()
    with (
        contextlib.suppress(Exception, SystemExit),
        contextlib.redirect_stdout(answer),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        words = plugins.take(words)
        # Hydra reads the line from there; a blank at its end begins a new word.
        os.environ["COMP_LINE"] = " ".join(["optrun", *words, *([] if unfinished else [""])])
        hydra.shell_completion(config_name=config_name, overrides=["query=bash"])
    offered = {*answer.getvalue().split(), *(VERBS if is_first_word else ())}
    return sorted(word for word in offered if word.startswith(unfinished) and _SAFE.fullmatch(word))
