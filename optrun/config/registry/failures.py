"""Errors raised in the code of others, told by file and line."""

import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from optrun.base.errors import OptrunError
from optrun.config import registry

_WORKERS_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
"""A frame in the text that torch (`torch._utils.ExceptionWrapper`) makes of an error in a
worker of a data loader.
"""


Frame = tuple[str, int | None, str]
"""File, line and function."""


def failure_of_others(error: BaseException) -> OptrunError | None:
    """Describe an error by its last frame in a plugin's file.

    Args:
        error: What a run, or another command, was ended by; with its traceback.

    Returns:
        The message for it; None: no file that registered a choice had a part in it.
    """
    position, names = _last(error, _files())
    if not names:
        return None
    return OptrunError(
        f"{position}: {_description(error)}. It registers {', '.join(names)}. "
        "Fix it there; HYDRA_FULL_ERROR=1 shows the traceback."
    )


def position_behind(error: OptrunError) -> str | None:
    """Name the line in a plugin's file behind a message.

    Args:
        error: Raised from another one.

    Returns:
        File, line and function; None: no such file had a part in it, or the message is the plugin's
        own.
    """
    frames = traceback.extract_tb(error.__traceback__)
    files = _files() if error.__cause__ is not None and frames else {}
    return None if not files or frames[-1].filename in files else _last(error, files)[0]


def _last(
    error: BaseException, files: dict[str, tuple[str, list[str]]]
) -> tuple[str | None, list[str]]:
    """Find the last frame in a plugin's file, and the registered names of the file.

    None and nothing without one.
    """
    frames = [frame for frame in _frames(error) if frame[0] in files]
    if not frames:
        return None, []
    _, line, function = frames[-1]
    label, names = files[frames[-1][0]]
    return f"{label}, line {line}, in {function}", names


def _frames(error: BaseException | None) -> Iterator[Frame]:
    """Yield the frames of an error, after the frames of its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = (
            error.__context__ if error.__cause__ is error else error.__cause__
        )  # `raise error from error`
    for link in reversed(chain):
        for frame in traceback.extract_tb(link.__traceback__):
            yield frame.filename, frame.lineno, frame.name
        for file, line, function in _WORKERS_FRAME.findall(str(link)):
            yield file, int(line), function


def _description(error: BaseException) -> str:
    """Describe an error by type and message, on one line."""
    text = str(error)
    if _WORKERS_FRAME.search(text):
        return text.strip().splitlines()[-1].rstrip(".")
    line = " ".join(text.split())[:500].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _files() -> dict[str, tuple[str, list[str]]]:
    """Map each file of registered foreign classes to a label and its registered names.

    The label is what was typed after `--plugin`, or the path. A file stands under its own path and
    its resolved one.
    """
    plugins = sys.modules.get("optrun.config.registry.plugins")
    plugin_names = (
        {record["path"]: record["plugin"] for record in plugins.LOADED.values()}
        if plugins is not None
        else {}
    )
    labels: dict[str, tuple[str, list[str]]] = {}
    for row in registry.of_others():
        file = getattr(sys.modules.get(row.target.__module__), "__file__", None)
        if file is not None:
            path = str(Path(file).resolve())
            names = [f"{row.kind}={row.name}"]
            for name in {file, path}:
                label, registered = labels.get(name, (plugin_names.get(path, path), []))
                labels[name] = (label, registered + names)
    return labels
