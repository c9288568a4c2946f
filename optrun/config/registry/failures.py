"""Describe errors in the code of plugins, by file and line."""

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
    """Describe an error from the code of a plugin, by its last line in a plugin's file.

    Args:
        error: The error that ended a command, with its traceback.

    Returns:
        The error with the message to show; None if no plugin's file occurs in the traceback.
    """
    last = _last_position(error, _plugin_files())
    if last is None:
        return None
    position, names = last
    return OptrunError(
        f"{position}: {_description(error)}. It registers {', '.join(names)}. "
        "Fix it there; HYDRA_FULL_ERROR=1 shows the traceback."
    )


def position_behind(error: OptrunError) -> str | None:
    """Name file, line and function of a plugin behind an error.

    Args:
        error: An error with a message for the user.

    Returns:
        Such as `my_lion.py, line 12, in step`. None if the error has no cause, no plugin's file
        occurs, or the plugin raised the error itself, whose message then says what is wrong.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if error.__cause__ is None or not frames:
        return None
    files = _plugin_files()
    is_raised_by_plugin = frames[-1].filename in files
    last = _last_position(error, files)
    if is_raised_by_plugin or last is None:
        return None
    position, _ = last
    return position


def _last_position(
    error: BaseException, files: dict[str, tuple[str, list[str]]]
) -> tuple[str, list[str]] | None:
    """Find the last frame of an error in some files.

    Args:
        error: An error with its traceback and causes.
        files: See `_plugin_files`.

    Returns:
        Label, line and function of the frame as text, and the names that its file registered, such
        as `("my_lion.py, line 12, in step", ["optimizer=my_lion"])`; None if no frame is in these
        files.
    """
    frames = [frame for frame in _frames(error) if frame[0] in files]
    if not frames:
        return None
    file, line, function = frames[-1]
    label, names = files[file]
    return f"{label}, line {line}, in {function}", names


def _frames(error: BaseException) -> Iterator[Frame]:
    """Yield the frames of an error, after the frames of its causes.

    So the last frame is the one where `error` itself was raised. Frames that a data loader's worker
    wrote into the message of an error count, too; they come right after the error's own.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        raised_from_itself = cause.__cause__ is cause  # `raise error from error`
        cause = cause.__context__ if raised_from_itself else cause.__cause__
    for link in reversed(chain):
        for frame in traceback.extract_tb(link.__traceback__):
            yield frame.filename, frame.lineno, frame.name
        for file, line, function in _WORKERS_FRAME.findall(str(link)):
            yield file, int(line), function


def _description(error: BaseException) -> str:
    r"""Describe an error by type and message, on one line of at most 500 characters.

    For the error of a data loader's worker: the last line, which has the original type and message.

    Example:
        >>> _description(ValueError("two\n  lines."))
        'ValueError: two lines'
    """
    text = str(error)
    if _WORKERS_FRAME.search(text):
        return text.strip().splitlines()[-1].rstrip(".")
    line = " ".join(text.split())[:500].rstrip(".")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _plugin_files() -> dict[str, tuple[str, list[str]]]:
    """Map each file with registered classes of others to its label and registered names.

    The label is what was typed after `--plugin`, else the path. A file has two entries if its path
    is a link: one for the path, one for the resolved path. One entry is, for example,
    `"/home/me/my_lion.py": ("my_lion.py", ["optimizer=my_lion"])`.
    """
    typed_by_path: dict[str, str] = {}
    plugins = sys.modules.get("optrun.config.registry.plugins")
    if plugins is not None:
        typed_by_path = {record["path"]: record["plugin"] for record in plugins.LOADED.values()}
    files: dict[str, tuple[str, list[str]]] = {}
    for row in registry.of_others():
        file = getattr(sys.modules.get(row.target.__module__), "__file__", None)
        if file is None:
            continue
        resolved = str(Path(file).resolve())
        label = typed_by_path.get(resolved, resolved)
        for path in {file, resolved}:
            _, names = files.setdefault(path, (label, []))
            names.append(f"{row.kind}={row.name}")
    return files
