"""Find the run directory and the checkpoint of `resume=...`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts.forks import reading
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import (
    CHECKPOINT_MANIFEST,
    CHECKPOINTS,
    RunDir,
    checkpoint_folders,
    find_runs,
    parse_step,
)
from optrun.base.errors import CheckpointError, ConfigError, nearest, printable, refuse_url
from optrun.base.reading import read_text

_LOOK_SECONDS = 0.05


@dataclass
class Target:
    """The run and checkpoint of `resume`."""

    run: RunDir
    checkpoint: Path | None
    """A checkpoint asked for by name; None: the newest that is whole."""


def find_target(value: str, *, run_dir: Path | None, outputs: Path) -> Target | None:
    """Find the run of `resume`.

    Args:
        value: RUN_DIR, CHECKPOINT, `latest` or `auto`.
        run_dir: `hydra.run.dir` where the command line names one: `latest` and `auto` then look
            there alone.
        outputs: Where runs lie otherwise.

    Returns:
        The target; None for `auto` where there is nothing to resume.

    Raises:
        ConfigError: The path is no run and no checkpoint, or contradicts `hydra.run.dir`.
        CheckpointError: `latest` found no run.
    """
    if value.lower() == "true" and not Path(value).exists():
        raise ConfigError(
            f"resume={value}: expected a run directory, a checkpoint, latest or auto. Did you mean"
            " resume=latest?"
        )
    if value in ("latest", "auto"):
        checkpoint = _latest(run_dir, outputs)
        if checkpoint is None and value == "latest":
            where = run_dir if run_dir is not None else outputs
            raise CheckpointError(
                f"resume=latest: no run in {where}. Start one without resume, or with resume=auto."
            )
        return checkpoint
    target = locate(value, "resume=")
    if run_dir is not None and run_dir.resolve() != target.run.path.resolve():
        raise ConfigError(
            f"resume={value} goes on in {target.run.path}, but hydra.run.dir={run_dir} names"
            " another directory. Leave one out."
        )
    return target


def _latest(run_dir: Path | None, outputs: Path) -> Target | None:
    if run_dir is not None:
        run = RunDir(run_dir)
        return Target(run, None) if run.is_run() and not run.is_unbegun() else None
    started = []
    for path in find_runs(outputs):
        try:
            started.append(
                (
                    str(read_summary(RunDir(path).summary, any_format=True).get("started_at", "")),
                    str(path),
                )
            )
        except (OSError, ValueError):
            continue  # no summary: the run did not get as far as its first step
    return Target(RunDir(max(started)[1]), None) if started else None


def locate(value: str, key: str = "") -> Target:
    """Locate a run directory or checkpoint given by path.

    Args:
        value: As it was given.
        key: What it was given for, with `=`, for messages.

    Raises:
        ConfigError: It is neither.
        CheckpointError: It is a link.
    """
    refuse_url(key.rstrip("=") or "RUN_DIR", value)
    path = Path(value).expanduser()
    if not path.exists():
        folders = path.parent.glob("*/") if path.parent.is_dir() else ()
        keywords = ("latest", "auto") if key == "resume=" else ()
        close = nearest(value, (*keywords, *(str(folder) for folder in folders)))
        hint = f" Did you mean {key}{close[0]}?" if close else ""
        raise ConfigError(f"{key}{value}: no such directory (looked from {Path.cwd()}).{hint}")
    if path.is_file() and path.parent.name == CHECKPOINTS:
        name = read_text(path, errors="replace").strip()
        path = path.parent / name if parse_step(name) is not None else path
    if path.is_symlink() and path.absolute().parent.name == CHECKPOINTS:
        raise CheckpointError(
            f"{key}{value}: a link: what lies outside of a run directory is not read as part of it."
        )
    if path.is_dir() and (
        parse_step(path.name) is not None or (path / CHECKPOINT_MANIFEST).is_file()
    ):
        run = path.resolve().parent.parent
        return Target(RunDir(run), path)
    if path.is_dir() and path.name == CHECKPOINTS and RunDir(path.parent).is_run():
        path = path.parent
    if not path.is_dir() or not RunDir(path).is_run():
        runs = list(find_runs(path))[:3] if path.is_dir() else []
        hint = f" Runs below it: {', '.join(map(str, runs))}." if runs else ""
        if not runs and path.is_dir() and any(path.glob("*.safetensors")):
            hint = " It has weights alone: model=pretrained model.path=DIR begins a run with them."
        raise ConfigError(
            f"{key}{value}: neither a run directory nor a checkpoint of optrun's.{hint}"
        )
    return Target(RunDir(path), None)


def checkpoint_of(path: str, key: str = "") -> tuple[RunDir, Path]:
    """Find the checkpoint of a path: a checkpoint, or the newest whole one of a run.

    Name those passed over.

    Args:
        path: As it was given.
        key: What it was given for, with `=`, for messages.

    Raises:
        ConfigError: The path is neither run nor checkpoint.
        CheckpointError: It is damaged, or the run has none that is whole.
    """
    from optrun.artifacts.identity import run_id_of
    from optrun.artifacts.manifest import problems
    from optrun.artifacts.retention import latest_whole

    target = locate(path, key)
    if target.checkpoint is not None:
        wrong = problems(target.checkpoint, run_id_of(target.run))
        if wrong:
            raise CheckpointError(wrong[0])
        return target.run, target.checkpoint
    newest, damaged = latest_whole(target.run)
    if newest is None:
        faults = " ".join(reasons[0] for reasons in damaged.values())
        raise CheckpointError(f"{target.run.path}: no checkpoint that is whole. {faults}".strip())
    for reasons in damaged.values():
        sys.stderr.write(f"optrun: warning: {printable(reasons[0])} Passed over.\n")
    return target.run, newest


@contextmanager
def held_checkpoint(path: str) -> Iterator[tuple[RunDir, Path]]:
    """Find a checkpoint as `checkpoint_of`, and keep its run.

    Which may be training, from deleting it meanwhile.

    If it is deleted between being chosen and being held, it is chosen anew.

    Raises:
        ConfigError: As `checkpoint_of`.
        CheckpointError: As `checkpoint_of`.
    """
    with ExitStack() as stack:
        while True:
            folders = checkpoint_folders(locate(path).run)
            try:
                run, folder = checkpoint_of(path)
            except CheckpointError:
                if checkpoint_folders(locate(path).run) == folders:
                    raise
                continue
            with suppress(CheckpointError):
                stack.enter_context(reading(folder))
                if folder.is_dir():
                    break
            time.sleep(_LOOK_SECONDS)
        yield run, folder
