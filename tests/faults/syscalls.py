"""Stand between the program and the operating system.

Count, record, refuse, or die at a chosen call.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("open", "write", "ftruncate", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Syscalls:
    """Sees every call that changes something beneath a folder.

    Args:
        folder: Only calls about what lies in it count.
        at: Number of the call, from 1, before which `act` is called; 0: never.
        act: Gets the name of the call, its arguments and the real function; what it returns is
            returned. It may raise.
        record: Gets every call as name, resolved path(s) and written bytes, after it was done.
    """

    def __init__(
        self,
        folder: Path,
        at: int = 0,
        act: Callable[[str, tuple[Any, ...], Callable[..., Any]], Any] | None = None,
        record: Callable[[str, tuple[Any, ...]], None] | None = None,
    ) -> None:
        self.folder = str(folder.resolve())
        self.at = at
        self.act = act
        self.record = record
        self.count = 0
        self._real = {name: getattr(os, name) for name in NAMES}

    def __enter__(self) -> Self:
        for name in NAMES:
            setattr(os, name, self._stand_in(name))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _stand_in(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            paths = self._paths(name, args, kwargs)
            if not paths or not any(
                path == self.folder or path.startswith(self.folder + "/") for path in paths
            ):
                return real(*args, **kwargs)
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            self.count += 1
            if self.count == self.at and self.act is not None:
                return self.act(name, args, partial(real, **kwargs))
            result = real(*args, **kwargs)
            if self.record is not None:
                written = bytes(args[1])[:result] if name == "write" else b""
                self.record(name, (*paths, written) if name == "write" else tuple(paths))
            return result

        return call

    def _paths(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        if name in ("write", "ftruncate", "fsync"):
            return [self._of_descriptor(args[0])]
        given = args[:2] if name in ("rename", "replace") else args[:1]
        base = (
            self._of_descriptor(kwargs["dir_fd"])
            if kwargs.get("dir_fd") is not None
            else str(Path.cwd())
        )
        return [
            os.path.normpath(Path(base, os.fspath(path)))
            for path in given
            if not isinstance(path, int)
        ]

    def _of_descriptor(self, descriptor: int) -> str:
        try:
            return str(Path(f"/proc/self/fd/{descriptor}").readlink())
        except OSError:
            return ""


def calls_of(folder: Path, work: Callable[[], Any]) -> int:
    """How many such calls a piece of work makes."""
    with Syscalls(folder) as calls:
        work()
    return calls.count


def refuse(number: int) -> Callable[..., Any]:
    """The call fails with this errno; of a write, half has been done."""

    def act(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
        if name == "write" and number == errno.ENOSPC:
            real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(number, os.strerror(number))

    return act


def die(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
    """The process ends without another word; of a write, half has been done."""
    if name == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])
    os._exit(9)


def deaths(folder: Path, work: Callable[[], Any], into: Path, every: int = 1) -> list[Path]:
    """Do a piece of work once, and copy a folder before each of its calls, as a process that
    dies there leaves it.

    Of a write, half has been done. Dying in a process of its own costs a fork for each call and
    leaves the same files: what is in memory is lost in both.

    Args:
        folder: What is copied; only calls about what lies in it count.
        work: Comes to its end.
        into: Where the copies go, each in a folder named after the number of its call.
        every: Of so many calls one, from the first on.

    Returns:
        The copies, in order.
    """
    copies: list[Path] = []
    with Syscalls(folder) as calls:

        def act(name: str, args: tuple[Any, ...], real: Callable[..., Any]) -> Any:
            calls.at += every
            copies.append(into / str(calls.count))
            half = bytes(args[1])[: len(args[1]) // 2] if name == "write" else b""
            done = real(args[0], half) if half else 0
            shutil.copytree(folder, copies[-1], symlinks=True)
            return done + real(args[0], bytes(args[1])[done:]) if name == "write" else real(*args)

        calls.at, calls.act = 1, act
        work()
    return copies


def in_child(work: Callable[[], Any]) -> int:
    """Do something in a forked process; its exit code, 0 where it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
