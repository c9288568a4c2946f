"""Remember what the files of a sweep hold, and refuse to go on with others under the same path."""

import contextlib
import glob
import json
from collections.abc import Sequence
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import ConfigError, StorageError
from optrun.base.plain import PlainMapping, flat
from optrun.base.reading import read_json
from optrun.config.original_cwd import is_path, path_keys
from optrun.config.saved import read_config
from optrun.data.cache import digest_file
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job


def refuse_changed_files(directory: SweepDir, jobs: Sequence[Job]) -> None:
    """Refuse to go on with a sweep after a change of its data or model.

    A change counts once a job has been trained on the file.

    Args:
        directory: Directory of the sweep; the current contents of the files are recorded in it.
        jobs: Jobs that together have every path of the sweep.

    Raises:
        ConfigError: The message names the key, the file and the job.
        StorageError: The disk refused the write.
    """
    try:
        recorded: dict[str, dict[str, str]] = read_json(directory.files)
    except (OSError, ValueError):
        recorded = {}
    for job in jobs:
        for path, now in contents_of(job.values).items():
            then = recorded.get(path, {})
            user = _trained_on(directory, path.partition("=")[2]) if then not in ({}, now) else None
            if user is not None:
                file = next(file for file in {**then, **now} if then.get(file) != now.get(file))
                raise ConfigError(
                    f"{path}: {file} was {then.get(file, 'missing')} when {user} was trained,"
                    f" and is {now.get(file, 'missing')} now. Restore it, or choose another"
                    " hydra.sweep.dir: one sweep compares runs on the same files."
                )
            recorded[path] = now
    try:
        replace_text(directory.files, json.dumps(recorded))
    except OSError as error:
        raise StorageError(
            f"{directory.files}: {error.strerror}. Make room; the same command continues it."
        ) from error


def contents_of(values: PlainMapping) -> dict[str, dict[str, str]]:
    """Describe the files of each path in the configuration of a job.

    Returns:
        `KEY=PATH` to the files of the path, a folder or a glob, and of each its size and the begin
        of its digest. No files for a path that does not exist, such as a name on the hub.
        `sizes of KEY=PATH` for streams and data sets in folders, which take too long to digest.
    """
    # A run may write the files of its callbacks.
    keys = [key for key in path_keys(values) if not key.startswith("callbacks.")]
    leaves = flat(values)
    contents = {}
    for key, value in leaves.items():
        is_large = key == "data.path" or bool(leaves.get(f"{key.rpartition('.')[0]}.streaming"))
        for text in _texts(value) if is_path(key, keys) else ():
            path = f"sizes of {key}={text}" if is_large else f"{key}={text}"
            contents[path] = _describe_files(text, with_digest=not is_large)
    return contents


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _describe_files(text: str, *, with_digest: bool) -> dict[str, str]:
    """Map the files of a path, without hidden ones of a folder, to size and digest."""
    path = Path(text).expanduser()
    if path.is_dir():
        inside = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*")}
        files = {name: entry for name, entry in inside.items() if not name.startswith(".")}
    else:
        matches = [] if path.is_file() else glob.glob(str(path), recursive=True)  # noqa: PTH207
        files = {text: path, **{match: Path(match) for match in matches}}
    descriptions = {}
    for name, file in sorted(files.items()):
        with contextlib.suppress(OSError, ValueError):  # who needs it says what is wrong with it
            if file.is_file():
                digest = f", digest {digest_file(file)[:16]}" if with_digest else ""
                descriptions[name] = f"{file.stat().st_size:,} bytes{digest}"
    return descriptions


def _trained_on(directory: SweepDir, text: str) -> str | None:
    """Find a job of the sweep trained with a path.

    Jobs without a finished step do not count.
    """
    for config in sorted(directory.path.glob("*/config.yaml")):
        with contextlib.suppress(ConfigError):
            used = (text for value in flat(read_config(config)).values() for text in _texts(value))
            if directory.steps_done(config.parent.name) and text in used:
                return config.parent.name
    return None
