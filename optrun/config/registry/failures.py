"""Describe errors in the code of plugins, by file and line."""

import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import NamedTuple

from optrun.base.errors import OptrunError
from optrun.config import registry

_WORKERS_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
"""A frame in the text that torch (`torch._utils.ExceptionWrapper`) makes of an error in a
worker of a data loader.
"""


class PluginFile(NamedTuple):
    """A file that registers choices."""

    label: str
    """What was typed after `--plugin`, else the path."""
    names: list[str]
    """What it registers, such as `optimizer=my_lion`."""

    def position(self, frame: FrameSummary) -> str:
        """Write a frame in this file, such as `my_lion.py, line 12, in step`."""
        return f"{self.label}, line {frame.lineno}, in {frame.name}"


def failure_of_others(error: BaseException) -> OptrunError | None:
    """Describe an error from the code of a plugin, by its last line in a plugin's file.

    Args:
        error: The error that ended a command, with its traceback.

    Returns:
        The error with the message to show; None if no plugin's file occurs in the traceback.
    """
    plugins = _plugin_files()
    frame = _last_frame(error, plugins)
    if frame is None:
        return None
    plugin = plugins[frame.filename]
    return OptrunError(
        f"{plugin.position(frame)}: {_description(error)}. It registers {', '.join(plugin.names)}. "
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
    frames = extract_tb(error.__traceback__)
    if error.__cause__ is None or not frames:
        return None
    plugins = _plugin_files()
    # The last frame is where `error` was raised: its message says what is wrong.
    is_raised_by_plugin = frames[-1].filename in plugins
    frame = _last_frame(error, plugins)  # also in the causes of the error
    if is_raised_by_plugin or frame is None:
        return None
    return plugins[frame.filename].position(frame)


def _last_frame(error: BaseException, files: Container[str]) -> FrameSummary | None:
    """Find the last frame of an error and its causes in some files; None if there is none."""
    last = None
    for frame in _frames(error):
        if frame.filename in files:
            last = frame
    return last


def _frames(error: BaseException) -> Iterator[FrameSummary]:
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
        yield from extract_tb(link.__traceback__)
        for file, line, function in _WORKERS_FRAME.findall(str(link)):
            yield FrameSummary(file, int(line), function)


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


def _plugin_files() -> dict[str, PluginFile]:
    """Map the path of each file that registers choices, but not optrun's own, to what is in it.

    `optrun --plugin my_lion.py` gives, for example, `"/home/me/my_lion.py":
    PluginFile("my_lion.py", ["optimizer=my_lion"])`. A file has two entries if its path is a link:
    one for the path, as it stands in tracebacks, and one for the resolved path.
    """
    typed_by_path: dict[str, str] = {}
    plugins = sys.modules.get("optrun.config.registry.plugins")
    if plugins is not None:
        typed_by_path = {record["path"]: record["plugin"] for record in plugins.LOADED.values()}
    files: dict[str, PluginFile] = {}
    for row in registry.of_others():
        file = getattr(sys.modules.get(row.target.__module__), "__file__", None)
        if file is None:
            continue
        resolved = str(Path(file).resolve())
        label = typed_by_path.get(resolved, resolved)
        for path in {file, resolved}:
            entry = files.setdefault(path, PluginFile(label, []))  # one for all of its rows
            entry.names.append(f"{row.kind}={row.name}")
    return files
