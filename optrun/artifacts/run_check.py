"""A run directory held against its manifest, file by file."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optrun.artifacts import run_dir as names
from optrun.artifacts.checksum import file_problem
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.lock import RunLock
from optrun.artifacts.manifest import problems, read_manifest
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.artifacts.run_manifest import (
    APART,
    CHECKPOINT,
    UNREAD,
    Accepted,
    RunManifest,
    Sealed,
    files_of,
    matches,
    read_run_manifest,
    refuse_other_manifest,
    set_aside,
)
from optrun.base.errors import CheckpointError, ConfigError, did_you_mean
from optrun.base.reading import kind_of

_HALF = re.compile(
    rf"\.({re.escape(names.MANIFEST)}|report(\.html|\.md|\.csv|-[\w-]+\.(png|csv)))\.\d+\.tmp"
)
WEIGHTS = (f"{names.CHECKPOINTS}/step-*", "*.safetensors")
"""What is never accepted."""
NEEDED = (names.CONFIG, names.METRICS, f"{names.TOKENIZER}/*", f"{names.HYDRA}/*")
"""What may not be gone."""
_TRIES = 5
"""A run that goes on may write its manifest while its files are read; then they are read again."""


@dataclass
class Checked:
    """What was found; names are paths inside the run."""

    sealed: bool = False
    """Whether there was a manifest to hold the files against."""
    wrong: dict[str, str] = field(default_factory=dict)
    """File to what is wrong with it."""
    open: dict[str, str] = field(default_factory=dict)
    """File to why it, or its end, is not covered; no damage."""
    whole: list[str] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    """Records of changes that a person accepted."""


def check_run(run: RunDir, patterns: Sequence[str] = ("*",)) -> Checked:
    """Hold every file of a run, or those meant by some patterns, against its manifest.

    Nothing is changed.
    """
    for _ in range(_TRIES):
        before = _stamp(run)
        checked = _check(run, patterns)
        if not checked.wrong or _stamp(run) == before:
            break
    return checked


def _stamp(run: RunDir) -> int | None:
    try:
        return run.manifest.lstat().st_ino
    except OSError:
        return None


def _check(run: RunDir, patterns: Sequence[str]) -> Checked:
    checked = Checked()
    try:
        sealed = read_run_manifest(run)
    except CheckpointError as error:
        checked.wrong[names.MANIFEST] = str(error)
        return checked
    found = files_of(run)
    if sealed is None:
        if _had_manifest(run):
            checked.wrong[names.MANIFEST] = (
                f"{run.manifest}: missing: what the files of this run were is not known."
            )
        unknown = [
            name
            for name in found
            if matches(name, patterns) and not matches(name, (CHECKPOINT, *UNREAD))
        ]
        checked.open = dict.fromkeys(unknown, "not covered: this run has no manifest")
        return checked
    checked.sealed, checked.accepted = True, sealed.accepted
    for name in sorted({*found, *sealed.entries}):
        if matches(name, patterns):
            _judge(run, name, sealed, checked)
    return checked


def _had_manifest(run: RunDir) -> bool:
    """Tell whether the run had a manifest.

    Its summary says so, or a checkpoint is of a run with an id.
    """
    with contextlib.suppress(OSError, ValueError):
        if names.MANIFEST in read_summary(run.summary).values():
            return True
    for folder in checkpoint_folders(run):
        with contextlib.suppress(OSError, CheckpointError):
            if read_manifest(folder).run_id:
                return True
    return False


def _judge(run: RunDir, name: str, sealed: Sealed, checked: Checked) -> None:
    path, entry = run.path / name, sealed.entries.get(name)
    if entry is None:
        if matches(name, APART):
            checked.open[name] = "not covered: a library's own, or set aside"
        elif kind := kind_of(path):
            checked.wrong[name] = f"{path}: {kind}; it is none of the files that this run sealed."
        elif matches(name, UNREAD):
            checked.open[name] = "not covered: nothing reads it again"
        elif _HALF.fullmatch(name):
            checked.open[name] = (
                "left by a process that was killed while it wrote: it goes at the next start"
            )
        elif matches(name, sealed.writing):
            checked.open[name] = "not covered yet: written after the last seal"
        else:
            checked.wrong[name] = f"{path}: added; it is none of the files that this run sealed."
        return
    problem = file_problem(path, entry)
    if problem is None:
        checked.whole.append(name)
        more = path.stat().st_size - entry.size
        if more:
            checked.open[name] = f"its last {more:,} bytes are not covered yet"
    elif (
        sealed.is_open
        and matches(name, (CHECKPOINT,))
        and (set_aside(run, name) or not problems(path.parent))
    ):
        # The process that died before sealing it replaced a checkpoint, or put it aside.
        checked.open[name] = "not covered yet: replaced after the last seal"
    else:
        checked.wrong[name] = problem


def problems_of(run: RunDir, patterns: Sequence[str] = ("*",)) -> list[str]:
    """Find what is wrong with files of a run, one message each; an empty list.

    Nothing, or the run has no manifest.

    Args:
        run: The run directory.
        patterns: Paths inside the run, as in `tokenizer/*`.
    """
    return list(check_run(run, patterns).wrong.values())


def refuse_damaged(run: RunDir, *patterns: str) -> None:
    """Refuse damage, before files of a run are read.

    Raises:
        OtherFormatError: A newer optrun wrote the manifest.
        CheckpointError: One of them is not as it was sealed; with the way out.
    """
    refuse_other_manifest(run)
    found = check_run(run, patterns).wrong
    wrong = list(found.values())
    if wrong and run.manifest.exists():
        way = "Restore it from a copy."
        there = {name: run.path / name for name in found if os.path.lexists(run.path / name)}
        taken = [
            name
            for name in found
            if not (kind_of(there[name]) if name in there else matches(name, NEEDED))
        ]
        if len(taken) == len(found):
            way += (
                f" Or take it as it is, with a record: optrun verify {shlex.quote(str(run.path))}"
                " --accept "
            )
            way += ", then ".join(map(shlex.quote, taken[:3]))
        raise CheckpointError(f"{' '.join(wrong)} {way}")


def accept(run: RunDir, given: str) -> Accepted:
    """Seal one file of a run as it is now, with a record; or its manifest, and with it every file.

    Args:
        run: The run directory.
        given: A path, inside of the run or from here.

    Returns:
        The record.

    Raises:
        ConfigError: It is whole, or no file of the run.
        CheckpointError: It may not be accepted; with what to do.
        LockedError: Another process writes the run.
        StorageError: The disk refused.
    """
    name = _inside(run, given)
    command = shlex.join(["optrun", "verify", str(run.path), "--accept", name])
    with RunLock(run.lock):
        if name == names.MANIFEST:
            return _accept_all(run, command)
        sealed = read_run_manifest(run)
        if sealed is None:
            raise CheckpointError(
                f"{run.manifest}: missing. Accept that first: --accept {names.MANIFEST}"
            )
        there, is_folder = (run.path / name).exists(), (run.path / name).is_dir()
        if is_folder or not (there or name in sealed.entries):
            what = "a folder; expected a file" if is_folder else f"no such file in {run.path}"
            hint = (
                did_you_mean(name, check_run(run).wrong) or "All its files are as they were sealed."
            )
            raise ConfigError(f"--accept {given}: {what}. {hint}")
        if matches(name, WEIGHTS):
            raise CheckpointError(
                f"{run.path / name}: holds weights or the state of training, which no person can"
                " vouch for. Restore it from a copy; a resume passes over a damaged checkpoint,"
                " and optrun export writes a model anew."
            )
        if not there and matches(name, NEEDED):
            raise CheckpointError(
                f"{run.path / name}: missing, and a run is nothing without it. Restore it from a"
                f" copy; a resume that goes on writes {names.TOKENIZER}/ anew."
            )
        if name not in check_run(run, (name,)).wrong:
            raise ConfigError(
                f"--accept {given}: it is as it was sealed; there is nothing to accept."
            )
        return RunManifest(run, sealed).accept([name], name, command)


def _inside(run: RunDir, given: str) -> str:
    path = Path(given).expanduser()
    if not path.is_absolute() and not (
        path.exists() and path.absolute().is_relative_to(run.path.absolute())
    ):
        path = run.path / path
    inside = Path(os.path.normpath(path.absolute()))
    if not inside.is_relative_to(os.path.normpath(run.path.absolute())):
        raise ConfigError(f"--accept {given}: expected a file of {run.path}.")
    return inside.relative_to(os.path.normpath(run.path.absolute())).as_posix()


def _accept_all(run: RunDir, command: str) -> Accepted:
    refuse_other_manifest(run)
    with contextlib.suppress(CheckpointError):
        if read_run_manifest(run) is not None:
            raise ConfigError(f"{run.manifest}: whole; there is nothing to accept.")
    made = RunManifest(run, Sealed({}, (), run_id_of(run)))
    every = [name for name in files_of(run) if not matches(name, (*APART, *UNREAD))]
    return made.accept(every, names.MANIFEST, command)
