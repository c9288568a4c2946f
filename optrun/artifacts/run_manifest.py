"""What a run directory holds: `run_manifest.json`, in the format of `manifest`.

Each checkpoint has a manifest of its own; this one names them and every other file of the run that
is read again. What nothing reads again, such as logs, curves and reports, is not covered. It is
sealed when a run begins, at each checkpoint, and at the end, always by one rename. What is only
ever appended to is sealed up to where it reached: later lines of a run that was killed are no
damage. What is written over again and again while the run goes on, such as its summary, is sealed
when it ends. `writing` in the file says which names may be there unsealed: a process that dies
between writing and sealing leaves an honest manifest.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from optrun.artifacts import run_dir as names
from optrun.artifacts.atomic import replace_bytes, sync_folder
from optrun.artifacts.checksum import Entry, Hash, digest_of
from optrun.artifacts.lock import RunLock
from optrun.artifacts.manifest import (
    is_content,
    read_sealed,
    refusing_other_formats,
    sealed_text,
    understanding,
)
from optrun.artifacts.run_dir import RunDir, parse_step
from optrun.base.errors import CheckpointError, LockedError, StorageError
from optrun.base.reading import kind_of, open_file

FORMAT = 1
CHECKPOINT = f"{names.CHECKPOINTS}/step-*/{names.CHECKPOINT_MANIFEST}"
FLEETING = (
    *(names.SUMMARY, names.SAMPLES, names.TRACKING),
    *(f"{names.CHECKPOINTS}/{names.BEST}", f"{names.CHECKPOINTS}/{names.LAST}"),
)
"""Written over while a run goes on: sealed when it ends."""
_STEADY = (names.CONFIG, f"{names.HYDRA}/*", f"{names.TOKENIZER}/*", f"{names.MODEL}/*")
_OWN = (*_STEADY, CHECKPOINT, names.METRICS, *FLEETING)
_ASIDE = (".*.tmp", ".model-*", ".tokenizer-*", ".deleting-*", f"{names.CHECKPOINTS}/.*")
_IN_USE = (CHECKPOINT, names.METRICS, *FLEETING, *_ASIDE)
UNREAD = (
    *(names.LOG, f"{names.LOGS}/*", names.LOCK, names.CURVES, "nonfinite/*", "tensorboard/*"),
    *("report.html", "report.md", "report.csv", "report-*.png", "report-*.csv"),
)
"""Not covered: what a run or a report writes, and nothing reads again."""
APART = (
    *("wandb/*", "mlruns/*", "mlflow.db*", f"{names.EXTRA}/*"),
    *(
        f"{names.CHECKPOINTS}/damaged-*",
        f"{names.CHECKPOINTS}/superseded-*",
        f"{names.CHECKPOINTS}/foreign-*",
    ),
)
"""Not covered.

