"""The command line. Imports nothing heavy."""

import os
import sys

from optrun.cli.dispatch import dispatch
from optrun.cli.messages import guarded


def main() -> None:
    """Run the `optrun` script; never returns."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run a command line, after setting some environment variables unless the user did.

    Args:
        argv: Command-line arguments after `optrun`.

    Returns:
        The exit code; an `OptrunError` is printed on stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if "distributed=" in str(argv):
        # optrun reports a lost connection in a message, so torch's C++ stack is noise. A run on one
        # process keeps torch's warnings.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return guarded(dispatch, argv)
