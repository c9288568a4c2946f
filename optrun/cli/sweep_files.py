"""Record the contents of the files of a sweep, and refuse to continue it with other contents."""

import contextlib
import glob
import json
from collections.abc import Sequence
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import ConfigError, StorageError
from optrun.base.plain import PlainMapping, flat, is_inside_any
from optrun.base.reading import expand_home, read_json
from optrun.config.original_cwd import path_keys
from optrun.config.saved import read_config
from optrun.data.cache import digest_file
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job


def refuse_changed_files(directory: SweepDir, jobs: Sequence[Job]) -> None:
    """Refuse to continue a sweep if its data or model changed after a job was trained on it.

    The present contents of the files are recorded in the directory of the sweep. An earlier record
    that is missing or cannot be read refuses nothing, and is replaced.

    Args:
        directory: Directory of the sweep.
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
            before = recorded.get(path, {})  # empty: not recorded yet
            if before not in ({}, now):
                _refuse_if_trained_on(directory, path, before, now)
            recorded[path] = now
    try:
        replace_text(directory.files, json.dumps(recorded))
    except OSError as error:
        raise StorageError(
            f"{directory.files}: {error.strerror}. The same command continues the sweep when"
            " the file can be written."
        ) from error


def _refuse_if_trained_on(
    directory: SweepDir, path: str, before: dict[str, str], now: dict[str, str]
) -> None:
    """Refuse changed files of a path if a job of the sweep was trained on them.

    Args:
        directory: Directory of the sweep.
        path: `KEY=PATH`, see `contents_of`.
        before: The files of the path and their contents when they were recorded.
        now: The same at present.

    Raises:
        ConfigError: The message names the first file that differs.
    """
    job_name = _trained_on(directory, path.partition("=")[2])
    if job_name is None:
        return
    # The first file that changed, is gone or is new.
    file = next(file for file in {**before, **now} if before.get(file) != now.get(file))
    raise ConfigError(
        f"{path}: {file} was {before.get(file, 'missing')} when {job_name} was trained,"
        f" and is {now.get(file, 'missing')} now. Restore it, or choose another"
        " hydra.sweep.dir: one sweep compares runs on the same files."
    )


def contents_of(values: PlainMapping) -> dict[str, dict[str, str]]:
    """Describe the files of each path in the configuration of a job.

    Returns:
        `KEY=PATH` -> name -> size and digest of each file of the path, which may be a folder or a
        glob: `{"data.train=rows.csv": {"rows.csv": "1,204 bytes, digest 0123456789abcdef"}}`. No
        files for a path that does not exist, such as a name on the hub. For streams and data sets
        in folders, which are too large, the key is `sizes of KEY=PATH`, and there are no digests.
    """
    # Not callbacks, since the run may write their files.
    keys = [key for key in path_keys(values) if not key.startswith("callbacks.")]
    leaves = flat(values)
    contents = {}
    for key, value in leaves.items():
        if not is_inside_any(key, keys):
            continue
        is_stream = bool(leaves.get(f"{key.rpartition('.')[0]}.streaming"))
        is_large = is_stream or key == "data.path"
        prefix = "sizes of " if is_large else ""
        for text in _texts(value):
            files = _describe_files(text, with_digest=not is_large)
            contents[f"{prefix}{key}={text}"] = files
    return contents


def _texts(value: object) -> list[str]:
    """List the texts of a value: itself, or the items of a list."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _describe_files(text: str, *, with_digest: bool) -> dict[str, str]:
    """Map the files of a path or glob to their size and digest.

    Left out are hidden files and folders, which no data set is read from, and files that cannot be
    read.
    """
    path = expand_home(text)
    files = {text: path}
    if path.is_dir():
        inside = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*")}
        files = {name: entry for name, entry in inside.items() if "/." not in f"/{name}"}
    elif not path.is_file():
        files |= {match: Path(match) for match in glob.glob(str(path), recursive=True)}  # noqa: PTH207
    descriptions = {}
    for name, file in sorted(files.items()):
        with contextlib.suppress(OSError, ValueError):  # whoever reads it reports what is wrong
            if file.is_file():
                digest = f", digest {digest_file(file)[:16]}" if with_digest else ""
                descriptions[name] = f"{file.stat().st_size:,} bytes{digest}"
    return descriptions


def _trained_on(directory: SweepDir, text: str) -> str | None:
    """Name a job of the sweep trained with a path; None if there is none.

    Jobs without a finished step do not count.
    """
    for config in sorted(directory.path.glob("*/config.yaml")):
        job_name = config.parent.name
        with contextlib.suppress(ConfigError):
            values = flat(read_config(config)).values()
            is_used = any(text in _texts(value) for value in values)
            if is_used and directory.steps_done(job_name):
                return job_name
    return None
