"""The cache of costly results of an input.

`cached` keeps whole folders under a digest of their input. `seal.json` in the folder holds the
checksums of its files and their state: size, times, place on the disk. If the state differs, the
files are read and compared; an entry that another program changed is discarded and made again, and
a note says so. `cached_result` keeps small results under such a digest, or as long as the file that
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
_CHUNK_BYTES = 1 << 20
_SEAL_FILE = "seal.json"
YOUNG_SECONDS = 2.0
"""A file that changed less than this ago may change again without a new modification time, since
the clock of its file system has ticks.
"""
_LOCK_RETRY_SECONDS = 0.1
"""Time between two attempts to take a lock."""
_SIZE_CHECK_SECONDS = 1.0
"""Time between two looks at the size of a new entry."""
_WAIT_NOTICE_SECONDS = 5.0
"""Time after which a line tells the user which process holds a lock."""
_discarded: list[str] = []
_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def cache_dir() -> Path:
    """Return `$OPTRUN_CACHE`, else `optrun` in `$XDG_CACHE_HOME` or `~/.cache`."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("OPTRUN_CACHE") or users / "optrun")


def digest(*pieces: str | bytes) -> str:
    """Compute a hexadecimal sha256 over pieces: `digest("a", "b")` is not `digest("ab")`."""
    return digest_of(pieces)


def digest_if_known(*pieces: str | bytes | None) -> str | None:
    """Compute the digest of pieces; None: one of them is None, so the input is unknown."""
    present = [piece for piece in pieces if piece is not None]
    if len(present) < len(pieces):
        return None
    return digest(*present)


def digest_of(pieces: Iterable[str | bytes]) -> str:
    """Compute the digest of many pieces, one in memory at a time.

    The size of each piece is hashed before it, so that `("a", "bc")` and `("ab", "c")` differ.
    """
    total = hashlib.sha256()
    for piece in pieces:
        send_heartbeat()
        raw = piece
        if isinstance(raw, str):
            raw = raw.encode("utf-8", "surrogatepass")
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
        while chunk := file.read(_CHUNK_BYTES):
            send_heartbeat()
            yield chunk


def digest_files(paths: Iterable[Path]) -> str:
    """Compute a hexadecimal sha256 over the content and size of each file, in order."""
    total = hashlib.sha256()
    for path in paths:
        size = 0
        for chunk in chunks_of_file(path):
            total.update(chunk)
            size += len(chunk)
        total.update(size.to_bytes(8, "big"))
    return total.hexdigest()


def checksum(chunks: Iterable[bytes]) -> str:
    """Write the size of some bytes and their xxh3-128 as `SIZE HASH`."""
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
        make: Fills the folder whose path it is given. The folder is flushed and renamed when `make`
            has returned, so that a killed process leaves nothing that a later one trusts. Other
            processes that need the entry wait and use the same files, on all machines that share
            the cache. A damaged entry is discarded and made again; `pop_discard_messages` says so.

    Returns:
        The folder. If the cache cannot be written, a temporary one that lives as long as the
        process.

    Raises:
        StorageError: The disk refused while `make` wrote.
    """
    folder = cache_dir() / kind / key
    # Most entries are there already: take them without the lock. `_read_or_make` handles a cache
    # that cannot be read.
    with contextlib.suppress(OSError):
        if folder.is_dir() and _describe_damage(folder, key) is None:
            return folder
    # Another process may make it while this one waits for the lock.
    with _locked(folder):
        return _read_or_make(folder, key, make)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the file lock of an entry inside this context; the kernel frees it if the process dies.

    An entry is a folder of the cache; `folder` is its path, also before it exists.

    On disks without locks, or that cannot be written, the context runs without one: two processes
    may then make the same entry, and the first rename counts. Heartbeats are sent all the while.

    The lock is a file beside the entry, `.making-KEY.lock`, with the name of the process in it. It
    is deleted at the end.
    """
    # The stack closes the file of the lock, which gives the lock up, only when this context ends.
    with contextlib.ExitStack() as stack:
        # An error means that this disk has no locks, or cannot be written: go on without one.
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            path = folder.parent / f".making-{folder.name[:16]}.lock"
            lock = stack.enter_context(path.open("a+")).fileno()
            _wait_for_lock(lock, folder)
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
            stack.callback(path.unlink, missing_ok=True)  # called before the file is closed
        stack.enter_context(_send_heartbeats_while_files_grow(folder))
        yield


