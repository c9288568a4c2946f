"""A cache is trusted only when it was finished.

Two processes at once, and one that dies, do no harm.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from optrun.base.errors import StorageError
from optrun.data.cache import (
    _send_heartbeats_while_files_grow,
    cached,
    digest,
    digest_files,
    pop_discard_messages,
)
from optrun.data.heartbeat import receive_heartbeats


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    pop_discard_messages()
    return tmp_path / "cache"


def test_borders_count() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("é") == digest("é".encode())


def test_files_by_content_and_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"x" * 3_000_000)
    b.write_bytes(b"y")
    assert digest_files([a, b]) == digest_files([a, b])
    assert (
        len({digest_files([a, b]), digest_files([b, a]), digest_files([a]), digest_files([])}) == 4
    )


def test_made_once(cache: Path) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "x").write_text("made")

    assert cached("kind", "key", make) == cached("kind", "key", make) == cache / "kind" / "key"
    assert len(calls) == 1
    assert [path.name for path in (cache / "kind").iterdir()] == ["key"]


def test_a_failure_leaves_nothing(cache: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("broken")

    with pytest.raises(KeyError):
        cached("kind", "key", make)
    assert list((cache / "kind").iterdir()) == []


def test_a_full_disk_is_told_as_such(cache: Path) -> None:
    def make(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"No space left.*OPTRUN_CACHE"):
        cached("kind", "key", make)


def test_another_process_was_first(cache: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "x").write_text("mine")
        other = cache / "kind" / "key"
        other.mkdir()
        (other / "x").write_text("theirs")

    assert (cached("kind", "key", make) / "x").read_text() == "theirs"
    assert [path.name for path in (cache / "kind").iterdir()] == ["key"]


def test_a_killed_process_leaves_nothing_trusted(cache: Path) -> None:
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from optrun.data.cache import cached\n"
        "def make(folder):\n"
        "    (folder / 'x').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached('kind', 'key', make)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env=os.environ.copy()).returncode
        < 0
    )
    lock, left = sorted((cache / "kind").iterdir(), key=lambda path: path.is_dir())
    assert lock.name == ".making-key.lock"
    assert left.name.startswith(".making-key-")
    place = cached("kind", "key", lambda folder: (folder / "x").write_text("whole") and None)
    assert (place / "x").read_text() == "whole"
    assert left.exists()  # another process may be at work in it
    os.utime(left, (time.time() - 2 * 86400,) * 2)
    cached("kind", "other", lambda folder: None)
    assert not left.exists()


COUNTED = """
import sys, time
from pathlib import Path
from optrun.data.cache import cached
counts = Path(sys.argv[1])
def make(folder):
    with counts.open("a") as file:
        file.write("made\\n")
    time.sleep(float(sys.argv[2]))
    (folder / "x").write_text("whole")
print((cached("kind", "key", make) / "x").read_text())
"""


def _processes(counts: Path, *seconds: float) -> list[subprocess.Popen[str]]:
    """Start processes that want the same entry, each of which takes so long to make it."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", COUNTED, str(counts), str(long)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for long in seconds
    ]


