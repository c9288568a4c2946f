"""CoNLL: a word and its tag on each line, an empty line after each sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.data.content import chunks_of
from optrun.data.encoding import recode_to_utf8
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

_DOCUMENT = re.compile(r"-DOCSTART-")
_KEY_AND_VALUE = re.compile(r"# \S+ = ")
"""A comment of CoNLL-U, whatever the number of columns."""


def read_tagged(reading: Reading) -> Dataset:
    """Read sentences, with a word first on each line and its tag last.

    Lines end at line feeds and carriage returns alone: other separators of Unicode may be words.
    Lines of `-DOCSTART-` and comments before the first word of a sentence are left out; `notes`
    gets the number of comments.

    Returns:
        Rows with `tokens` and `tags`.

    Raises:
        ConfigError: A line with another number of columns than the first one, or with a single one.
    """
    from datasets import Dataset

    sentences: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    for path, encoding in zip(reading.files, reading.encodings, strict=True):
        text = b"".join(recode_to_utf8(chunks_of(path), encoding)).decode("utf-8")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        columns = _columns_of(lines)
        comments = 0
        for number, line in enumerate([*lines, ""], 1):
            cells = _cells(line)
            if not cells or _DOCUMENT.match(line):
                if sentences[-1]:
                    sentences.append([])
                    tags.append([])
                continue
            if not sentences[-1] and _is_comment(line, len(cells) != columns):
                comments += 1
                continue
            if len(cells) != columns or columns < 2:
                raise ConfigError(
                    f"{reading.key}={path}: line {number:,} has {len(cells)} columns:"
                    f" {line[:60]!r}. Expected {max(columns, 2)}: a word first, its tag last, and"
                    " an empty line after each sentence."
                )
            sentences[-1].append(cells[0])
            tags[-1].append(cells[-1].strip())
        if comments:
            reading.notes.append(f"{reading.key}={path}: {comments:,} lines of comments left out")
        if columns > 2:
            unread = "column 2 is" if columns == 3 else f"columns 2 to {columns - 1} are"
            reading.notes.append(
                f"{reading.key}={path}: {unread} not read: the word is first, its tag is last"
            )
    return Dataset.from_dict({"tokens": sentences[:-1], "tags": tags[:-1]})


def _cells(line: str) -> list[str]:
    """Split a line at its tabs, else at its spaces; none if it is blank."""
    if not line.strip(" \t"):
        return []
    if "\t" in line:
        return line.split("\t")
    return re.split(" +", line.strip(" "))


def _columns_of(lines: list[str]) -> int:
    """Count the columns of the first line that is no comment for certain; 0: there is no line."""
    tagged = [line for line in lines if _cells(line) and not _DOCUMENT.match(line)]
    certain = (line for line in tagged if not line.startswith("#"))
    likely = (line for line in tagged if not _KEY_AND_VALUE.match(line))
    first = next(certain, None) or next(likely, "")
    return len(_cells(first))


def _is_comment(line: str, is_odd: bool) -> bool:
    """Tell whether a line before the first word of a sentence is a comment.

    is_odd: It has another number of columns than the other lines.
    """
    return line.startswith("#") and (is_odd or _KEY_AND_VALUE.match(line) is not None)
