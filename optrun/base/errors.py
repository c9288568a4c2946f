"""Errors of optrun: one message and one exit code each.

The command line turns every `OptrunError` into its message on stderr and its `exit_code`;
everything else is a defect and keeps its traceback.
"""

import difflib
import errno
import os
import re
import signal
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NONFINITE = 3
EXIT_NO_CHECKPOINT = 4
EXIT_LOCKED = 5
EXIT_STORAGE = 74
EXIT_STOPPED_EARLY = 75


class OptrunError(Exception):
    """An expected error, with advice for the user."""

    exit_code = EXIT_FAILED


class ConfigError(OptrunError, ValueError):
    """The command line or a configuration value is wrong."""

    exit_code = EXIT_USAGE


class NonFiniteError(OptrunError):
    """Loss, gradient or weights hold NaN or inf, and the policy is to stop."""

    exit_code = EXIT_NONFINITE


class CheckpointError(OptrunError):
    """A checkpoint is needed and there is no usable one."""

    exit_code = EXIT_NO_CHECKPOINT


class OtherFormatError(CheckpointError):
    """A file of an unknown format: neither read nor touched."""


class UnreadableFileError(CheckpointError, ValueError):
    """A file of the wrong kind, too large, too deep or invalid."""


class ForeignCheckpointError(CheckpointError):
    """A complete checkpoint of another run."""


class LockedError(OptrunError):
    """Another process writes this run directory."""

    exit_code = EXIT_LOCKED


class StorageError(OptrunError):
    """The disk refused: full, read-only, or gone."""

    exit_code = EXIT_STORAGE


class DiskFullError(StorageError):
    """The disk is full or broken; the same may succeed later."""


class StoppedEarly(OptrunError):
    """A signal or the time budget ended the run after everything was saved."""

    exit_code = EXIT_STOPPED_EARLY


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out.

    torch has an exception class for accelerators; on the CPU only the message says it.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"))
        True
        >>> is_out_of_memory(RuntimeError("shapes differ"))
        False
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    phrases = (
        "allocate memory",
        "out of memory",
        "alloc_failed",
    )  # of torch, of its devices, of cuBLAS and cuDNN
    return isinstance(error, (RuntimeError, OSError)) and any(
        phrase in str(error).lower() for phrase in phrases
    )


DISK_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
"""What the operating system says of a disk, whatever the file."""


