"""The cache of costly results of an input.

`cached` keeps whole folders under a digest of their input. `seal.json` in the folder holds the
checksums of its files and their state: size, times, place on the disk. If the state differs, the
files are read and compared; an entry that another program changed is discarded and made anew, and a
note says so. `cached_result` keeps small results under such a digest, or as long as the file that
they come from is unchanged. optrun cannot detect a disk that silently returns wrong bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import xxhash

from optrun.base.errors import StorageError
from optrun.base.reading import open_file, read_json
from optrun.data.heartbeat import send_heartbeat, tell_user

Result = TypeVar("Result")
_ABANDONED_SECONDS = 24 * 3600
_CHUNK = 1 << 20
_SEAL = "seal.json"
YOUNG_SECONDS = 2.0
"""A file that was changed so short a time ago may change again within the tick of its file
system's clock.
"""
_LOOK_SECONDS = 0.1
"""Time between two attempts to take a lock."""
_SIGN_SECONDS = 1.0
"""Time between two looks at the size of a new entry."""
_TOLD_SECONDS = 5.0
"""Time after which the user is told which process holds a lock."""
_discarded: list[str] = []
_DISK_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def cache_dir() -> Path:
    """Return `$OPTRUN_CACHE`, else `optrun` in `$XDG_CACHE_HOME` or `~/.cache`."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("OPTRUN_CACHE") or users / "optrun")


def digest(*pieces: str | bytes) -> str:
    """Compute a hexadecimal sha256 over pieces: `digest("a", "b")` is not `digest("ab")`."""
    return digest_of(pieces)


def digest_if_known(*pieces: str | bytes | None) -> str | None:
    """Compute the digest of pieces; None: one of them is None, so that the input is unknown."""
    present = [piece for piece in pieces if piece is not None]
    if len(present) < len(pieces):
        return None
    return digest(*present)


def digest_of(pieces: Iterable[str | bytes]) -> str:
    """Compute the digest of many pieces, one in memory at a time."""
    total = hashlib.sha256()
    for piece in pieces:
        send_heartbeat()
        raw = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        total.update(len(raw).to_bytes(8, "big"))
        total.update(raw)
    return total.hexdigest()


version = cache(metadata.version)  # each call would read a file


def versions(*packages: str) -> str:
    """Name the installed versions of packages, for the key of their results."""
    return " ".join(f"{package} {version(package)}" for package in packages)


def chunks_of_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, 1 MiB at a time, and send heartbeats."""
    with open_file(path, follow=True) as file:
        while chunk := file.read(_CHUNK):
            send_heartbeat()
            yield chunk


def digest_files(paths: Iterable[Path]) -> str:
    """Compute a hexadecimal sha256 over the content of files, in order, with their borders."""
    total = hashlib.sha256()
    for path in paths:
        size = 0
        for chunk in chunks_of_file(path):
            total.update(chunk)
            size += len(chunk)
        total.update(size.to_bytes(8, "big"))
    return total.hexdigest()


def checksum(chunks: Iterable[bytes]) -> str:
    """Compute the size of some bytes and their xxh3-128, in one text."""
    total = xxhash.xxh3_128()
    size = 0
    for chunk in chunks:
        total.update(chunk)
        size += len(chunk)
    return f"{size} {total.hexdigest()}"


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, filled once by `make`.

    Args:
        kind: Subfolder of the cache, such as "tokens".
        key: Digest of everything the content depends on, with the `versions` of packages that make
            it.
        make: Fills the folder whose path it is given. The folder is flushed and gets its name when
            `make` has returned, so that a killed process leaves nothing that a later one trusts.
            Other processes that need the entry wait and use the same files, on all machines that
            share the cache. A damaged entry is discarded and made anew; `pop_discard_messages`
            says so.

    Returns:
        The folder. Where the cache cannot be written, a temporary one that lives as long as the
        process.

    Raises:
        StorageError: The disk refused while `make` wrote.
    """
    folder = cache_dir() / kind / key
    with contextlib.suppress(OSError):  # a cache that cannot be read: told, or gone around, below
        if folder.is_dir() and _describe_damage(folder, key) is None:
            return folder
    with _locked(folder):
        return _read_or_make(folder, key, make)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an entry inside this context; the kernel frees it if the process dies.

    On disks without locks two processes make the same entry, and the first rename counts.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no locks on this disk, or nothing can be written
            folder.parent.mkdir(parents=True, exist_ok=True)
            path = folder.parent / f".making-{folder.name[:16]}.lock"
            lock = stack.enter_context(path.open("a+")).fileno()
            _wait_for(lock, folder)
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
            stack.callback(path.unlink, missing_ok=True)
        stack.enter_context(_beat_while_files_grow(folder))
        yield


