"""Advice for rows without texts in columns.

Nested cells, chats, one object for a whole file, labels inside of lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

Json = Mapping[str, object]
USUAL_TEXTS = ("text", "sentence", "content")
_CHAT = ({"role", "content"}, {"from", "value"})
_WITH_DETAIL = "LABEL:DETAIL text"
_AT_COLON = r"s/: */\t/"
_LINES = (
    # what every line looks like, how that is called, what makes a table of it
    (re.compile(r"__label__(\S+) +\S"), "__label__NAME text", r"s/^__label__\([^ ]*\) */\1\t/"),
    (re.compile(r"([A-Za-z][\w-]*:\w+) \S"), _WITH_DETAIL, r"s/ /\t/"),
    (re.compile(r"([A-Za-z][\w-]*): *\S"), "LABEL:text", _AT_COLON),
    (re.compile(r"([^\t]{1,40})\t\S"), "LABEL, a tab, text", ""),
)
_FEW = 9
"""Lines that may have as many commas each by chance."""
_WORD_AND_TAG = re.compile(r"\S+[ \t](\S+[ \t])*(O|[BIES]-\S+)$")


def is_nested(feature: object) -> bool:
    """Tell whether a column's cells are objects or lists."""
    return isinstance(feature, dict | list) or hasattr(feature, "feature") or is_mixed(feature)


def is_mixed(feature: object) -> bool:
    """Tell whether a column's cells may be of several types."""
    return type(feature).__name__ in ("Json", "NestedCell")


def cell_repr(value: object) -> str:
    """Write a cell, and its type, for a message."""
    text = repr(value)
    if len(text) > 60:
        text = f"{text[:60]}..."
    return f"{text} ({type(value).__name__})"


def columns_in_words(rows: Dataset) -> str:
    """List the columns, with the content of nested ones and advice for the first of these.

    Args:
        rows: Of one split, at least one.

    Returns:
        Sentences, such as `Columns: text (objects with en, de), label.`.
    """
    described = []
    advice = labelled_lines(rows)
    for name, feature in rows.features.items():
        if not is_nested(feature):
            binary = "binary" in str(getattr(feature, "dtype", ""))
            described.append(f"{name} (bytes; write them as texts)" if binary else name)
            continue
        cell = next(
            (
                value
                for value in rows.select_columns([name])[:100][name]
                if value and isinstance(value, dict | list)
            ),
            None,
        )
        described.append(f"{name} ({_cell(cell)})")
        if (
            rows.column_names == ["text"]
            and isinstance(cell, list)
            and not isinstance(cell[0], dict)
        ):
            advice = (
                'Where each row is a list, name what is in it: {"text": ..., "label": ...}, one'
                " object a line."
            )
        advice = advice or _advice(name, cell)
    sentence = f"Columns: {', '.join(described)}."
    return f"{sentence} {advice}" if advice else sentence


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return f"objects with {_some(value)}"
    if isinstance(value, list):
        inner = value[0] if value else None
        if isinstance(inner, dict):
            return f"lists of objects with {_some(inner)}"
        return "lists of texts" if isinstance(inner, str) else "lists"
    return "empty objects or lists"


