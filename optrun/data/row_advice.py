"""Advice for rows whose texts are not in columns: nested cells, chats, lines without a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError
from optrun.base.formatting import list_names

if TYPE_CHECKING:
    from datasets import Dataset

USUAL_TEXTS = ("text", "sentence", "content")
_KEYS_OF_TURNS = ({"role", "content"}, {"from", "value"})
_FEW_LINES = 9
"""Lines that may have as many commas each by chance."""
_WORD_AND_TAG = re.compile(r"\S+[ \t](\S+[ \t])*(O|[BIES]-\S+)$")


def is_nested(feature: object) -> bool:
    """Tell whether the cells of a column of this type are objects, lists, or of several types."""
    return isinstance(feature, dict | list) or hasattr(feature, "feature") or is_mixed(feature)


def is_mixed(feature: object) -> bool:
    """Tell whether the cells of a column of this type may be of several types."""
    return type(feature).__name__ in ("Json", "NestedCell")


def cell_repr(value: object) -> str:
    """Write the first 60 characters of a cell, and its type, such as `3 (int)`."""
    text = repr(value)
    if len(text) > 60:
        text = f"{text[:60]}..."
    return f"{text} ({type(value).__name__})"


def columns_in_words(rows: Dataset) -> str:
    """List the columns, each nested one with an example and advice.

    Args:
        rows: The rows of one split, at least one; the first 100 are looked at.

    Returns:
        Sentences, such as `Columns: text (such as {'en': 'a'} (dict)), label.`.
    """
    described = []
    advice = labelled_lines(rows)
    for name, feature in rows.features.items():
        if is_nested(feature):
            cells = rows.select_columns([name])[:100][name]
            cell = next((cell for cell in cells if cell and isinstance(cell, dict | list)), None)
            described.append(f"{name} (such as {cell_repr(cell)})")
            advice = advice or _advise_on_cell(name, cell)
        elif "binary" in str(getattr(feature, "dtype", "")):
            described.append(f"{name} (bytes; write them as texts)")
        else:
            described.append(name)
    return " ".join(filter(None, [f"Columns: {', '.join(described)}.", advice]))


def _advise_on_cell(name: str, cell: object) -> str:
    """Say how to turn the cells of a nested column into texts, by an example."""
    if _is_chat(cell):
        return (
            f"{name} holds chats, which task=sft reads. For another task write each as one text,"
            f" for instance with tokenizer.apply_chat_template(row[{name!r}], tokenize=False)"
            " (task=causal_lm), or question and answer as text and target (task=seq2seq_lm)."
        )
    return (
        f"Write what is to be read from {name} as a text, in a column of its own:"
        ' {"text": ..., "label": ...}, one object a line.'
    )


def labelled_lines(rows: Dataset) -> str:
    """Say how to give lines of text labels; empty for rows with other columns than `text`."""
    lines = _first_lines(rows)
    if not lines:
        return ""
    if looks_tagged(rows):
        return (
            f"Its lines are a word and a tag each (CoNLL): {lines[0][:40]!r}. data.format=conll"
            " reads them."
        )
    return (
        "These are only texts: give a table (csv, tsv, jsonl, parquet) with columns for texts and"
        " labels."
    )


def looks_tagged(rows: Dataset) -> bool:
    """Tell whether each of the first 100 rows is a word, perhaps more, and a tag such as B-PER.

    Every column must hold texts. A row without a tag, such as the blank line between sentences, is
    skipped. If there are several columns, their names must be words and tags, too: a file without a
    header gives its first row as the names. Example: the lines `EU NNP B-ORG` and `rejects VBZ O`.
    """
    if any(
        getattr(feature, "dtype", "") not in ("string", "large_string")
        for feature in rows.features.values()
    ):
        return False
    # The rows as lines again: `rows[:100]` has the cells by column.
    cells = zip(*rows[:100].values(), strict=True)
    lines = ["\t".join(map(str, row)) for row in cells if any(row) and str(row[-1]).strip()]
    if len(rows.column_names) > 1:
        lines.append("\t".join(rows.column_names))
    return bool(lines) and all(_WORD_AND_TAG.match(line) for line in lines)


def _first_lines(rows: Dataset) -> list[str]:
    """List the texts among the first 100 rows, without blank ones; empty for a table."""
    if rows.column_names != ["text"] or is_nested(rows.features["text"]):
        return []
    return [line for line in rows[:100]["text"] if isinstance(line, str) and line.strip()]


def looks_like(rows: Dataset) -> str | None:
    """Name the format that lines of text are in: `json`, `csv` or `tsv`; None: they are texts.

    They are a table if there are at least ten, and all have the same number of tabs, commas,
    semicolons or bars, which is not 0.
    """
    lines = [line.strip() for line in _first_lines(rows)]
    if lines and all(line[0] == "{" and line[-1] == "}" for line in lines):
        return "json"
    if len(lines) <= _FEW_LINES:
        return None
    for mark in "\t,;|":
        counts = {line.count(mark) for line in lines}
        if len(counts) == 1 and counts != {0}:
            if mark == "\t":
                return "tsv"
            return "csv"
    return None


def refuse_one_object(key: str, path: Path, rows: Dataset) -> None:
    """Refuse a file of one JSON object with the rows inside, unless it is a document or a chat.

    Refused are `{"data": [{"text": ...}, ...]}`, where a value is a list of objects, and
    `{"text": [...], "label": [...]}`, where all values are lists or objects. Other objects pass.

    Args:
        key: The configuration key, for messages.
        path: The file.
        rows: The one row that was read from it.

    Raises:
        ConfigError: With a command that writes the rows as jsonl.
    """
    row = rows[0]
    if any(isinstance(row.get(name), str) for name in USUAL_TEXTS):
        return  # one document
    values = list(row.values())
    if any(map(_is_chat, values)):
        return  # one chat
    has_only_nested_values = all(isinstance(value, list | dict) for value in values)
    keys_of_rows = [name for name, value in row.items() if _are_objects(value)]
    if has_only_nested_values or keys_of_rows:
        likely_key = next(iter([*keys_of_rows, *row]))
        raise ConfigError(
            f"{key}={path}: the file is one JSON object ({list_names(row, 6)}) with the rows"
            " inside. Write them as jsonl, one object a line, such as with"
            f" jq -c '.{likely_key}[]' FILE > NEW.jsonl"
        )


def _are_objects(value: object) -> bool:
    """Tell whether a cell is a list with an object at its beginning."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_chat(value: Any) -> bool:
    """Tell whether a cell is a list of turns."""
    return _are_objects(value) and any(keys <= set(value[0]) for keys in _KEYS_OF_TURNS)
