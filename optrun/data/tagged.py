"""CoNLL: a word and its tag on each line, an empty line after each sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.data.content import chunks_of
from optrun.data.encoding import recoded
from optrun.data.reading import Reading

if TYPE_CHECKING:
    from datasets import Dataset

_COMMENT = re.compile(r"# ?\w+ ?=|-DOCSTART-")


def read_tagged(asked: Reading) -> Dataset:
    """Read sentences: the first column of a line is the word, the last one its tag.

    Returns:
        Rows with `tokens` and `tags`.

    Raises:
        ConfigError: A line with another number of columns than the first one, or with a single one.
    """
    from datasets import Dataset

    words: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    for path, encoding in zip(asked.files, asked.encodings, strict=True):
        text = b"".join(recoded(chunks_of(path), encoding)).decode("utf-8")
        columns = 0
        for number, line in enumerate([*text.splitlines(), ""], 1):
            if _COMMENT.match(line):
                continue
            cells = line.split("\t") if "\t" in line else line.split()
            if not line.strip():
                if words[-1]:
                    words.append([])
                    tags.append([])
                continue
            columns = columns or len(cells)
            if len(cells) != columns or columns < 2:
                raise ConfigError(
                    f"{asked.key}={path}: line {number:,} has {len(cells)} columns: {line[:60]!r}."
                    f" Expected {max(columns, 2)}: a word first, its tag last, and an empty line"
                    " after each sentence."
                )
            words[-1].append(cells[0])
            tags[-1].append(cells[-1].strip())
    return Dataset.from_dict({"tokens": words[:-1], "tags": tags[:-1]})
