"""Resolve a path that a person typed, once: a run, a checkpoint, a model, or a folder of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from optrun.artifacts.forks import reading
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import problems
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import (
    CHECKPOINT_MANIFEST,
    CHECKPOINTS,
    RunDir,
    checkpoint_folders,
    find_runs,
    parse_step,
    read_pointer,
)
from optrun.base.errors import CheckpointError, ConfigError, nearest, printable, refuse_url
from optrun.base.reading import expand_home

_OUTPUTS = Path("outputs")
"""Where `latest` and `auto` look, unless `hydra.run.dir` names another directory."""
_LOOK_SECONDS = 0.05
_SHOWN = 3
"""Runs of a folder that a message names."""


@dataclass(frozen=True)
class Target:
    """A typed path, resolved to a run, a checkpoint, a model folder or another path.

    Attributes:
        typed: The path as it was typed, with its key, for messages.
        path: The folder.
        kind: `run`, `checkpoint`, `model` (a folder with weights) or `other` (anything else).
    """

    typed: str
    path: Path
    kind: Literal["run", "checkpoint", "model", "other"]

    @property
    def run(self) -> RunDir:
        """The run at the path, or the run of the checkpoint at the path.

        Raises:
            ConfigError: The path is neither a run nor a checkpoint. The message says what to do
                with a model, or names up to three runs beneath the path.
        """
        if self.kind == "checkpoint":
            return RunDir(self.path.resolve().parent.parent)
        if self.kind == "run":
            return RunDir(self.path)
        hint = ""
        if self.kind == "model":
            hint = " It has weights alone: model=pretrained model.path=DIR begins a run with them."
        runs = list(islice(find_runs(self.path), _SHOWN))
        if runs:
            hint = f" Name one of the runs in it: {', '.join(map(str, runs))}."
        raise ConfigError(
            f"{self.typed}: neither a run directory nor a checkpoint of optrun's.{hint}"
        )

    @property
    def checkpoint(self) -> Path | None:
        """The named checkpoint; None if a run was named."""
        if self.kind == "checkpoint":
            return self.path
        return None

    @property
    def runs_folder(self) -> Path:
        """The folder at or beneath which to search for runs.

        Raises:
            ConfigError: The path is a checkpoint, a model or a file.
        """
        if self.kind == "checkpoint":
            raise ConfigError(f"{self.typed}: a checkpoint. Name its run: {self.run.path}.")
        if self.kind == "model" or not self.path.is_dir():
            raise ConfigError(f"{self.typed}: neither a run directory nor a folder of runs.")
        return self.path

    def complete_checkpoint(self) -> Path:
        """Return the named checkpoint after a check, or the run's newest complete one.

        All bytes are read for the check. For a run, writes to stderr which newer ones were skipped
        as damaged, and where the best one is if that is another one.

        Raises:
            ConfigError: The path is neither a run nor a checkpoint.
            CheckpointError: The checkpoint is damaged, or the run has no complete one.
        """
        from optrun.artifacts.retention import latest_complete

        # 1. The named checkpoint: no other one takes its place.
        if self.checkpoint is not None:
            faults = problems(self.checkpoint, run_id_of(self.run))
            if faults:
                raise CheckpointError(faults[0])
            return self.checkpoint
        # 2. The newest one of a run; `damaged` has the faults of newer ones.
        newest, damaged = latest_complete(self.run)
        first_faults = [faults[0] for faults in damaged.values()]
        if newest is None:
            message = f"{self.path}: no complete checkpoint."
            raise CheckpointError(" ".join([message, *first_faults]))
        for fault in first_faults:
            sys.stderr.write(f"optrun: warning: {printable(fault)} Passed over.\n")
        best = read_pointer(self.run.best)
        if best and best.name != newest.name:
            note = (
                f"{newest.name} is the newest checkpoint; the best is {self.run.best} ({best.name})"
            )
            sys.stderr.write(f"optrun: {printable(note)}\n")
        return newest

    @contextmanager
    def locked_checkpoint(self) -> Iterator[Path]:
        """Choose a checkpoint as `complete_checkpoint`, and lock it against deletion by its run.

        A run that trains meanwhile may delete it before it is locked: then another one is chosen,
        until one is locked.

        Yields:
            The folder of the checkpoint, locked until the block ends.

        Raises:
            ConfigError: As `complete_checkpoint`.
            CheckpointError: As `complete_checkpoint`, and no checkpoint came or went meanwhile.
        """
        with ExitStack() as locks:
            while True:
                # 1. Choose. An error counts only if the run has neither saved nor deleted a
                # checkpoint meanwhile; else it may be about one that vanished while it was read.
                folders = checkpoint_folders(self.run)
                try:
                    folder = self.complete_checkpoint()
                except CheckpointError:
                    if checkpoint_folders(self.run) == folders:
                        raise
                    continue
                # 2. Lock. `reading` raises if the run is deleting the checkpoint; if the run was
                # faster, the lock is on a folder that is gone. Either way choose again.
                with suppress(CheckpointError):
                    locks.enter_context(reading(folder))
                    if folder.is_dir():
                        break
                time.sleep(_LOOK_SECONDS)
            yield folder


def locate(value: str, key: str = "") -> Target:
    """Resolve a typed path to a run, a checkpoint, a model or another path.

    What each path becomes, in RUN, a run directory:

    - RUN, RUN/checkpoints: the run at RUN
    - RUN/checkpoints/step-00000100: that checkpoint; so is any folder with its manifest
    - RUN/checkpoints/best, .../last: the checkpoint that this file names
    - RUN/model, or another folder with *.safetensors: a model
    - anything else that exists, a file too: `other`

    A checkpoint need not be complete or undamaged.

    Args:
        value: The typed path; a leading `~` is expanded.
        key: The typed key with `=`, such as `resume=`, for messages. Empty: a bare argument.

    Raises:
        ConfigError: The path does not exist, or is a URL; the message names a near one.
        CheckpointError: The path is a link in `checkpoints/`.
    """
    refuse_url(key.rstrip("=") or "RUN_DIR", value)
    path = expand_home(value)
    typed = f"{key}{value}"
    if not path.exists():
        raise ConfigError(
            f"{typed}: no such directory (looked from {Path.cwd()}).{_nearest_path(value, key)}"
        )
    # `best` and `last` are files that hold the name of a checkpoint beside them. Any other file,
    # and one that names none, stays what it is.
    if path.is_file() and path.parent.name == CHECKPOINTS:
        path = read_pointer(path) or path
    if path.is_symlink() and path.absolute().parent.name == CHECKPOINTS:
        raise CheckpointError(
            f"{typed}: a link: what lies outside of a run directory is not read as part of it."
        )
    if not path.is_dir():
        return Target(typed, path, "other")
    if parse_step(path.name) is not None or (path / CHECKPOINT_MANIFEST).is_file():
        return Target(typed, path, "checkpoint")
    if path.name == CHECKPOINTS and RunDir(path.parent).is_run():
        path = path.parent
    if RunDir(path).is_run():
        return Target(typed, path, "run")
    if any(path.glob("*.safetensors")):
        return Target(typed, path, "model")
    return Target(typed, path, "other")


def _nearest_path(value: str, key: str) -> str:
    """Suggest what was meant by a path that does not exist; empty if nothing is near.

    Args:
        value: The typed path.
        key: The typed key with `=`; `resume=` also takes the words `latest` and `auto`.
    """
    if value == "latest":
        return " Only resume=latest finds the last run; elsewhere give outputs/DATE/TIME."
    folders = expand_home(value).parent.glob("*/")
    keywords = ("latest", "auto") if key == "resume=" else ()
    close = nearest(value, (*keywords, *map(str, folders)))
    return f" Did you mean {key}{close[0]}?" if close else ""


def find_target(value: str, run_dir: Path | None) -> Target | None:
    """Find the run or checkpoint that `resume=` names.

    Args:
        value: RUN_DIR, CHECKPOINT, `latest` or `auto`.
        run_dir: The typed `hydra.run.dir`, or None. If given, `latest` and `auto` look only there.

    Returns:
        The target; None for `auto` if there is nothing to resume.

    Raises:
        ConfigError: The path is neither a run nor a checkpoint, or contradicts `hydra.run.dir`.
        CheckpointError: `latest` found no run.
    """
    typed = f"resume={value}"
    # 1. A word.
    if value in ("latest", "auto"):
        path = _latest_run(run_dir)
        if path is not None:
            return Target(typed, path, "run")
        if value == "auto":
            return None
        where = _OUTPUTS if run_dir is None else run_dir
        raise CheckpointError(
            f"{typed}: no run in {where}. Start one without resume, or with resume=auto."
        )
    # 2. A path.
    if value.lower() == "true" and not Path(value).exists():
        raise ConfigError(
            f"{typed}: expected a run directory, a checkpoint, latest or auto. Did you mean"
            " resume=latest?"
        )
    target = locate(value, "resume=")
    run_path = target.run.path
    if run_dir is not None and run_dir.resolve() != run_path.resolve():
        raise ConfigError(
            f"{typed} continues in {run_path}, but hydra.run.dir={run_dir} names"
            " another directory. Leave one out."
        )
    return target


def _latest_run(run_dir: Path | None) -> Path | None:
    """Find the run in `outputs/` that was started last, or take the run in `run_dir`.

    Args:
        run_dir: The only place to look; None: everywhere in `outputs/`, by `started_at` in the
            summary.

    Returns:
        None if no run in `outputs/` wrote a summary, or if training in `run_dir` has not begun.
    """
    if run_dir is not None:
        run = RunDir(run_dir)
        if run.is_run() and not run.is_unbegun():
            return run_dir
        return None
    started = []
    for path in find_runs(_OUTPUTS):
        try:
            summary = read_summary(RunDir(path).summary, any_format=True)
        except (OSError, ValueError):
            continue  # no summary: the run did not get as far as its first step
        started.append((str(summary.get("started_at", "")), str(path)))
    if started:
        return Path(max(started)[1])  # times are ISO 8601, which sorts as text
    return None
