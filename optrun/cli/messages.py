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
from optrun.config.tokens import key_of


def guarded(verb: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a verb; turn every expected error into a message on stderr and an exit code.

    After a SIGINT, an OSError and an OptrunError other than `StoppedEarly` count as caused by it:
    exit code 130. Unexpected errors are raised, unless they come from a disk or a plugin.

    Args:
        verb: A subcommand: a function that takes the arguments and returns an exit code.
        argv: Command-line arguments after `optrun`.

    Returns:
        The exit code.
    """
    with _recorded_interrupts() as interrupts:  # grows with each SIGINT
        try:
            return verb(argv)
        # Each of these returns, or raises, unless an interrupt caused the error.
        except KeyboardInterrupt:
            pass
        except OptrunError as error:
            # `StoppedEarly` says itself what was saved after the interrupt.
            if not interrupts or isinstance(error, StoppedEarly):
                return say(error, argv)
        except (Exception, SystemExit) as error:
            if not interrupts or not isinstance(error, OSError):
                return _say_unexpected(error, argv)
    sys.stderr.write("optrun: stopped; nothing was running that could be saved\n")
    return 130


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record each SIGINT during the context in the yielded list.

    Libraries may turn a KeyboardInterrupt into another error, so the error alone does not show an
    interrupt. Does nothing outside of the main thread, or if a program handles SIGINT itself.
    """
    interrupts: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, record)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def storage_error(error: OSError) -> StorageError | None:
    """Translate an error of the operating system about a file or a disk.

    That is any error that names a file, such as a missing one, and an error of a full, broken or
    read-only disk. None for others, such as a refused connection.
    """
    if error.filename is not None:
        return StorageError(f"{error.filename}: {error.strerror}.")
    if error.errno not in DISK_CODES:
        return None
    return StorageError(
        f"storage refused: {error.strerror}. Make room, or choose another directory."
    )


def _say_unexpected(error: Exception | SystemExit, argv: list[str]) -> int:
    """Print an error of a disk or a plugin; raise any other error.

    An error of a full, broken or read-only disk is told as such, even if it comes from a plugin.
    Then come errors from the code of a plugin, then other errors that name a file.

    Returns:
        The exit code.
    """
    from optrun.config.registry.failures import failure_of_others

    is_disk_error = isinstance(error, OSError) and error.errno in DISK_CODES
    message = None if is_disk_error else failure_of_others(error)
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
    """Put the position of the cause, if it is known, before the message of an error.

    The position is a line of the user's YAML file, for a ConfigError on a value that was not typed,
    or of a plugin: `lr=-1: expected ...` becomes `mine.yaml, line 2: lr=-1: expected ...`.
    """
    message = str(error)
    position = None
    # 1. A line of a YAML file, for the key at the start of the message.
    is_typed = any(message.startswith(f"{key_of(token)}=") for token in argv)
    if isinstance(error, ConfigError) and not is_typed:
        from optrun.config.yaml_files import location

        position = location(message)
    # 2. A line of a plugin. Without the registry none is loaded; it is not imported for this.
    if position is None and "optrun.config.registry" in sys.modules:
        from optrun.config.registry.failures import position_behind

        position = position_behind(error)
    if position is None:
        return message
    return f"{position}: {message}"
