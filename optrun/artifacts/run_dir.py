"""Every file name inside a run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from optrun.base.bounded_yaml import yaml_mapping
from optrun.base.errors import UnreadableFileError
from optrun.base.reading import read_text

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVES = "curves.png"
CHECKPOINTS = "checkpoints"
MODEL = "model"
TOKENIZER = "tokenizer"
LOG = "optrun.log"
LOGS = "logs"
TRACKING = "tracking.json"
LOCK = ".lock"
HYDRA = ".hydra"
EXTRA = "extra"
SWEEP = "sweep.json"  # beside the runs of a sweep

# Inside one checkpoint, `checkpoints/step-00000100/`; weights and optimizer state in a file each,
# or in shards.
CHECKPOINT_MODEL = "model.safetensors"
CHECKPOINT_OPTIMIZER = "optimizer.safetensors"
CHECKPOINT_MODEL_SHARDS = "model"
CHECKPOINT_OPTIMIZER_SHARDS = "optimizer"
CHECKPOINT_STATE = "state.json"
CHECKPOINT_MANIFEST = "manifest.json"
BEST = "best"
LAST = "last"

HYDRA_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")
"""Inside `.hydra/`."""
RANK_LOG = re.compile(r"rank-\d+\.log")
"""Inside `logs/`."""
PROGRAM = "optrun"
"""Name that Hydra notes as that of its job."""

_STEP = re.compile(r"step-(\d{8,})")


def step_name(global_step: int) -> str:
    """Name the folder of the checkpoint after `global_step` optimizer steps.

    Example:
        >>> step_name(100)
        'step-00000100'
    """
    return f"step-{global_step:08d}"


def parse_step(name: str) -> int | None:
    """Read the step of a checkpoint folder name; None if the name is not one.

    Example:
        >>> parse_step("step-00000100")
        100
        >>> parse_step("step-00000100.tmp") is None
        True
    """
    match = _STEP.fullmatch(name)
    if match:
        return int(match[1])
    return None


class _Inside:
    """A descriptor for a path inside a run directory."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path.joinpath(*self.parts)


