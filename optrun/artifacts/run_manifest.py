"""What a run directory holds, and whether it still does: `run_manifest.json`.

Each checkpoint has a manifest of its own; this one names them and every other file of the run. It is sealed when a run
begins, at each checkpoint, and at the end, always by one rename. What is only ever appended to is sealed up to where it
reached, so that later lines of a run that was killed are no damage. What is written over again and again while the run
goes on, such as its summary, is sealed when it ends. `writing` in the file says which names may be there unsealed: a
process that dies between writing and sealing leaves an honest manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import replace_bytes, replace_text, sync_folder
from optrun.artifacts.lock import RunLock
from optrun.artifacts.manifest import check_format, is_content, seal
from optrun.artifacts.run_dir import RunDir, parse_step
from optrun.base.errors import CheckpointError, LockedError, OtherFormatError, StorageError, UnreadableFileError
from optrun.base.reading import kind_of, open_file, parse_json, read_bytes, sha256_of

FORMAT = 1
_POINTERS = (f"{names.CHECKPOINTS}/{names.BEST}", f"{names.CHECKPOINTS}/{names.LAST}")
CHECKPOINT = f"{names.CHECKPOINTS}/step-*/{names.CHECKPOINT_MANIFEST}"
ALWAYS_GROWING = (names.LOG, f"{names.LOGS}/*", names.LOCK)
"""A process that was refused the run has its say in the log, too."""
GROWING = (names.METRICS, "tensorboard/*", *ALWAYS_GROWING)
FLEETING = (
    *(names.SUMMARY, names.CURVES, names.SAMPLES, names.TRACKING, "nonfinite/*", *_POINTERS),
    *("report.html", "report.md", "report.csv", "report-*.png", "report-*.csv"),
)
"""Written over while a run goes on: sealed when it ends."""
_STEADY = (names.CONFIG, f"{names.HYDRA}/*", f"{names.TOKENIZER}/*", f"{names.MODEL}/*")
_OWN = (*_STEADY, CHECKPOINT, *GROWING, *FLEETING)
_ASIDE = (".*.tmp", ".model-*", ".tokenizer-*", ".deleting-*", f"{names.CHECKPOINTS}/.*")
IN_USE = (CHECKPOINT, *GROWING, *FLEETING, *_ASIDE)
APART = (
    *("wandb/*", "mlruns/*", "mlflow.db*", f"{names.EXTRA}/*"),
    *(f"{names.CHECKPOINTS}/damaged-*", f"{names.CHECKPOINTS}/superseded-*", f"{names.CHECKPOINTS}/foreign-*"),
)
"""Never sealed: written by a tracker's library or by callbacks, or put aside for a person to look at and delete."""
WRITTEN = tuple(sorted({pattern.split("/")[0] for pattern in (*_OWN, *APART)}))
"""Names in a run directory that a run writes to."""

_Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """One file as it was sealed."""

    size: int
    sha256: str
    grows: bool = False
    """More may follow after these bytes."""
    becomes: tuple[int, str] | None = None
    """What it is replaced by, size and sha256: either is right until the next seal."""


