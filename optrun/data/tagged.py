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

_DOCUMENT_LINE = re.compile(r"-DOCSTART-")
_KEY_AND_VALUE_COMMENT = re.compile(r"# \S+ = ")
"""A comment of CoNLL-U, whatever the number of columns."""


def read_tagged(reading: Reading) -> Dataset:
    """Read sentences of CoNLL files: each line has a word first and its tag last.

    The lines `EU NNP B-ORG` and `rejects VBZ O`, and then an empty line, are the row
    `{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}`.

    Lines end only at line feeds and carriage returns, since other separators of Unicode may be
    words. Lines of `-DOCSTART-` and comments before the first word of a sentence are left out.
    Notes say how many comments there were, and which columns are not read.

    Returns:
        Rows with `tokens` and `tags`.

    Raises:
        ConfigError: A line has another number of columns than the first one, or only one.
    """
    from datasets import Dataset

    rows: dict[str, list[list[str]]] = {"tokens": [], "tags": []}
    for path, encoding in zip(reading.files, reading.encodings, strict=True):
        text = b"".join(recode_to_utf8(chunks_of(path), encoding)).decode("utf-8")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        columns = _count_columns(lines)
        comments = 0
        sentence: list[str] = []  # its words
        tags: list[str] = []
        for number, line in enumerate([*lines, ""], 1):  # the empty line ends the last sentence
            cells = _cells(line)
            # 1. The end of a sentence, or another empty line.
            if not cells or _DOCUMENT_LINE.match(line):
                if sentence:
                    rows["tokens"].append(sentence)
                    rows["tags"].append(tags)
                    sentence = []
                    tags = []
            # 2. A comment, which stands only before a sentence.
            elif not sentence and _is_comment(line, has_other_width=len(cells) != columns):
                comments += 1
            # 3. A line without a word and its tag, and a word with its tag.
            elif len(cells) != columns or columns < 2:
                raise ConfigError(
                    f"{reading.key}={path}: line {number:,} has {len(cells)} columns:"
                    f" {line[:60]!r}. Expected {max(columns, 2)}: a word first, its tag last, and"
                    " an empty line after each sentence."
                )
            else:
                sentence.append(cells[0])
                tags.append(cells[-1].strip())
        if comments:
            reading.notes.append(f"{reading.key}={path}: {comments:,} lines of comments left out")
        if columns > 2:
            unread = "column 2 is" if columns == 3 else f"columns 2 to {columns - 1} are"
            reading.notes.append(
                f"{reading.key}={path}: {unread} not read: the word is first, its tag is last"
            )
    return Dataset.from_dict(rows)


def _cells(line: str) -> list[str]:
    """Split a line at its tabs, else at its spaces; a blank line has no cells."""
    if not line.strip(" \t"):
        return []
    if "\t" in line:
        return line.split("\t")
    return re.split(" +", line.strip(" "))


def _count_columns(lines: list[str]) -> int:
    """Count the columns of the first line with a word and a tag; 0: there is none.

    That is the first line without `#` at its begin, else the first one that is no `# KEY = VALUE`.
    """
    tagged = [line for line in lines if _cells(line) and not _DOCUMENT_LINE.match(line)]
    certain = (line for line in tagged if not line.startswith("#"))
    likely = (line for line in tagged if not _KEY_AND_VALUE_COMMENT.match(line))
    first = next(certain, None) or next(likely, "")
    return len(_cells(first))


def _is_comment(line: str, *, has_other_width: bool) -> bool:
    """Tell whether a line before the first word of a sentence is a comment.

    A comment begins with `#`, as the word `#` does, too. So it must also be a `# KEY = VALUE`, or
    have another number of columns than the other lines (`has_other_width`).
    """
    if not line.startswith("#"):
        return False
    return has_other_width or _KEY_AND_VALUE_COMMENT.match(line) is not None