def _wait_for(lock: int, folder: Path) -> None:
    """Take a lock; after five seconds of waiting tell the user who holds it.

    Raises:
        OSError: There are no locks on this disk.
    """
    start_time = time.monotonic()
    is_told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            send_heartbeat()
        else:
            return
        if time.monotonic() - start_time > _TOLD_SECONDS and not is_told:
            is_told = True
            holder = os.pread(lock, 200, 0).decode("utf-8", "replace") or "another process"
            tell_user(
                f"waiting for {holder}, which makes what is needed here, too: {folder.parent.name}"
            )
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _beat_while_files_grow(folder: Path) -> Iterator[None]:
    """Report progress by `send_heartbeat` each second in which the files of a new entry grow.

    For libraries that write for minutes without calling back; a thread looks at the sizes.
    """
    over = threading.Event()

    def watch() -> None:
        written = 0
        while not over.wait(_SIGN_SECONDS):
            before = written
            written = 0
            with contextlib.suppress(OSError):  # files come and go
                parts = folder.parent.glob(f".making-{folder.name[:16]}-*/**/*")
                written = sum(path.stat().st_size for path in parts)
            if written != before:
                send_heartbeat()

    thread = threading.Thread(target=watch, name="optrun-cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _read_or_make(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return the entry of the cache, made if it does not exist or is damaged.

    Where the cache cannot be written, a temporary folder that the process deletes at its end.

    Raises:
        StorageError: The disk refused while `make` wrote.
    """
    try:
        if folder.is_dir():
            damage = _describe_damage(folder, key)
            if damage is None:
                return folder
            _discard(folder, damage)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(folder.parent)
        aside = Path(tempfile.mkdtemp(prefix=f".making-{folder.name[:16]}-", dir=folder.parent))
    except OSError:
        aside = _make_temporary_folder()
    lasting = aside.parent == folder.parent
    try:
        make(aside)
        if not lasting:
            return aside
        _publish(aside, folder, key)
    except OSError as error:
        if error.errno not in _DISK_REFUSED:
            raise
        raise StorageError(
            f"{aside.parent}: the cache cannot be written: {error.strerror}. Make room, or set"
            " OPTRUN_CACHE to another folder."
        ) from error
    finally:
        if lasting:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def _publish(aside: Path, folder: Path, key: str) -> None:
    """Seal a new entry, flush it, and give it its name.

    Raises:
        OSError: The disk refused.
    """
    sums = {path.name: checksum(chunks_of_file(path)) for path in sorted(aside.iterdir())}
    (aside / _SEAL).write_text(_seal_of(aside, key, sums), encoding="utf-8")
    for path in aside.iterdir():
        with open_file(path) as file:
            os.fsync(file.fileno())
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # not because another process was first
            raise


def cached_result(key: str | None, find: Callable[[], Result], of: Path | None = None) -> Result:
    """Compute a small result once, and read it from the cache from then on.

    Args:
        key: Digest of everything the result depends on, with the `versions` of packages that
            decide it. With `of`: a name of the result. None: it is always computed.
        find: Computes the result, which must survive JSON. If it raises, nothing is kept.
        of: The file that `find` reads. The result is used as long as path, device, inode, size and
            both times of the file are the same, and is not kept for a file that changed in the
            last two seconds.

    Raises:
        OSError: There is no such file.
    """
    if key is None:
        return find()
    name = key
    state: list[int] = []
    expected: dict[str, object] = {"key": key}
    if of is not None:
        of = of.resolve()
        name = digest(str(of), key)
        state = file_state(of)
        expected = {"file": str(of), "state": state}
    cache_file = cache_dir() / "known" / f"{name[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content: dict[str, Result] = read_json(cache_file)
        if content == content | expected:
            return content["found"]
    start_time = time.time()
    result = find()
    is_settled = True
    if of is not None:
        *_, modified_ns, changed_ns = state
        age_seconds = start_time - max(modified_ns, changed_ns) / 1e9
        is_settled = file_state(of) == state and age_seconds > YOUNG_SECONDS
    if is_settled:
        # A cache that cannot be written costs time, and nothing else.
        with contextlib.suppress(OSError):
            write_whole(cache_file, json.dumps({**expected, "found": result}) + "\n")
    return result


def digest_file(path: Path) -> str:
    """Compute a hexadecimal sha256 of a file's bytes; of an unchanged file it is remembered."""
    return cached_result("sha256-1", lambda: digest_files([path]), path)


def write_whole(path: Path, text: str, beside: Path | None = None) -> None:
    """Write a small file, whole or not at all.

    Args:
        path: Where it is to be.
        text: What is to be in it.
        beside: The folder in which it is made, on the same disk; None: its own.

    Raises:
        OSError: It cannot be written.
    """
    beside = beside or path.parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=beside, prefix=".making-", delete=False) as aside:
        aside.write(text)
    Path(aside.name).replace(path)