Written by a tracker's library or by callbacks, or put aside for a person to look at and delete.
"""
WRITTEN = tuple(sorted({pattern.split("/")[0] for pattern in (*_OWN, *UNREAD, *APART)}))
"""Names in a run directory that a run writes to."""

_Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Accepted:
    """A change that a person accepted."""

    name: str
    at: str
    """UTC."""
    by: str
    """The command."""
    was: str | None
    """sha256; None: it was not there."""
    now: str | None
    """sha256; None: it is not there."""


@dataclass(frozen=True)
class Sealed:
    """A run manifest as it was read."""

    entries: dict[str, Entry]
    writing: tuple[str, ...]
    """Patterns of what may be there unsealed; empty: no process was writing."""
    run_id: str | None = None
    whole: dict[str, str] = field(default_factory=dict)
    """Checkpoint to the signature of its files when they were known to be whole, see `Retention`.
    """
    accepted: list[Accepted] = field(default_factory=list)

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
    if not os.path.lexists(run.manifest):
        return None
    with understanding(run.manifest):
        values, entries = read_sealed(run.manifest, FORMAT)
        # What another version was replacing when it died has two contents: neither is known to be
        # right.
        replaced = [str(entry["name"]) for entry in values["files"] if "becomes" in entry]
        covered = {
            name: entry
            for name, entry in entries.items()
            if name not in replaced and not matches(name, UNREAD)
        }
        return Sealed(
            covered,
            (*map(str, values["writing"]), *replaced),
            values["run"],
            dict(values["whole"]),
            [Accepted(**one) for one in values.get("accepted", ())],
        )


def refuse_other_manifest(run: RunDir) -> None:
    """Refuse a manifest of another time, before anybody is told to remove it.

    Raises:
        OtherFormatError: An optrun with another format wrote it.
    """
    with refusing_other_formats():
        read_run_manifest(run)


def files_of(run: RunDir) -> dict[str, Path]:
    """Map a run directory's files and links by path.

    But its manifest and what a checkpoint's covers.
    """
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

    What was sealed before stays as it was sealed until this process has written the file itself:
    damage is never taken for the truth because a run went on.

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
        self._entries = dict(before.entries)
        self._seen = {
            name: _signature(path)
            for name, path in files_of(run).items()
            if _is_settled(path, self._entries.get(name), matches(name, before.writing))
        }
        """Files that another process has written: not taken in while they are as they were then."""
        self._adopted = () if sealed else _STEADY
        self._rewritten = (
            [pattern for pattern in before.writing if pattern not in _IN_USE] if sealed else []
        )
        self._open = before.is_open
        self._metrics: Hash | None = None
        """Digest of what is sealed of them; None: it is not known yet."""
        self._lock = threading.RLock()

    def seal(self, gone: Iterable[Path] = ()) -> None:
        """Take in what was written, while the run goes on.

        Args:
            gone: Folders of checkpoints that are deleted next.

        Raises:
            OSError: The disk refused; the manifest before is untouched.
        """
        with self._lock:
            self._open = True
            self._take_in(
                (CHECKPOINT, names.METRICS),
                [f"{names.CHECKPOINTS}/{folder.name}/*" for folder in gone],
            )
            self._write()

    def close(self) -> None:
        """Take in everything: nothing is being written any more.

        Raises:
            OSError: As `seal`.
        """
        with self._lock:
            self._open = False
            self._take_in((CHECKPOINT, names.METRICS, *FLEETING, *self._rewritten))
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
        for known in (self._entries, self._seen):
            for name in [name for name in known if matches(name, patterns)]:
                del known[name]

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a small file by one rename.

        Raises:
            OSError: The disk refused; the file is the old one or the new one.
        """
        name = path.relative_to(self.run.path).as_posix()
        with self._lock, self.rewriting(name):
            self.forget([name])
            replace_bytes(path, content)
            if path == self.run.metrics:
                self._metrics = None

    def accept(self, changed: Sequence[str], noted: str, by: str) -> Accepted:
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
            self._metrics = None
            for name in changed:
                path = self.run.path / name
                if path.is_symlink() or path.exists():
                    self._entries[name], self._seen[name] = self._hashed(path), _signature(path)
            was, now = (
                None if entry is None else entry.hexdigest
                for entry in (before, self._entries.get(noted))
            )
            record = Accepted(noted, _now(), by, was, now)
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
            known = matches(name, self._rewritten) or (
                name in self._seen and matches(name, FLEETING)
            )
            if matches(name, gone) or (deleted and known) or set_aside(self.run, name):
                del self._entries[name]
        written, self._adopted = (*written, *self._adopted), ()
        for name, path in found.items():
            signature = _signature(path)
            unchanged = signature == self._seen.get(name)
            if matches(name, written) and not (unchanged or kind_of(path) or matches(name, gone)):
                self._entries[name], self._seen[name] = self._hashed(path), signature

    def _hashed(self, path: Path) -> Entry:
        """Make a file's entry, the file flushed: of what grows, only what is new is read."""
        with open_file(path) as file:
            os.fsync(file.fileno())
            if path != self.run.metrics:
                sync_folder(path.parent)
                return Entry(os.fstat(file.fileno()).st_size, digest_of(file).hexdigest())
            known = self._entries.get(names.METRICS, Entry.of(b""))
            if self._metrics is None:
                digest = digest_of(file, size=known.size)
                if digest.hexdigest() != known.hexdigest:
                    return known  # damaged before: it stays so
                self._metrics = digest
            file.seek(known.size)
            more = file.read()
        if self._open:  # the end of a line that the disk refused is taken back
            more = more[: more.rfind(b"\n") + 1]
        self._metrics.update(more)
        return Entry(known.size + len(more), self._metrics.hexdigest())

    def _write(self) -> None:
        """Replace the file."""
        unsealed = (*(FLEETING if self._open else ()), *self._rewritten)
        files = {
            name: replace(entry, grows=self._open and name == names.METRICS)
            for name, entry in sorted(self._entries.items())
            if not matches(name, unsealed)
        }
        facts = {
            "run": self.run_id,
            "sealed_at": _now(),
            "writing": sorted({*(_IN_USE if self._open else ()), *self._rewritten}),
            **({"accepted": list(map(asdict, self.accepted))} if self.accepted else {}),
            "whole": {
                name: held
                for name, held in self.whole.items()
                if (self.run.checkpoints / name).is_dir()
            },
        }
        replace_bytes(self.run.manifest, sealed_text(FORMAT, facts, files))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _signature(path: Path) -> _Signature:
    known = path.lstat()
    return known.st_size, known.st_mtime_ns, known.st_ino


def _is_settled(path: Path, entry: Entry | None, writing: bool) -> bool:
    """Tell whether a file that is there is no part of what a process that died has written and not sealed."""
    if entry is None:
        return not writing
    return not entry.grows or path.lstat().st_size == entry.size


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
    run = next(
        (
            RunDir(folder)
            for folder in paths[0].absolute().parents
            if RunDir(folder).manifest.is_file()
        ),
        None,
    )
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
                if not all(matches(name, FLEETING) for name in inside):
                    raise
            except CheckpointError:
                pass  # a damaged manifest stays as it is: `optrun verify` names it
        yield
