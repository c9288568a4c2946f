"""Errors of a command as messages on stderr and exit codes."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from optrun.base.errors import (
    DISK_CODES,
    EXIT_STOPPED_EARLY,
    ConfigError,
    OptrunError,
    StoppedEarly,
    StorageError,
    printable,
)


def guarded(verb: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a verb; turn every error into a message on stderr and an exit code.

    Args:
        verb: Function that takes the arguments and returns an exit code.
        argv: Command-line arguments after `optrun`.

    Returns:
        The exit code.
    """
    with _interrupts() as heard:
        try:
            return verb(argv)
        except KeyboardInterrupt:
            pass
        except OptrunError as error:
            if not heard or isinstance(error, StoppedEarly):
                return say(error, argv)
        except (Exception, SystemExit) as error:
            if not heard or not isinstance(error, OSError):
                return _say_other(error, argv)
    sys.stderr.write("optrun: stopped; nothing was running that could be saved\n")
    return 130


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Record each SIGINT while the block lasts.

    Libraries may turn a KeyboardInterrupt into another error, so its type does not tell.
    """
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    hears = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears:
        signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        if hears:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def storage_error(error: OSError) -> StorageError | None:
    """Translate an error of the operating system about a file or a disk.

    Every error that names a file is one, such as a missing file or one without permission. Of the
    others only those of a full, broken or read-only disk are; None for the rest, such as a refused
    connection.
    """
    if error.filename is not None:
        return StorageError(f"{error.filename}: {error.strerror}.")
    if error.errno not in DISK_CODES:
        return None
    return StorageError(
        f"storage refused: {error.strerror}. Make room, or choose another directory."
    )


def _say_other(error: Exception | SystemExit, argv: list[str]) -> int:
    """Print an error of a disk or a plugin; raise any other error."""
    from optrun.config.registry.failures import failure_of_others

    message: OptrunError | None = None
    if not (isinstance(error, OSError) and error.errno in DISK_CODES):
        message = failure_of_others(error)
    if message is None and isinstance(error, OSError):
        message = storage_error(error)
    if message is None:
        raise error
    return say(message, argv, error)


def say(error: OptrunError, argv: list[str], cause: BaseException | None = None) -> int:
    """Print an error on stderr.

    Args:
        error: The error that ended the command.
        argv: Arguments after `optrun`.
        cause: The original error, if `error` was made from it.

    Returns:
        The exit code.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(cause or error)
    kind = "stopped" if error.exit_code == EXIT_STOPPED_EARLY else "error"
    sys.stderr.write(f"optrun: {kind}: {printable(_located(error, argv))}\n")
    sys.stderr.flush()
    return error.exit_code


def _located(error: OptrunError, argv: list[str]) -> str:
    """Prefix the message with the position in the user's file.

    It is the line of a value in a YAML file, or of a plugin's code.
    """
    message = str(error)
    position = None
    if isinstance(error, ConfigError):
        from optrun.config import yaml_files

        typed = any(message.startswith(f"{token.split('=')[0].lstrip('+')}=") for token in argv)
        position = None if typed else yaml_files.location(message)
    if position is None and error.__cause__ is not None and "optrun.config.registry" in sys.modules:
        from optrun.config.registry.failures import position_behind

        position = position_behind(error)
    if position is None:
        return message
    return f"{position}: {message}"