def pop_discard_messages() -> list[str]:
    """Return and forget one sentence for each cache entry that was discarded."""
    messages = _discarded.copy()
    _discarded.clear()
    return messages


def _seal_of(folder: Path, key: str, files: Mapping[str, str]) -> str:
    """Write the JSON text of a seal: the key, and checksum and state of each file.

    Args:
        folder: The folder.
        key: The key of the entry.
        files: The checksum of each file by its name.
    """
    states = {name: file_state(folder / name) for name in files}
    return json.dumps({"key": key, "files": files, "states": states}, indent=1) + "\n"


def file_state(path: Path) -> list[int]:
    """Return device, inode, size, and the times of modification and change in nanoseconds.

    No program can set back the time of change.
    """
    entry = path.stat()
    return [entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns]


def _describe_damage(folder: Path, key: str) -> str | None:
    """Describe the change of a folder since it was sealed; None: no change.

    Files are read only if their states differ from the seal. If their bytes are the same, as after
    a copy, the folder is sealed again with the new states.
    """
    try:
        seal = read_json(folder / _SEAL)
        sealed: dict[str, str] = seal["files"]
        if seal["key"] != key or {path.name for path in folder.iterdir()} != {*sealed, _SEAL}:
            return "its files are not those that were made"
        states = {name: file_state(folder / name) for name in sealed}
        doubtful = [
            name for name, state in states.items() if seal.get("states", {}).get(name) != state
        ]
        for name in doubtful:
            if checksum(chunks_of_file(folder / name)) != sealed[name]:
                return f"{name} has changed since it was made"
        # The folder was copied. Its new state is sealed, unless a file may change again within a
        # tick of the clock.
        last_change = max((state[-1] for state in states.values()), default=0) / 1e9
        if doubtful and time.time() - last_change > YOUNG_SECONDS:
            with contextlib.suppress(OSError):
                write_whole(folder / _SEAL, _seal_of(folder, key, sealed), folder.parent)
    except FileNotFoundError:
        return "it has no checksums"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it cannot be read"
    return None


def _discard(folder: Path, damage: str) -> None:
    """Remove a damaged entry, and keep a message; processes that have mapped its files keep them.

    Raises:
        OSError: It cannot be removed.
    """
    aside = folder.with_name(f".making-{folder.name[:16]}-{os.getpid()}")
    _discarded.append(
        f"{folder}: this part of the cache was damaged ({damage}); it is not used, and made anew"
    )
    with contextlib.suppress(FileNotFoundError):  # another process did so
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _make_temporary_folder() -> Path:
    """Make a folder that is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="optrun-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _delete_leftovers(folder: Path) -> None:
    """Delete leftovers of processes killed a day ago or earlier."""
    for path in folder.glob(".making-*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if time.time() - path.stat().st_mtime < _ABANDONED_SECONDS or _is_being_made(path):
                continue
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_being_made(leftover: Path) -> bool:
    """Tell whether a process holds the lock of an entry, however old its files are."""
    lock = leftover
    if leftover.suffix != ".lock":
        lock = leftover.with_name(f"{leftover.name.rpartition('-')[0]}.lock")
    if not lock.exists():
        return False
    try:
        with lock.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or this disk has no locks
        return True
    return False
