"""Programs and ranks that find torch, transformers and optrun imported.

A fork server has done it, once a session.

On a tiny model most of a rank's time is its imports, seconds each. What is forked here is a process
of its own, with a command line, an environment and an output of its own; that the real interpreter
starts alike is proved by tests with
`optrun_process`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, ClassVar

from tests import compose_cache
from tests.running import die_with_parent, kill_all, members

SPARES = 4
"""Processes that a program holds ready for the ranks that it starts.

Two, and two that are started again; `OPTRUN_TEST_SPARES` in its environment asks for more.
"""


def server() -> ForkServerContext:
    """The fork server, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.heavy_imports"])
    return context


class Program:
    """A program under way, in a session of its own.

    As far as tests need it like `subprocess.Popen`.

    Args:
        module: What `python -m` would run.
        args: Its arguments.
        folder: Where it runs.
        env: What it finds in its environment besides that of this process.
        merged: Whether standard error goes where standard output goes.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        merged: bool,
    ) -> None:
        self.args = [module, *args]
        number = len(list(folder.glob(".output-*")))
        self._out, self._err = folder / f".output-{number}", folder / f".errors-{number}"
        self._out.touch()
        output = self._out, self._out if merged else self._err
        environment = {**os.environ, **(env or {})}
        given = module, list(args), folder, environment, output, compose_cache.folder
        self._process = server().Process(target=_become, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that ended it; None: it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(
                self.args, timeout or 0.0, self._out.read_text(encoding="utf-8")
            )
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns what it has written."""
        self.wait(timeout)
        return self._out.read_text(encoding="utf-8"), self._err.read_text(
            encoding="utf-8"
        ) if self._err.exists() else ""

    def send_signal(self, number: int) -> None:
        """Send a signal, where it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def program(
    module: str,
    args: Sequence[str],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    merged: bool = True,
) -> Iterator[Program]:
    """As `running.session`: of the program's session nobody is left at the end."""
    begun = Program(module, args, folder, env, merged=merged)
    try:
        yield begun
    finally:
        begun.kill()
        begun.wait()
        while left := members(begun.pid):
            kill_all(left)


def optrun_preloaded(
    *words: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    module: str = "optrun",
) -> subprocess.CompletedProcess[str]:
    """As `running.optrun_process`."""
    with program(module, words, cwd, env, merged=False) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


# In the process that was forked
# -------------------------------------------------------------------------------------


def _become(
    module: str,
    args: list[str],
    folder: Path,
    env: dict[str, str],
    output: tuple[Path, Path],
    composed: Path | None,
) -> None:
    """Run a module as `python -m` does."""
    os.setsid()
    die_with_parent()
    os.chdir(folder)
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if composed is not None:
        compose_cache.install(composed)
    fork_ranks(int(env.get("OPTRUN_TEST_SPARES", SPARES)))
    _run(module, args, env)


def fork_ranks(spares: int) -> None:
    """Let an agent that this process becomes fork its ranks, so many in all."""
    for _ in range(spares):
        _Spare.ready.append(_Spare())
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    subprocess_handler.Popen = RankProcess  # type: ignore[misc, assignment]
    dynamic_rendezvous.get_method_name = (
        _no_name  # it looks through all modules there are, seconds with so many
    )


def _no_name(depth: int = 2) -> str:
    return "not looked for"


def _run(module: str, args: list[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it may be that of another test
    sys.path[:0] = [str(Path.cwd()), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = [module, *args]
    sys.modules.pop(module, None)
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


class _Spare:
    """A process that waits to be a rank.

    Forked before its parent has begun anything, as one that is started anew.
    """

    ready: ClassVar[list[_Spare]] = []

    def __init__(self) -> None:
        self.pipe, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            for other in _Spare.ready:
                other.pipe.close()
            self._wait(theirs)
        theirs.close()

    def _wait(self, pipe: socket.socket) -> None:
        with pipe.makefile(encoding="utf-8") as lines:
            told = lines.readline()
        if not told:  # not needed, or its parent is gone
            os._exit(0)
        module, args, env = json.loads(told)
        os.setsid()
        pipe.sendall(b".")
        pipe.close()
        _run(module, args, env)


class RankProcess:
    """What torch's agent takes for `subprocess.Popen` of a rank.

    `python -m MODULE ARGS`, by a spare process.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        interpreter, dash_m, module, *rest = (arg for arg in args if arg != "-u")
        assert (interpreter, dash_m) == (sys.executable, "-m")
        assert options == {"stdout": None, "stderr": None, "start_new_session": True}
        self.args = args
        self.returncode: int | None = None
        spare = _Spare.ready.pop(0)
        self.pid = spare.pid
        spare.pipe.sendall(json.dumps([module, rest, dict(env)]).encode() + b"\n")
        spare.pipe.recv(1)  # it leads a session of its own

    def poll(self) -> int | None:
        """The exit code; None: it runs."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, where it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)
