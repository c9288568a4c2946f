"""Remember what the files of a sweep hold, and refuse to go on with others under the same path."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import ConfigError, StorageError
from optrun.base.plain import PlainMapping
from optrun.base.reading import read_json
from optrun.config.original_cwd import is_path, path_keys
from optrun.config.saved import flat, read_config
from optrun.data.cache import content_of
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job


def refuse_changed_files(directory: SweepDir, jobs: Sequence[Job]) -> None:
    """Refuse to go on with a sweep after a change of its data or model.

    Args:
        directory: Directory of the sweep; the current contents of the files are recorded in it.
        jobs: Jobs that together have every path of the sweep.

    Raises:
        ConfigError: The message names the key, the file and the job.
        StorageError: The disk refused the write.
    """
    try:
        contents_by_path: dict[str, dict[str, str]] = read_json(directory.files)
    except (OSError, ValueError):
        contents_by_path = {}
    paths: dict[tuple[str, str, bool], None] = {}
    for job in jobs:
        paths |= dict.fromkeys(_paths(job.values))
    for key, text, sizes_alone in paths:
        name = f"{key}={text}{' by size' if sizes_alone else ''}"
        then = contents_by_path.get(name, {})
        now = _contents(text, sizes_alone=sizes_alone)
        user = _trained_on(directory, text) if then and then != now else None
        if user is not None:
            raise ConfigError(
                f"{key}={text}: {_difference(then, now)}; {user} was trained on what it was."
                " Restore it, or choose another hydra.sweep.dir: one sweep compares runs on the"
                " same files."
            )
        contents_by_path[name] = now
    try:
        replace_text(directory.files, json.dumps(contents_by_path))
    except OSError as error:
        raise StorageError(
            f"{directory.files}: {error.strerror}. Make room; the same command goes on."
        ) from error


def _paths(values: PlainMapping) -> Iterator[tuple[str, str, bool]]:
    """Yield key and text of each path in the configuration of a job, and a flag.

    The flag is true if only file sizes are compared, because reading takes too long: for streams
    and folders of data.
    """
    # A run may write the files of its callbacks.
    keys = [key for key in path_keys(values) if not key.startswith("callbacks.")]
    leaves = flat(values)
    for key, value in leaves.items():
        if is_path(key, keys):
            vast = key == "data.path" or bool(leaves.get(f"{key.rpartition('.')[0]}.streaming"))
            yield from ((key, text, vast) for text in _texts(value))


def _texts(value: object) -> list[str]:
    return [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]


def _contents(text: str, *, sizes_alone: bool) -> dict[str, str]:
    """Describe the files of a path, a folder or a glob.

    Empty for a path that does not exist, such as a name on the hub.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        inside = {entry.relative_to(path).as_posix(): entry for entry in path.rglob("*")}
        files = {name: entry for name, entry in inside.items() if not name.startswith(".")}
    else:
        matches = [] if path.is_file() else glob.glob(str(path), recursive=True)  # noqa: PTH207
        files = {text: path, **{match: Path(match) for match in matches}}
    contents = {}
    for name, file in sorted(files.items()):
        with contextlib.suppress(OSError, ValueError):  # who needs it says what is wrong with it
            if file.is_file():
                size = f"{file.stat().st_size:,} bytes"
                contents[name] = size if sizes_alone else f"{size}, digest {content_of(file)[:16]}"
    return contents


def _difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe the first changed file."""
    name = next(name for name in {**then, **now} if then.get(name) != now.get(name))
    if name not in now:
        return f"{name} is gone"
    if name in then:
        return f"{name} changed: {then[name]} then, {now[name]} now"
    return f"{name} is new"


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