def _until_begun(counts: Path) -> None:
    deadline = time.monotonic() + 60
    while not counts.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_at_once_make_it_once(cache: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    started = _processes(counts, 2.0, 2.0, 2.0)
    assert [process.communicate(timeout=60)[0] for process in started] == ["whole\n"] * 3
    assert counts.read_text() == "made\n"
    assert [path.name for path in (cache / "kind").iterdir()] == ["key"], "no lock is left"


def test_a_killed_maker_blocks_nobody(cache: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    (killed,) = _processes(counts, 600.0)
    _until_begun(counts)
    (other,) = _processes(counts, 0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(3.0)
    killed.kill()
    killed.communicate()
    assert other.communicate(timeout=30)[0] == "whole\n"
    assert counts.read_text() == "made\n" * 2


def test_one_that_waits_tells_for_whom_and_gives_signs_of_life(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optrun.data.cache._WAIT_NOTICE_SECONDS", 0.05)
    begun, signs, notes = threading.Event(), list[None](), list[str]()

    def make(folder: Path) -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while not notes and time.monotonic() < deadline:
            time.sleep(0.01)
        (folder / "x").write_text("theirs")

    other = threading.Thread(target=cached, args=("kind", "key", make))
    other.start()
    begun.wait(60)
    with receive_heartbeats(lambda: signs.append(None), notes.append):
        assert (cached("kind", "key", _never) / "x").read_text() == "theirs"
    other.join()
    (said,) = notes
    for fact in (f"process {os.getpid()} on {socket.gethostname()}", "kind"):
        assert fact in said
    assert signs


def _never(folder: Path) -> None:
    raise AssertionError(folder)


def test_who_makes_an_entry_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watcher hears of bytes alone, so that one that hangs is found."""
    monkeypatch.setattr("optrun.data.cache._SIZE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr("optrun.data.heartbeat._EVERY_SECONDS", 0.0)
    signs = list[None]()
    inside = tmp_path / ".making-key-abc" / "reader"
    inside.mkdir(parents=True)
    with (
        receive_heartbeats(lambda: signs.append(None), print),
        _send_heartbeats_while_files_grow(tmp_path / "key"),
    ):
        time.sleep(0.1)
        assert len(signs) <= 1  # of the folder itself
        deadline = time.monotonic() + 60
        written = 0
        while len(signs) < 3 and time.monotonic() < deadline:
            written += 1
            (inside / "rows").write_text("x" * written)
            time.sleep(0.01)
    assert len(signs) >= 3


def test_a_disk_without_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert (
        cached("kind", "key", lambda folder: (folder / "x").write_text("made") and None) / "x"
    ).is_file()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {
    "a flipped bit": lambda place: _flip(place / "x"),
    "cut": lambda place: (place / "x").write_text("ma"),
    "emptied": lambda place: (place / "x").write_text(""),
    "longer": lambda place: (place / "x").write_text("made twice"),
    "deleted": lambda place: (place / "x").unlink(),
    "a folder": lambda place: ((place / "x").unlink(), (place / "x").mkdir()),
    "another file": lambda place: (place / "y").write_text("more"),
    "without its seal": lambda place: (place / "seal.json").unlink(),
    "with a seal that is cut": lambda place: (place / "seal.json").write_text("{"),
    "with a seal that is something else": lambda place: (place / "seal.json").write_text("[1]"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_made_anew_and_told(cache: Path, name: str) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "x").write_text("made")

    place = cached("kind", "key", make)
    assert cached("kind", "key", make) == place
    assert (len(calls), pop_discard_messages()) == (1, [])
    DAMAGES[name](place)
    assert (cached("kind", "key", make) / "x").read_text() == "made"
    (said,) = pop_discard_messages()
    assert str(place) in said
    assert "damaged" in said
    assert (len(calls), pop_discard_messages()) == (2, []), "told once"
    cached("kind", "key", make)
    assert len(calls) == 2
    assert [path.name for path in (cache / "kind").iterdir()] == ["key"], "nothing else is left"


def test_an_entry_of_another_key_is_none(cache: Path) -> None:
    for key in ("a", "b"):
        cached("kind", key, lambda folder, key=key: (folder / "x").write_text(key) and None)
    (cache / "kind" / "a").rename(cache / "kind" / "c")
    (cache / "kind" / "b").rename(cache / "kind" / "a")
    assert (
        cached("kind", "a", lambda folder: (folder / "x").write_text("a") and None) / "x"
    ).read_text() == "a"
    assert len(pop_discard_messages()) == 1


def test_damage_that_cannot_be_removed_is_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = cached("kind", "key", lambda folder: (folder / "x").write_text("made") and None)
    _flip(place / "x")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refuse)
    again = cached("kind", "key", lambda folder: (folder / "x").write_text("made") and None)
    assert again != place
    assert (again / "x").read_text() == "made"
    assert len(pop_discard_messages()) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "file" / "cache"))
    place = cached("kind", "key", lambda folder: (folder / "x").write_text("made") and None)
    assert (place / "x").read_text() == "made"


def test_what_another_process_makes_is_left_alone_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of it may grow for days without a change of its folder: its lock decides."""
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path))
    (tmp_path / "kind").mkdir()
    work = tmp_path / "kind" / ".making-key-abc"
    work.mkdir()
    lock = tmp_path / "kind" / ".making-key.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in (work, lock):
            os.utime(path, (time.time() - 2 * 86400,) * 2)
        cached("kind", "other", lambda folder: None)
        assert work.is_dir()
        assert lock.exists()
    cached("kind", "another", lambda folder: None)
    assert not work.exists()
    assert not lock.exists()