@dataclass(frozen=True)
class RunDir:
    """The paths of one run; only methods whose name says so touch the disk."""

    path: Path

    config = _Inside(CONFIG)
    """The resolved configuration, YAML."""
    metrics = _Inside(METRICS)
    """One JSON object per logged step."""
    summary = _Inside(SUMMARY)
    """Status, best and last metrics, versions, hardware."""
    curves = _Inside(CURVES)
    """The picture of the run."""
    checkpoints = _Inside(CHECKPOINTS)
    """Folder of checkpoints."""
    best = _Inside(CHECKPOINTS, BEST)
    """Says which checkpoint is best."""
    last = _Inside(CHECKPOINTS, LAST)
    """Says which checkpoint is the latest."""
    model = _Inside(MODEL)
    """The final model in `save_pretrained` form."""
    tokenizer = _Inside(TOKENIZER)
    """The tokenizer, or image preparation, in `save_pretrained` form."""
    log = _Inside(LOG)
    """Log of the run, text."""
    logs = _Inside(LOGS)
    """Logs of the ranks other than the first."""
    extra = _Inside(EXTRA)
    """Files of callbacks and trackers of the user's own."""
    lock = _Inside(LOCK)
    """Held by the process that writes here."""
    hydra = _Inside(HYDRA)
    """What Hydra writes about the composition."""

    def __init__(self, path: Path | str) -> None:
        object.__setattr__(self, "path", Path(path))

    def checkpoint(self, global_step: int) -> Path:
        """Return the folder of the checkpoint after `global_step` optimizer steps."""
        return self.checkpoints / step_name(global_step)

    def rank_log(self, rank: int) -> Path:
        """Return the log of a rank other than the first, text."""
        return self.logs / f"rank-{rank}.log"

    def is_run(self) -> bool:
        """Tell whether a run was started here: it has a summary, metrics or Hydra's folder.

        A lone `config.yaml` does not count, since folders of configuration have one, too. A job
        that failed before it wrote anything has only `.hydra/overrides.yaml`, which counts unless
        `.hydra/hydra.yaml` names another program.
        """
        if self.summary.is_file() or self.metrics.is_file():
            return True
        return (self.hydra / "overrides.yaml").is_file() and self._program() in (None, PROGRAM)

    def is_unbegun(self) -> bool:
        """Tell whether the directory holds at most the traces of a start killed early.

        - Nothing at all, the lock, and a temporary file of `config.yaml`: true.
        - With `.hydra/`, perhaps torn, and logs: true if optrun made them, and no other program.
        - Anything else beside them, such as `summary.json`, or no directory: false.
        """
        if self.path.is_symlink() or not self.path.is_dir() or self.hydra.is_symlink():
            return False
        # `replace_text` writes this one, and renames it.
        unfinished_config = re.compile(rf"\.{re.escape(CONFIG)}\.\d+\.tmp")
        paths = self.path.iterdir()
        names = {path.name for path in paths if not unfinished_config.fullmatch(path.name)}
        if names <= {LOCK}:
            return True
        if HYDRA not in names or not names <= {HYDRA, LOCK, LOG, LOGS}:
            return False  # logs without `.hydra/` may be those of any program
        return self._hydra_is_ours() and not self._has_foreign_logs()

    def _hydra_is_ours(self) -> bool:
        """Tell whether optrun made `.hydra/`: it has only Hydra's files, which name optrun.

        A start that is killed early leaves a folder without the name. It counts as optrun's if it
        is empty, or if the directory has a lock file.
        """
        files = {path.name for path in self.hydra.iterdir()}
        if not files <= set(HYDRA_FILES):
            return False
        program = self._program()
        if program is None:
            return not files or self.lock.is_file()
        return program == PROGRAM

    def _program(self) -> str | None:
        """Read the program's name in `.hydra/`; None if it is torn or not written yet."""
        try:
            return str(yaml_mapping(self.hydra / "hydra.yaml")["hydra"]["job"]["name"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _has_foreign_logs(self) -> bool:
        """Tell whether `logs` is no folder, or holds anything but logs of ranks.

        A missing folder holds nothing; a link counts as foreign.
        """
        if self.logs.is_symlink():
            return True
        if not self.logs.exists():
            return False
        return not self.logs.is_dir() or any(
            RANK_LOG.fullmatch(path.name) is None for path in self.logs.iterdir()
        )


_WRITTEN = (
    *(CONFIG, METRICS, SUMMARY, TRACKING, CURVES, LOG, LOGS, LOCK, HYDRA),
    *(CHECKPOINTS, MODEL, TOKENIZER, "nonfinite", "tensorboard"),
    *("report*.html", "report*.md", "report*.csv", "report-*.png"),
)
_OF_TRACKERS = ("wandb", "mlruns", "mlflow.db*", EXTRA)


def is_of_tracker(name: str) -> bool:
    """Tell whether a tracker's library or a callback writes this file name in a run."""
    return any(fnmatchcase(name, pattern) for pattern in _OF_TRACKERS)


def is_written(name: str) -> bool:
    """Tell whether a run, its trackers or a report write this file name in a run."""
    return is_of_tracker(name) or any(fnmatchcase(name, pattern) for pattern in _WRITTEN)


def read_pointer(pointer: Path) -> Path | None:
    """Return the checkpoint folder that the file `best` or `last` names.

    None if the file cannot be read, or names no existing `step-*` folder beside it.
    """
    try:
        name = read_text(pointer).strip()
    except (OSError, UnicodeDecodeError, UnreadableFileError):
        return None
    folder = pointer.parent / name
    if parse_step(name) is not None and folder.is_dir():
        return folder
    return None


def find_runs(path: Path | str) -> Iterator[Path]:
    """Yield run directories at or beneath a directory, in natural order (2 before 10).

    A run is not searched for further runs; hidden folders and links to folders are not entered.

    Args:
        path: A run, a sweep, or a folder of them.

    Yields:
        One path per run; none if the directory does not exist.

    Raises:
        PermissionError: A folder cannot be read; it may hold runs, which a comparison would miss.
    """
    root = Path(path)
    if RunDir(root).is_run():
        yield root
        return
    try:
        with os.scandir(root) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
            ]
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(names, key=_natural):
        yield from find_runs(root / name)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key with digits compared as numbers."""
    pieces = re.split(r"(\d+)", name)  # "run12b" -> "run", "12", "b"
    return [
        (0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces if piece
    ]


def checkpoint_folders(run: RunDir) -> list[Path]:
    """List folders and links with a checkpoint's name, newest first, complete or not."""
    if run.checkpoints.is_symlink() or not run.checkpoints.is_dir():
        return []
    steps_and_folders = []
    for path in run.checkpoints.iterdir():
        step = parse_step(path.name)
        if step is not None and path.is_dir():
            steps_and_folders.append((step, path))
    return [path for _, path in sorted(steps_and_folders, reverse=True)]


def unused_path(path: Path) -> Path:
    """Return a path, or the first of `NAME-2`, `NAME-3`, ... if something is there.

    A suffix such as `.json` stays at the end.
    """
    unused = path
    number = 1
    while unused.exists():
        number += 1
        unused = path.with_stem(f"{path.stem}-{number}")
    return unused
