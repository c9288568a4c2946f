"""Predictions on their way.

Kept beside the file they are for, so that a killed process loses a few batches at most.

`OUT.partial/` holds `header.json` (which model, which rows, which options), `predictions.jsonl` (a
line a row, appended and flushed window by window) and, at the very end, `result`, which takes its
place as OUT by one call of the operating system. A line that was torn, and a window that was not
finished, are cut off and predicted again: the batches of a window are a function of its rows, so
that the lines are the same.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from optrun.artifacts.atomic import remove_folder, replace_text, sync_folder
from optrun.artifacts.lock import RunLock
from optrun.base.errors import ConfigError
from optrun.base.reading import LINE_BYTES, open_file, parse_json, read_json

HEADER, LINES, RESULT, LOCK = "header.json", "predictions.jsonl", "result", ".lock"
FORMAT = 1
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class Partial:
    """The predictions for one file, from the first row on.

    Args:
        out: The file that they are for.
        header: What they depend on, as JSON has it: names for people to values.
        rows: How many there will be.
        window: Rows that are kept or lost together.
    """

    def __init__(self, out: Path, header: Mapping[str, object], rows: int, window: int) -> None:
        self.out = out
        self.folder = folder_of(out)
        self.header = {"format": FORMAT, **header}
        self.rows = rows
        self.window = window
        self.done = 0
        """Rows that are predicted and kept."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the folder, and look at what an earlier process left in it.

        Raises:
            ConfigError: It is of other predictions, or none of optrun's.
            LockedError: Another process writes it.
            OSError: The disk refused.
        """
        self.folder.mkdir(exist_ok=True)
        strange = sorted(
            {path.name for path in self.folder.iterdir()} - {HEADER, LINES, RESULT, LOCK}
        )
        strange = [name for name in strange if not name.startswith(f".{HEADER}.")]
        if strange or self.folder.is_symlink():
            found = strange[0] if strange else "a link"
            raise ConfigError(
                f"{self.folder}: unfinished predictions would be kept there, and it holds {found}."
                " Choose another out=FILE, or move it away."
            )
        opened = False
        try:
            with RunLock(self.folder / LOCK):
                header = self.folder / HEADER
                if header.is_file():
                    self._expect_same(header)
                else:
                    replace_text(
                        header, json.dumps(self.header, indent=1, ensure_ascii=False) + "\n"
                    )
                self._keep_whole()
                opened = True
                yield
        finally:
            if opened and not self.done:  # nothing is kept, so nothing is left to be in the way
                remove_folder(self.folder)

    def _expect_same(self, path: Path) -> None:
        try:
            before = dict(read_json(path))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}: damaged. Remove {self.folder}, and the predictions begin anew."
            ) from error
        mine = json.loads(json.dumps(self.header))
        other = next(
            (name for name in [*mine, *before] if before.get(name) != mine.get(name)), None
        )
        if other is None:
            return
        was, now = (json.dumps(side.get(other), ensure_ascii=False) for side in (before, mine))
        raise ConfigError(
            f"out={self.out}: the unfinished predictions in {self.folder} are of another {other}:"
            f" {was} then, {now} now. Give the same again to go on with them, choose another"
            f" out=FILE, or remove {self.folder}."
        )

    def _keep_whole(self) -> None:
        """Cut off what is no whole window."""
        path = self.folder / LINES
        path.touch()
        ends = [0]
        with open_file(path) as file:
            while (
                (line := file.readline(LINE_BYTES))
                and line.endswith(b"\n")
                and _row(line) == len(ends)
            ):
                ends.append(file.tell())
        count = min(len(ends) - 1, self.rows)
        self.done = count if count == self.rows else count - count % self.window
        if path.stat().st_size != ends[self.done]:
            os.truncate(path, ends[self.done])

    def append(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Keep the predictions of the next rows, numbered from 1.

        Raises:
            OSError: The disk refused.
        """
        text = "".join(
            json.dumps({"row": number, **values}, ensure_ascii=False) + "\n"
            for number, values in enumerate(lines, self.done + 1)
        )
        with (self.folder / LINES).open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self.done += len(lines)

    def predictions(self) -> Iterator[dict[str, object]]:
        """Yield all that is kept, row by row; without the numbers of the rows."""
        path = self.folder / LINES
        with open_file(path) as file:
            for line in file:
                values = dict(parse_json(line, path))
                del values["row"]
                yield values

    @property
    def result(self) -> Path:
        """Where the finished file is written, before it takes its place."""
        return self.folder / RESULT

    def put_in_place(self) -> None:
        """Give the finished file its name; a file that came there meanwhile is not overwritten.

        Raises:
            ConfigError: There is one.
            OSError: The disk refused.
        """
        with open_file(self.result) as file:
            os.fsync(file.fileno())
        try:
            os.link(self.result, self.out)
        except FileExistsError:
            raise taken(self.out) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if self.out.exists():
                raise taken(self.out) from None
            self.result.rename(self.out)
        sync_folder(self.out.parent)


def folder_of(out: Path) -> Path:
    """Return the folder where the predictions for a file are kept until they are whole."""
    return out.with_name(f"{out.name}.partial")


def finished_before(out: Path) -> bool:
    """Tell whether a killed process put the file in its place.

    But did not remove what it was made of.
    """
    result = folder_of(out) / RESULT
    return out.is_file() and result.is_file() and out.samefile(result)


def forget(out: Path) -> None:
    """Remove what a finished file was made of."""
    remove_folder(folder_of(out))


def taken(out: Path) -> ConfigError:
    """Make the refusal of a file that is there."""
    return ConfigError(
        f"out={out}: is there already, and nothing is overwritten. Choose a new file, or remove it."
    )


def _row(line: bytes) -> int | None:
    """Read the number of the row that a line says; None: it says none."""
    try:
        found = parse_json(line, LINES)["row"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None
