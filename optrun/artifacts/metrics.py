"""`metrics.jsonl` and `summary.json`, written and read.

Both are valid JSON always: numbers that JSON does not have are written as the strings "NaN",
"Infinity" and "-Infinity" and come back as floats.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from optrun.artifacts.atomic import name_in_errors, replace_bytes, replace_text
from optrun.base.errors import printable, refuse_format
from optrun.base.plain import PlainDict
from optrun.base.reading import LINES_BYTES, open_file, parse_json, read_json, read_lines

SUMMARY_FORMAT = 1
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMERIC_SECTIONS = ("metrics", "perf")  # of a summary: where such a string is a number, not a word


def to_json(value: object, *, where: str = "value") -> Any:
    """Convert a value to JSON's types and numbers.

    Args:
        value: Nested mappings, lists and tuples of strings, numbers, booleans and None.
        where: Name of the value in errors.

    Returns:
        The value with tuples as lists and non-finite floats as strings.

    Raises:
        TypeError: The value has a type that JSON lacks, such as a tensor.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        if math.isfinite(number):
            return number
        return json.dumps(number)  # NaN, Infinity or -Infinity
    if isinstance(value, Mapping):
        return {str(key): to_json(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{where}: expected a string, number, list or mapping, got {type(value).__name__}"
    )


def from_json(value: object) -> Any:
    """Invert `to_json` for numbers.

    "NaN", "Infinity" and "-Infinity" become floats, at any depth.
    """
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


class MetricsWriter:
    """Appends records to `metrics.jsonl`.

    Each record is a line, handed to the operating system before `write` returns.

    A last line without a line end, left by a killed process, is completed if it is a valid record,
    else cut off.

    Args:
        path: The file; created with its parents if missing.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name) / "metrics.jsonl"
        >>> with MetricsWriter(path) as metrics:
        ...     metrics.write({"step": 1, "train/loss": 2.5})
        >>> read_metrics(path).records
        [{'step': 1, 'train/loss': 2.5}]
        >>> folder.cleanup()
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_tail(self.path)
        self._file: BinaryIO = self.path.open("ab", buffering=0)

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record.

        Args:
            record: `step` (optimizer steps done), and flat names with their values.

        Raises:
            ValueError: `step` is no non-negative integer, or the file is closed.
            TypeError: A value has a type that JSON lacks; the message names it.
            OSError: The disk refused the write; no part of the record is in the file.
        """
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(
                f"step={step!r}: a metrics record needs the number of optimizer steps, an integer"
                " >= 0"
            )
        clean = {name: to_json(value, where=name) for name, value in record.items()}
        # One write of one line: another reader sees whole lines, or a torn last one.
        line = json.dumps(clean, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        # A refused write leaves no part of the line in the file.
        try:
            with name_in_errors(self.path):
                written = self._file.write(line)
                if written != len(line):  # a full disk takes a part without a word
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def sync(self) -> None:
        """Flush everything written so far to the disk, before a checkpoint commits."""
        # A descriptor of its own: this may run beside training, which may close the file.
        descriptor = os.dup(self._file.fileno())
        try:
            with name_in_errors(self.path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


@dataclass
class MetricsLog:
    """The records of `metrics.jsonl`, and messages about damaged lines."""

    records: list[PlainDict] = field(default_factory=list)
    """One mapping per whole line, in file order."""
    problems: list[str] = field(default_factory=list)
    """One message per line that could not be read."""

    def names(self) -> list[str]:
        """List the metrics that have at least one number, by first appearance.

        `step`, `epoch` and `time` are left out.

        Example:
            >>> log = MetricsLog([{"step": 1, "b": 0.5}, {"step": 2, "a": 1, "c": None}])
            >>> log.names()
            ['b', 'a']
        """
        names: dict[str, None] = {}  # an ordered set
        for record in self.records:
            names |= dict.fromkeys(name for name, value in record.items() if _is_number(value))
        return [name for name in names if name not in ("step", "epoch", "time")]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric, by rising step.

        Both are empty if it has no number. If a step occurs twice, the later line wins.
        """
        points = {
            record["step"]: float(record[name])
            for record in self.records
            if name in record and _is_number(record[name])
        }
        steps = sorted(points)
        return steps, [points[step] for step in steps]


def read_metrics(path: Path | str) -> MetricsLog:
    """Read `metrics.jsonl` without ever failing on its content.

    Args:
        path: The file.

    Returns:
        The valid records, and a message for each invalid line, typically the torn last line of a
        killed run.

    Raises:
        OSError: The file cannot be read at all.
        UnreadableFileError: The path is no regular file, or too large.
    """
    log = MetricsLog()
    for number, line in enumerate(read_lines(Path(path)), start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            log.records.append(record)
        elif not line.endswith(b"\n"):
            log.problems.append(
                f"{path}: line {number} is torn: the run ended while writing it; left out"
            )
        else:
            log.problems.append(f"{path}: line {number} is no metrics record; left out")
    return log


def truncate_after(path: Path, step: int) -> None:
    """Drop every record after a step, and every torn line; kept lines do not change.

    The file is replaced atomically, and only if a line goes; a missing file stays missing.

    Args:
        path: The file.
        step: The last optimizer step to keep.
    """

    def keep_until_step(line: bytes) -> bytes | None:
        record = _parse(line)
        if record is not None and record["step"] <= step:
            return line
        return None

    _replace_lines(path, keep_until_step)


def rewind_for_resume(path: Path, step: int) -> None:
    """Restore `metrics.jsonl` to its state when a checkpoint was saved, for a run that resumes.

    Records after the step are dropped. So are values in earlier records that only the end of a run
    logged: it evaluates even if no evaluation is due, and a run that continues does not end there.
    A record lists the prefixes of such names under `unscheduled`.

    Args:
        path: The file.
        step: Optimizer steps done in the checkpoint.
    """
    truncate_after(path, step)
    _replace_lines(path, _without_unscheduled)


def _replace_lines(path: Path, replace_line: Callable[[bytes], bytes | None]) -> None:
    """Replace or drop lines of a file; a missing file stays missing.

    Args:
        path: The file; blank lines are dropped, too. It is only written if a line changes.
        replace_line: Returns the replacement of a line; None drops the line.
    """
    try:
        lines = [line for line in read_lines(path) if line.strip()]
    except FileNotFoundError:
        return
    new_lines = []
    for line in lines:
        new_line = replace_line(line.rstrip(b"\n"))
        if new_line is not None:
            new_lines.append(new_line + b"\n")
    if new_lines != lines:
        replace_bytes(path, b"".join(new_lines))


def _without_unscheduled(line: bytes) -> bytes | None:
    """Drop the values of a line that only the end of a run logged.

    None if nothing else remains.

    Example:
        >>> _without_unscheduled(b'{"step": 7, "lr": 1, "eval/loss": 2, "unscheduled": ["eval/"]}')
        b'{"step": 7, "lr": 1}'
        >>> _without_unscheduled(b'{"step": 7, "eval/loss": 2, "unscheduled": ["eval/"]}') is None
        True
    """
    record = parse_json(line, "a line of the metrics")
    prefixes = tuple(record.pop("unscheduled", ()))  # such as "eval/"
    if not prefixes:
        return line
    scheduled = {name: value for name, value in record.items() if not name.startswith(prefixes)}
    if set(scheduled) <= {"step", "epoch", "time"}:
        return None
    return json.dumps(scheduled, ensure_ascii=False, allow_nan=False).encode()


def write_summary(path: Path | str, summary: Mapping[str, object]) -> None:
    """Replace `summary.json` atomically.

    Args:
        path: The file; replaced by one rename and flushed to the disk.
        summary: Nested mappings and lists of plain values.

    Raises:
        TypeError: A value has a type that JSON lacks; the message says where.
        OSError: The disk refused the write; the old file is as it was.
    """
    text = json.dumps(
        to_json(summary, where="summary"), ensure_ascii=False, allow_nan=False, indent=2
    )
    replace_text(Path(path), text + "\n")


def read_summary(path: Path | str, *, any_format: bool = False) -> PlainDict:
    """Read `summary.json`.

    Args:
        path: The file.
        any_format: Read a summary of another optrun's format, too: enough to find the run.

    Returns:
        The values; texts for non-finite numbers in `metrics` and `perf` become floats again.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no JSON object; `UnreadableFileError` if it was not even read.
        OtherFormatError: A newer optrun wrote the summary.
    """
    summary = read_json(Path(path))
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    if not any_format:
        refuse_format(path, summary.get("format"), SUMMARY_FORMAT)
    return {
        key: from_json(value) if key in _NUMERIC_SECTIONS else value
        for key, value in _printable_texts(summary).items()
    }


def try_read_summary(path: Path) -> PlainDict:
    """Read `summary.json` as `read_summary`; empty if it is missing, torn or unreadable."""
    try:
        return read_summary(path)
    except (OSError, ValueError):
        return {}


def _printable_texts(value: object) -> Any:
    """Make the texts in a run file's values safe for a terminal or a picture.

    Control characters would move the cursor or break a picture.
    """
    if isinstance(value, str):
        if value.isprintable():
            return value
        return printable(value)
    if isinstance(value, dict):
        return {_printable_texts(key): _printable_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable_texts(item) for item in value]
    return value


def _parse(line: bytes) -> PlainDict | None:
    """Parse one record; None unless the line is a JSON object with an integer `step`.

    Texts are made printable, and NaN and infinities are floats again.
    """
    try:
        record = parse_json(line, "a line of the metrics")
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:  # True is no step
        return None
    parsed: PlainDict = from_json(_printable_texts(record))
    return parsed


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mend_tail(path: Path) -> None:
    """Complete or cut a last line without a line end; a missing file stays missing.

    A process that is killed while it writes leaves such a line. A valid record gets its line end,
    anything else is cut off.
    """
    try:
        with open_file(path, limit=LINES_BYTES) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() in (b"", b"\n"):  # an empty file, or a last line with its end
                return
    except FileNotFoundError:
        return
    # The file is not empty, so there is a last line; no more than one is in memory.
    for line in read_lines(path):
        torn_line = line
    if _parse(torn_line) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, size - len(torn_line))