def is_refused_by_disk(error: BaseException) -> bool:
    """Tell whether an error means a full or broken disk.

    True for a `DiskFullError`; for an OSError with one of `DISK_CODES`, such as ENOSPC; and for a
    `StorageError` that was raised `from` such an OSError.

    Example:
        >>> is_refused_by_disk(DiskFullError("run/checkpoints: it needs 9 bytes, 3 are free."))
        True
        >>> is_refused_by_disk(StorageError("run/model.safetensors: No space left on device."))
        False
    """
    if isinstance(error, DiskFullError):
        return True
    refusal = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(refusal, OSError) and refusal.errno in DISK_CODES


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but tab and line end."""


def refuse_url(key: str, value: object) -> None:
    """Refuse a URL as a local path: `s3://bucket/run` would create a folder named `s3:`.

    Args:
        key: The key or argument, for the message.
        value: A path, or a list of them; anything else passes.

    Raises:
        ConfigError: It begins with the scheme of a URL.
    """
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and _URL.match(text):
            safe_text = re.sub(r"//[^/]*@", "//", text)  # without user name and password
            raise ConfigError(
                f"{key}={safe_text}: a URL. Expected a path: optrun reads and writes local files."
                " Mount the storage, or copy the files to this machine first."
            )


def refuse_existing(key: str, path: str | os.PathLike[str]) -> None:
    """Refuse to write over a file, a folder or a link that leads nowhere.

    Args:
        key: The key or option with its value, for the message.
        path: Where something is to be written.

    Raises:
        ConfigError: Something is there.
    """
    if os.path.lexists(path):
        raise ConfigError(
            f"{key}: already exists, and nothing is overwritten. Choose another name."
        )


def show_cursor() -> None:
    """Show the cursor of the terminal again, before a process with a live display ends.

    Writes nothing if standard output is no terminal.
    """
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a final full stop; it may be empty."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(". ")


def message_in_one_line(error: BaseException) -> str:
    r"""Write the message of an error in one line of at most 300 characters; if empty, its class.

    Example:
        >>> message_in_one_line(ValueError("two\n  lines")), message_in_one_line(ValueError())
        ('two lines', 'ValueError')
    """
    message = " ".join(str(error).split()) or type(error).__name__
    if len(message) <= 300:
        return message
    return f"{message[:300]} ..."


def printable(text: str) -> str:
    r"""Escape control characters of a text from outside, such as a file's name, as `\x1b`.

    Line ends stay.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def nearest(name: str, candidates: Iterable[str], *, limit: int = 3) -> list[str]:
    """List the candidates whose spelling is near a name, the nearest first.

    Args:
        name: A mistyped name.
        candidates: The valid names.
        limit: How many to return at most.

    Returns:
        Candidates whose likeness is at least 0.6, and at most 0.1 below the best. For a name
        without a dot the last part of a dotted candidate counts, so that `max_steps` finds
        `training.max_steps`.

    Example:
        >>> nearest("lam", ["lamb", "adamw"])
        ['lamb']
        >>> nearest("max_step", ["training.max_steps", "seed"])
        ['training.max_steps']
        >>> nearest("dev.csv", ["train.csv"])
        []
    """
    likeness = {candidate: _likeness(name, candidate) for candidate in candidates}
    # A candidate far behind the best was not meant: 0.6, or the best less 0.1 if that is more.
    least = max([0.6, *(value - 0.1 for value in likeness.values())])
    close = sorted(candidate for candidate, value in likeness.items() if value >= least)
    return sorted(close, key=lambda candidate: -likeness[candidate])[:limit]


def _likeness(name: str, candidate: str) -> float:
    """Compute how alike a name and a candidate are, from 0 to 1, whatever their case.

    The last part of a dotted candidate counts, too, unless the name has a dot: two dotted names
    with the same end share a key of many groups, or the ending of a file. It counts a little less
    than the whole candidate, so that `lr` is nearer to `lr` than to `optimizer.lr`.
    """
    ratio = difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()
    if "." in name:
        return ratio
    end = candidate.rpartition(".")[2].lower()
    return max(ratio, 0.98 * difflib.SequenceMatcher(None, name.lower(), end).ratio())


def refuse_format(where: object, version: object, known: int) -> None:
    """Refuse a file of another format, before the rest of it is read.

    Args:
        where: The file.
        version: The value of its format key. Anything but an integer passes: the caller refuses
            such a file when it reads the rest.
        known: The format that this version of optrun reads.

    Raises:
        OtherFormatError: The file has an earlier or a later format.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version == known:
        return
    raise OtherFormatError(
        f"{where}: format {version}, and this optrun reads format {known}. Nothing was changed: use"
        " the optrun that wrote it, or start a new run."
    )


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str | None = None) -> str:
    """Write a sentence with the nearest valid names, or with all of them if none is near.

    otherwise: The sentence in place of all names; None: they are listed.

    Example:
        >>> did_you_mean("lam", ["lamb", "adamw"])
        'Did you mean lamb?'
        >>> did_you_mean("zzz", ["lamb", "adamw"])
        'Valid: adamw, lamb.'
    """
    pool = sorted(set(candidates))
    close = nearest(name, pool)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    if otherwise is not None or not pool:
        return otherwise or ""
    return f"Valid: {', '.join(pool)}."


def signal_name(number: int) -> str:
    """Name a signal, or give its number.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    return next((member.name for member in signal.Signals if member == number), f"signal {number}")