@dataclass(frozen=True)
class Sealed:
    """A run manifest as it was read."""

    entries: dict[str, Entry]
    writing: tuple[str, ...]
    """Patterns of what may be there unsealed; empty: no process was writing."""
    run_id: str | None = None
    whole: dict[str, str] = field(default_factory=dict)
    """Checkpoint to the signature of its files when they were known to be whole, see `Retention`."""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Changes that a person accepted: `name`, `at`, sha256 `was` and `now` (None: not there), and the command, `by`."""

    @property
    def is_open(self) -> bool:
        """Whether the run was going on: it is, or it was killed."""
        return CHECKPOINT in self.writing


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Match a path inside a run with patterns, in which `*` stands for folders, too."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_run_manifest(run: RunDir) -> Sealed | None:
    """Read the manifest of a run; None if there is none, as before optrun wrote them.

    Raises:
        CheckpointError: It is damaged, a link, or of another format.
    """
    path = run.manifest
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    try:
        return _parsed(path, text)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__} while reading it.") from error


def refuse_other_manifest(run: RunDir) -> None:
    """Refuse a manifest of another time, before anybody is told to remove it.

    Raises:
        OtherFormatError: An optrun with another format wrote it.
    """
    try:
        read_run_manifest(run)
    except OtherFormatError:
        raise
    except CheckpointError:
        return


def _parsed(path: Path, text: bytes) -> Sealed:
    values = dict(parse_json(text, path))
    check_format(path, values, FORMAT)
    if _text(values) != text.decode():
        raise CheckpointError(f"{path}: its bytes changed since it was written (space or line ends).")
    entries = {}
    for entry in values["files"]:
        becomes = entry.get("becomes")
        entries[str(entry["name"])] = Entry(
            int(entry["size"]),
            str(entry["sha256"]),
            bool(entry.get("grows", False)),
            None if becomes is None else (int(becomes[0]), str(becomes[1])),
        )
    return Sealed(
        entries,
        tuple(map(str, values["writing"])),
        values["run"],
        dict(values["whole"]),
        list(values.get("accepted", ())),
    )


def _text(values: dict[str, Any]) -> str:
    return json.dumps({**values, "sha256": seal(values)}, indent=1) + "\n"


def files_of(run: RunDir) -> dict[str, Path]:
    """Map a run directory's files and links by path, but its manifest and what a checkpoint's covers."""
    found = {}
    for folder, folders, files in os.walk(run.path):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            path = Path(folder, name)
            if path != run.manifest and not _is_covered(run, path):
                found[path.relative_to(run.path).as_posix()] = path
    return dict(sorted(found.items()))


def _is_covered(run: RunDir, path: Path) -> bool:
    """Tell whether the manifest of a checkpoint names a file."""
    if not path.is_relative_to(run.checkpoints):
        return False
    checkpoint, _, name = path.relative_to(run.checkpoints).as_posix().partition("/")
    return parse_step(checkpoint) is not None and is_content(run.checkpoints / checkpoint, name)


class RunManifest:
    """Keeps the manifest of a run up to date; the run's lock is held.

    What was sealed before stays as it was sealed until this process has written the file itself: damage is never taken
    for the truth because a run went on.

    Args:
        run: The run directory.
        sealed: What was there before; None: a new run, or one from before such manifests.
    """

    def __init__(self, run: RunDir, sealed: Sealed | None = None) -> None:
        self.run = run
        before = sealed or Sealed({}, _OWN)
        self.run_id = before.run_id
        """Which run this is, wherever it lies; None: it is not said."""
        self.whole = before.whole
        self.accepted = before.accepted
        there = files_of(run)
        self._entries = {name: _resolved(run.path / name, entry) for name, entry in before.entries.items()}
        self._seen = {
            name: _signature(there[name])
            for name, entry in self._entries.items()
            if name in there and not (entry.grows and _signature(there[name])[0] != entry.size)
        }
        unsealed = there.keys() - self._entries.keys()
        self._strange = {name: _signature(there[name]) for name in unsealed if not matches(name, before.writing)}
        self._adopted = () if sealed else _STEADY
        self._rewritten = [pattern for pattern in before.writing if pattern not in IN_USE] if sealed else []
        self._open = before.is_open
        self._digests: dict[str, Any] = {}
        self._lock = threading.Lock()

    def seal(self, gone: Iterable[Path] = ()) -> None:
        """Take in what was written, while the run goes on.

        Args:
            gone: Folders of checkpoints that are deleted next.

        Raises:
            OSError: The disk refused; the manifest before is untouched.
        """
        with self._lock:
            self._open = True
            self._take_in((CHECKPOINT, *GROWING), [f"{names.CHECKPOINTS}/{folder.name}/*" for folder in gone])
            self._write()

    def close(self) -> None:
        """Take in everything: nothing is being written any more.

        Raises:
            OSError: As `seal`.
        """
        with self._lock:
            self._open = False
            self._take_in((CHECKPOINT, *GROWING, *FLEETING, *self._rewritten))
            self._rewritten.clear()
            self._write()

    @contextmanager
    def rewriting(self, *patterns: str) -> Iterator[None]:
        """Let files be written that are otherwise left alone.

        Raises:
            OSError: As `seal`.
        """
        with self._lock:
            self._rewritten += patterns
            self._write()
        yield
        with self._lock:
            self._take_in(patterns)
            self._rewritten = [pattern for pattern in self._rewritten if pattern not in patterns]
            self._write()

    def forget(self, patterns: Sequence[str]) -> None:
        """Forget the seals of these files, which are to change."""
        for name in [name for name in (*self._entries, *self._strange) if matches(name, patterns)]:
            for known in (self._entries, self._seen, self._strange):
                known.pop(name, None)

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a small file by one rename; the manifest is right before and after it.

        Raises:
            OSError: The disk refused; the file is the old one or the new one.
        """
        name = path.relative_to(self.run.path).as_posix()
        digest = hashlib.sha256(content)
        after = Entry(len(content), digest.hexdigest())
        with self._lock:
            before = self._entries.get(name)
            if before is not None:
                self._entries[name] = replace(before, becomes=(after.size, after.sha256))
            self._write(() if before else (name,))
            replace_bytes(path, content)
            self._entries[name], self._seen[name], self._digests[name] = after, _signature(path), digest

    def accept(self, changed: Sequence[str], noted: str, by: str) -> dict[str, Any]:
        """Seal files as they are now, and record it.

        Args:
            changed: Paths inside the run; what is not there is no longer missed.
            noted: The one that was asked for.
            by: The command.

        Returns:
            The record.

        Raises:
            UnreadableFileError: One is no regular file.
            OSError: The disk refused; the manifest before is untouched.
        """
        with self._lock:
            before = self._entries.get(noted)
            self.forget(changed)
            for name in changed:
                path = self.run.path / name
                if path.is_symlink() or path.exists():
                    self._digests.pop(name, None)
                    self._entries[name], self._seen[name] = self._hashed(name, path), _signature(path)
            now = self._entries.get(noted)
            record: dict[str, Any] = {"name": noted, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "by": by}
            record |= {"was": before and before.sha256, "now": now and now.sha256}
            self.accepted.append(record)
            self._write()
        return record

    def _take_in(self, written: Sequence[str], gone: Sequence[str] = ()) -> None:
        """Bring the entries up to date.

        Args:
            written: Patterns of what this process may have written, or deleted.
            gone: Patterns of what it deletes next.
        """
        found = files_of(self.run)
        for name in list(self._entries):
            deleted = name not in found and matches(name, written)
            known = matches(name, self._rewritten) or (name in self._seen and matches(name, FLEETING))
            if matches(name, gone) or (deleted and known) or set_aside(self.run, name):
                del self._entries[name]
        written, self._adopted = (*written, *self._adopted), ()
        for name, path in found.items():
            signature = _signature(path)
            unchanged = signature in (self._seen.get(name), self._strange.get(name))
            if matches(name, written) and not (unchanged or kind_of(path) or matches(name, gone)):
                self._entries[name], self._seen[name] = self._hashed(name, path), signature

    def _hashed(self, name: str, path: Path) -> Entry:
        """Make a file's entry, the file flushed: of what grows, only what is new is read."""
        if name == names.LOCK:  # nothing of its text is believed
            return Entry(0, hashlib.sha256().hexdigest())
        with open_file(path) as file:
            os.fsync(file.fileno())
            if not matches(name, GROWING):
                sync_folder(path.parent)
                return Entry(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
            known = self._entries.get(name, Entry(0, ""))
            digest = self._digests.get(name)
            if digest is None:
                digest = sha256_of(file, known.size)
                if name in self._entries and digest.hexdigest() != known.sha256:
                    return known  # damaged before: it stays so
                self._digests[name] = digest
            file.seek(known.size)
            more = file.read()
        if name == names.METRICS and self._open:  # the end of a line that the disk refused is taken back
            more = more[: more.rfind(b"\n") + 1]
        digest.update(more)
        return Entry(known.size + len(more), digest.hexdigest())

    def _write(self, more: Sequence[str] = ()) -> None:
        """Replace the file.

        Args:
            more: Patterns of what is written next, besides what is known to be.
        """
        unsealed = (*(FLEETING if self._open else ()), *self._rewritten)
        listed: list[dict[str, Any]] = []
        for name, entry in sorted(self._entries.items()):
            if not matches(name, unsealed):
                listed.append({"name": name, "size": entry.size, "sha256": entry.sha256})
                listed[-1] |= {"grows": True} if matches(name, GROWING if self._open else ALWAYS_GROWING) else {}
                listed[-1] |= {"becomes": list(entry.becomes)} if entry.becomes else {}
        values = {
            "format": FORMAT,
            "run": self.run_id,
            "sealed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "writing": sorted({*(IN_USE if self._open else ()), *self._rewritten, *more}),
            **({"accepted": self.accepted} if self.accepted else {}),
            "whole": {name: held for name, held in self.whole.items() if (self.run.checkpoints / name).is_dir()},
            "files": listed,
        }
        replace_text(self.run.manifest, _text(values))


def _signature(path: Path) -> _Signature:
    known = path.lstat()
    return known.st_size, known.st_mtime_ns, known.st_ino


def _resolved(path: Path, entry: Entry) -> Entry:
    """Choose the one of two contents that a process which died while replacing a file left."""
    if entry.becomes is None:
        return entry
    after = Entry(*entry.becomes)
    with contextlib.suppress(OSError, UnreadableFileError), open_file(path) as file:
        if sha256_of(file, after.size).hexdigest() == after.sha256:
            return after
    return replace(entry, becomes=None)


def set_aside(run: RunDir, name: str) -> bool:
    """Tell whether a resume, or a save in its place, renamed the checkpoint that a file's name belongs to."""
    folder = (run.path / name).parent
    if folder.parent != run.checkpoints or parse_step(folder.name) is None or folder.exists():
        return False
    aside = (f"damaged-{folder.name}-*", f"superseded-{folder.name}-*", f".replaced-{folder.name}")
    return any(matches(path.name, aside) for path in run.checkpoints.glob("*"))


@contextmanager
def recorded(*paths: Path, written: bool = False) -> Iterator[None]:
    """Keep a run directory's manifest true while a command writes files or folders into it.

    Args:
        paths: What is written, in one folder.
        written: It was written just now, before this.

    Raises:
        LockedError: A process writes that run, and these are no files that it takes in itself.
        StorageError: The run may not be written.
    """
    run = next((RunDir(folder) for folder in paths[0].absolute().parents if RunDir(folder).manifest.is_file()), None)
    with contextlib.ExitStack() as stack:
        if run is not None:
            inside = [path.absolute().relative_to(run.path).as_posix() for path in paths]
            patterns = [pattern for name in inside for pattern in (name, f"{name}/*")]
            try:
                stack.enter_context(RunLock(run.lock))
                manifest = RunManifest(run, read_run_manifest(run))
                if written:
                    manifest.forget(patterns)
                stack.enter_context(manifest.rewriting(*patterns))
            except (LockedError, StorageError):
                if not all(matches(name, (*FLEETING, *GROWING)) for name in inside):
                    raise
            except CheckpointError:
                pass  # a damaged manifest stays as it is: `optrun verify` names it
        yield
