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
    """Complete the last token of a line by Hydra, and the first one also by the verbs.

    For `optrun expl` the list is `["explain"]`, for `optrun optimizer=la` it is
    `["optimizer=lamb", "optimizer=lazy_adam"]`. Nothing of Hydra's if the line has an error: its
    message would break the prompt.

    Args:
        hydra: Composes configurations, also from the user's folders.
        config_name: Name of the configuration to compose, as after `-cn`.
        line: The command so far, with the program's name; a blank at the end begins a new token.
    """
    tokens = line.split()[1:]
    unfinished = "" if line[-1:].isspace() or not tokens else tokens[-1]
    is_first_token = tokens in ([], [unfinished])

    # 1. Leave the verb and its paths out: Hydra completes keys alone.
    if tokens and tokens[0] in VERBS and not is_first_token:
        finished = tokens[1:-1] if unfinished else tokens[1:]
        tokens = [token for token in finished if "=" in token]
        if unfinished:
            tokens.append(unfinished)

    # 2. Ask Hydra, which reads the line from COMP_LINE and prints its answer, words with
    # blanks between. An error, also of a plugin, is swallowed: Hydra then offers nothing.
    answer = io.StringIO()
    with (
        contextlib.suppress(Exception, SystemExit),
        contextlib.redirect_stdout(answer),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        tokens = plugins.take(tokens)  # loads `--plugin X`, and leaves these words out
        blank_at_end = "" if unfinished else " "
        os.environ["COMP_LINE"] = " ".join(["optrun", *tokens]) + blank_at_end
        hydra.shell_completion(config_name=config_name, overrides=["query=bash"])

    # 3. Keep what continues the unfinished token.
    offered = set(answer.getvalue().split())
    if is_first_token:
        offered |= set(VERBS)
    return sorted(word for word in offered if word.startswith(unfinished) and _SAFE.fullmatch(word))