def _advice(name: str, value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        if any(keys <= set(value[0]) for keys in _CHAT):
            return (
                f"{name} holds chats, which task=sft reads. For another task write each as one"
                f" text, for instance with tokenizer.apply_chat_template(row[{name!r}],"
                " tokenize=False) (task=causal_lm), or question and answer as text and target"
                " (task=seq2seq_lm)."
            )
        return f"Write what is to be read from {name} as a text, in a column of its own."
    if isinstance(value, dict):
        leaf = next(
            (key for key, inner in value.items() if isinstance(inner, str)),
            next(iter(value), "KEY"),
        )
        return f"Write the text itself, in a column of its own: row[{name!r}][{leaf!r}]."
    if isinstance(value, list) and value and isinstance(value[0], str) and name in USUAL_TEXTS:
        return f"Write one text there: ' '.join(row[{name!r}])."
    return ""


def labelled_lines(rows: Dataset) -> str:
    """Explain how to read lines of text with a label in front; empty if there is none."""
    lines = _lines(rows)
    if not lines:
        return ""
    if looks_tagged(rows):
        return (
            f"Its lines are a word and a tag each (CoNLL): {lines[0][:40]!r}. data.format=conll"
            " reads them."
        )
    for pattern, form, command in _LINES:
        matches = [pattern.match(line) for line in lines]
        labels = [match[1] for match in matches if match is not None]
        if len(labels) == len(lines) and len(set(labels)) < len(labels):
            table = f"sed '{command}' FILE" if command else "cat FILE"
            # TREC's `DESC:manner How ...` and a text glued to its label look alike: a person has to
            # say which it is.
            hint = ""
            if form == _WITH_DETAIL:
                hint = f" If the label ends at the colon: sed '{_AT_COLON}'."
            return (
                f"Its lines look like {form}: {lines[0][:40]!r}. Make a table of them, here with"
                " the label "
                rf"{labels[0]!r}: (printf 'label\ttext\n'; {table}) > NEW.tsv.{hint}"
            )
    return "These are texts alone: give a table (csv, tsv, jsonl, parquet) with a column for each."


def looks_tagged(rows: Dataset) -> bool:
    """Tell whether lines of text, or rows of a table, are a word and its tag each."""
    if any(
        getattr(feature, "dtype", "") not in ("string", "large_string")
        for feature in rows.features.values()
    ):
        return False
    cells = zip(*rows[:100].values(), strict=True)
    lines = ["\t".join(map(str, row)) for row in cells if any(row) and str(row[-1]).strip()]
    if len(rows.column_names) > 1:
        lines.append("\t".join(rows.column_names))
    return bool(lines) and all(_WORD_AND_TAG.match(line) for line in lines)


def _lines(rows: Dataset) -> list[str]:
    """List the first texts without blank ones; empty for a table."""
    if rows.column_names != ["text"] or is_nested(rows.features["text"]):
        return []
    return [line for line in rows[:100]["text"] if isinstance(line, str) and line.strip()]


def looks_like(rows: Dataset) -> str | None:
    """Name the format of a table or of objects in lines of text; None: they are texts."""
    lines = [line.strip() for line in _lines(rows)]
    if lines and all(line[0] == "{" and line[-1] == "}" for line in lines):
        return "json"
    if len(lines) <= _FEW:
        return None
    for mark in ",;\t|":
        counts = {line.count(mark) for line in lines}
        if len(counts) == 1 and counts != {0}:
            return "csv"
    return None


def refuse_one_object(key: str, path: Path, rows: Dataset) -> None:
    """Refuse a file of one JSON object with the rows inside of it.

    Args:
        key: The configuration key, for messages.
        path: The file.
        rows: The one row that was read from it.

    Raises:
        ConfigError: With the place of the rows in it, and the command that takes them out.
    """
    row = rows[0]
    if any(isinstance(row.get(name), str) for name in USUAL_TEXTS):
        return  # one document, with something beside it
    message = _rows_inside(row, path)
    if message is not None:
        raise ConfigError(f"{key}={path}: the file is one JSON object. {message}")


def _rows_inside(row: Json, path: Path) -> str | None:
    name = shlex.quote(str(path))
    new = shlex.quote(str(path.with_suffix(".jsonl")))
    if new == name:
        new = shlex.quote(str(path.with_name(f"{path.stem}-rows.jsonl")))
    values: list[Any] = list(row.values())
    by_column = (
        f"It has one {'list' if isinstance(values[0], list) else 'object'} for each column"
        f' ({_some(row)}), where rows are read: python -c "import pandas;'
        f" pandas.read_json({str(path)!r}).to_json({new!r}, orient='records', lines=True)\""
    )
    if all(
        isinstance(value, list) and len(value) == len(values[0]) > 1 for value in values
    ) and not any(isinstance(cell, dict) for value in values for cell in value):
        return by_column
    if len(values) > 1 and all(
        isinstance(value, dict) and value.keys() == values[0].keys() for value in values
    ):
        if all(inner.isdigit() for inner in values[0]):
            return by_column
        return (
            f"It has one object for each row ({_some(values[0])}). Take them out: jq -c '.[]'"
            f" {name} > {new}"
        )
    inner_rows = _list_of_objects(row)
    if inner_rows is None:
        return None
    keys, objects = inner_rows
    if any(chat <= set(objects[0]) for chat in _CHAT):
        return None  # one chat: the message about its column says more
    return (
        f"Its key {'.'.join(keys)!r} holds a list of {len(objects):,} objects"
        f" ({_some(objects[0])}): the rows. Take them out: jq -c '.{'.'.join(keys)}[]' {name} >"
        f" {new}"
    )


def _list_of_objects(value: Json, depth: int = 3) -> tuple[list[str], list[Json]] | None:
    """Find the longest list of objects and the keys to it."""
    candidates: list[tuple[list[str], list[Json]]] = []
    for key, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            candidates.append(([key], inner))
        elif isinstance(inner, dict) and depth:
            deeper = _list_of_objects(inner, depth - 1)
            if deeper is not None:
                candidates.append(([key, *deeper[0]], deeper[1]))
    return max(candidates, key=lambda candidate: len(candidate[1]), default=None)


def _some(names: Iterable[object]) -> str:
    shown_names = [str(name) for name in names]
    if len(shown_names) > 6:
        shown_names[6:] = ["..."]
    return ", ".join(shown_names)