def _wait_for_lock(lock: int, folder: Path) -> None:
    """Wait for a file lock and take it; after five seconds name its holder to the user once.

    Args:
        lock: Descriptor of the lock file, which holds the name of the process that has the lock.
        folder: The entry that is locked; its kind is named to the user.

    Raises:
        OSError: There are no locks on this disk.
    """
    start_time = time.monotonic()
    has_told_user = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            send_heartbeat()
        else:
            return
        if time.monotonic() - start_time > _WAIT_NOTICE_SECONDS and not has_told_user:
            has_told_user = True
            holder = os.pread(lock, 200, 0).decode("utf-8", "replace") or "another process"
            tell_user(f"waiting for {holder}, which prepares the same data: {folder.parent.name}")
        time.sleep(_LOCK_RETRY_SECONDS)


@contextlib.contextmanager
def _send_heartbeats_while_files_grow(folder: Path) -> Iterator[None]:
    """Send heartbeats inside this context while the size of a new entry grows.

    A thread adds up the sizes of its files once a second, since some libraries write for minutes
    without calling back.

    folder: The entry; its files are in `.making-KEY-...` beside it until they are complete.
    """
    is_over = threading.Event()

    def watch_sizes() -> None:
        size = 0
        while not is_over.wait(_SIZE_CHECK_SECONDS):
            size_before = size
            size = 0
            with contextlib.suppress(OSError):  # files come and go
                paths = folder.parent.glob(f".making-{folder.name[:16]}-*/**/*")
                size = sum(path.stat().st_size for path in paths)
            if size != size_before:
                send_heartbeat()

    thread = threading.Thread(target=watch_sizes, name="optrun-cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _read_or_make(folder: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Return an undamaged entry of the cache, else make it; the caller holds its lock.

    If the cache cannot be written, return a temporary folder that the process deletes at its end.

    Args:
        folder: Path of the entry, a folder of the cache.
        key: Digest of the input, which is recorded in the entry.
        make: Fills the folder whose path it is given.

    Raises:
        StorageError: The disk refused while `make` wrote.
    """
    # 1. Take the entry if there is one; else make a folder to work in, `.making-KEY-...`.
    try:
        if folder.is_dir():
            damage = _describe_damage(folder, key)
            if damage is None:
                return folder
            _discard(folder, damage)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(folder.parent)
        prefix = f".making-{folder.name[:16]}-"
        work_folder = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    except OSError:  # the cache cannot be written
        work_folder = Path(tempfile.mkdtemp(prefix="optrun-"))
        atexit.register(shutil.rmtree, work_folder, ignore_errors=True)
    is_in_cache = work_folder.parent == folder.parent
    # 2. Fill it, and rename it to the entry.
    try:
        make(work_folder)
        if not is_in_cache:
            return work_folder
        _publish(work_folder, folder, key)
    except OSError as error:
        if error.errno not in _DISK_CODES:
            raise
        raise StorageError(
            f"{work_folder.parent}: the cache cannot be written: {error.strerror}. Make room, or"
            " set OPTRUN_CACHE to another folder."
        ) from error
    finally:
        if is_in_cache:  # nothing of it is left if it was renamed
            shutil.rmtree(work_folder, ignore_errors=True)
    return folder


def _publish(work_folder: Path, folder: Path, key: str) -> None:
    """Write the checksums of a new entry, flush its files, and rename it to `folder`.

    work_folder: Has the files of the entry. If another process was first, its entry stays.

    Raises:
        OSError: The disk refused.
    """
    sums = {path.name: checksum(chunks_of_file(path)) for path in sorted(work_folder.iterdir())}
    (work_folder / _SEAL_FILE).write_text(_seal_of(work_folder, key, sums), encoding="utf-8")
    for path in work_folder.iterdir():
        with open_file(path) as file:
            os.fsync(file.fileno())
    try:
        work_folder.rename(folder)
    except OSError:
        if not folder.is_dir():  # no other process was first: the disk refused
            raise


def cached_result(
    key: str | None, compute: Callable[[], Result], file: Path | None = None
) -> Result:
    """Compute a small result once, and read it from the cache from then on.

    Args:
        key: Digest of everything the result depends on, with the `versions` of packages that
            decide it. With `file`: a name of the result. None: it is always computed.
        compute: Computes the result, which must survive JSON. If it raises, nothing is kept.
        file: The file that `compute` reads. The result is used as long as path, device, inode, size
            and both times of the file are the same, and is not kept for a file that changed in the
            last two seconds.

    Raises:
        OSError: The file does not exist.
    """
    if key is None:
        return compute()
    # 1. What the result was computed from, which is recorded beside it: the key, or the file.
    name = key
    state: list[int] = []
    origin: dict[str, object] = {"key": key}
    if file is not None:
        file = file.resolve()
        name = digest(str(file), key)
        state = file_state(file)
        origin = {"file": str(file), "state": state}
    # 2. Read it, if the recorded origin is the same; compute it again if it cannot be read.
    cache_file = cache_dir() / "known" / f"{name[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content: dict[str, Result] = read_json(cache_file)
        has_same_origin = origin.items() <= content.items()
        if has_same_origin:
            return content["found"]
    # 3. Compute it, and keep it unless the file may have changed while it was read.
    start_time = time.time()
    result = compute()
    if file is not None:
        last_change = max(state[-2:]) / 1e9  # of content or entry, in seconds
        was_young = start_time - last_change <= YOUNG_SECONDS
        if was_young or file_state(file) != state:
            return result
    # A cache that cannot be written costs time, and nothing else.
    with contextlib.suppress(OSError):
        write_atomically(cache_file, json.dumps({**origin, "found": result}) + "\n")
    return result


def digest_file(path: Path) -> str:
    """Compute a hexadecimal sha256 of a file's bytes; cached as long as the file is unchanged."""
    return cached_result("sha256-1", lambda: digest_files([path]), path)


def write_atomically(path: Path, text: str, work_folder: Path | None = None) -> None:
    """Write a small file completely or not at all, by renaming a temporary file.

    Args:
        path: The file.
        text: Its content.
        work_folder: Where the temporary file is made, on the same disk; None: in the file's folder.

    Raises:
        OSError: It cannot be written.
    """
    work_folder = work_folder or path.parent
    work_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=work_folder, prefix=".making-", delete=False
    ) as temporary:
        temporary.write(text)
    Path(temporary.name).replace(path)


def pop_discard_messages() -> list[str]:
    """Return and forget one sentence for each discarded cache entry."""
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
    """Describe how an entry of the cache differs from its `seal.json`; None: it does not.

    That file holds the key, and the checksum and state of each file.
    """
    try:
        return _compare_with_seal(folder, key)
    except FileNotFoundError:
        return "it has no checksums"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "it cannot be read"


def _compare_with_seal(folder: Path, key: str) -> str | None:
    """Compare the files of an entry with its `seal.json`, as `_describe_damage`.

    Errors of reading are raised. A file is read only if its state differs from the recorded one. If
    its bytes are the same, as after a copy, the seal is written again with the new states.
    """
    # 1. The entry must have the files that were made.
    seal = read_json(folder / _SEAL_FILE)
    checksums: dict[str, str] = seal["files"]
    if seal["key"] != key or {path.name for path in folder.iterdir()} != {*checksums, _SEAL_FILE}:
        return "its files are not those that were made"
    # 2. Files with another state than the recorded one must have the same bytes.
    states = {name: file_state(folder / name) for name in checksums}
    recorded_states = seal.get("states", {})
    touched = [name for name, state in states.items() if recorded_states.get(name) != state]
    for name in touched:
        if checksum(chunks_of_file(folder / name)) != checksums[name]:
            return f"{name} has changed since it was made"
    # 3. Record the new states, if no file can change again within the same tick of the clock.
    #    The last number of a state is the time of change, in nanoseconds.
    last_change = max((state[-1] for state in states.values()), default=0) / 1e9
    if touched and time.time() - last_change > YOUNG_SECONDS:
        with contextlib.suppress(OSError):
            write_atomically(folder / _SEAL_FILE, _seal_of(folder, key, checksums), folder.parent)
    return None


def _discard(folder: Path, damage: str) -> None:
    """Delete a damaged entry, and keep a message for `pop_discard_messages`.

    It is renamed first, so that no process finds half of it. Files that a process has mapped stay
    readable to it.

    Raises:
        OSError: It cannot be renamed.
    """
    leftover = folder.with_name(f".making-{folder.name[:16]}-{os.getpid()}")
    _discarded.append(
        f"{folder}: this part of the cache was damaged ({damage}); it is discarded and made again"
    )
    with contextlib.suppress(FileNotFoundError):  # another process did so
        folder.rename(leftover)
    shutil.rmtree(leftover, ignore_errors=True)


def _delete_leftovers(folder: Path) -> None:
    """Delete the unfinished entries of killed processes in a folder, and their locks.

    Only those that are older than a day, and whose lock no process holds.
    """
    for path in folder.glob(".making-*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            is_young = time.time() - path.stat().st_mtime < _ABANDONED_SECONDS
            if is_young or _is_being_made(path):
                continue
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _is_being_made(leftover: Path) -> bool:
    """Tell whether a process holds the lock of an entry, `.making-KEY.lock`.

    leftover: That lock, or the folder `.making-KEY-...` of the entry, which is being filled or
    deleted.
    """
    lock = leftover
    if leftover.suffix != ".lock":
        name, _, _ = leftover.name.rpartition("-")
        lock = leftover.with_name(f"{name}.lock")
    if not lock.exists():
        return False
    try:
        with lock.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or this disk has no locks
        return True
    return False
