"""What the columns of a table are for, and which task that makes.

By their names, and by what stands in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.data.columns import USUAL_WORDS, is_number, usual_columns
from optrun.data.folders import IMAGES
from optrun.data.shapes import USUAL_TEXTS, columns_in_words

if TYPE_CHECKING:
    from datasets import Dataset

LOOKED_AT = 1000
_LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "sentiment",
    "verdict",
    "intent",
    "topic",
    "rating",
    "stars",
    "score",
    "similarity",
    "polarity",
    "gold_label",
    "y",
    "target",
)
_TEXTS = (
    *USUAL_TEXTS,
    "review",
    "body",
    "comment",
    "message",
    "document",
    "article",
    "question",
    "description",
    "title",
)
_TAGS = ("tags", "ner_tags", "labels", "pos_tags")
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question", "sentence"),
    ("query", "passage"),
)
_TARGETS = (
    ("source", "target"),
    ("src", "tgt"),
    ("input", "target"),
    ("input", "output"),
    ("text", "target"),
    ("text", "summary"),
    ("article", "highlights"),
    ("document", "summary"),
    ("question", "answer"),
    ("prompt", "response"),
    ("instruction", "response"),
    ("question", "response"),
)
_CHATS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_MOST_CLASSES = 100


@dataclass(frozen=True)
class Roles:
    """What a table is for.

    Attributes:
        task: The name of the task.
        columns: Key of the data, such as `text_column`, to column; those that the task finds by
            itself have no key.
        overrides: What else the task needs to be told.
        unread: Columns that it does not read.
        doubts: What else it may be, for a person.
    """

    task: str
    columns: Mapping[str, str]
    overrides: Sequence[str] = ()
    unread: Sequence[str] = ()
    doubts: Sequence[str] = ()


def roles_of(rows: Dataset) -> Roles:
    """Recognise the columns of a table.

    Args:
        rows: At least one.

    Raises:
        ConfigError: They make no task.
    """
    head = undecoded(rows.select(range(min(LOOKED_AT, len(rows)))))
    columns = {
        name: [value for value in head[name] if value is not None] for name in rows.column_names
    }
    _refuse_choices(columns)
    found = (
        _by_names(columns)
        or _tagged(columns)
        or _images(rows, columns)
        or _seq2seq(columns)
        or _classes(rows, columns)
        or _texts(columns)
    )
    if found is None:
        bare = (
            ""
            if any(map(_is_text, columns.values()))
            else " None of them holds texts, which optrun trains on."
        )
        raise ConfigError(
            f"its columns make no task that optrun knows. {columns_in_words(rows)}{bare}"
        )
    unread = [name for name in columns if name not in found.columns.values()]
    if found.task in _GUESSED:
        _refuse_if_unsure(rows, columns, found, unread)
    return replace(found, unread=unread)


_GUESSED = ("sequence_classification", "seq2seq_lm", "causal_lm")
"""Tasks that are recognised by what stands in the columns, so that more columns are a doubt."""


def _refuse_if_unsure(rows: Dataset, columns: Columns, found: Roles, unread: Sequence[str]) -> None:
    """Refuse a guess that leaves texts inside of lists or objects unread, or reads JSON as text.

    Raises:
        ConfigError: With the keys that say it is right all the same.
    """
    nested = [name for name in unread if _holds_texts_inside(columns[name])]
    json_texts = [name for name in columns if _is_json_text(columns[name])]
    if not nested and not json_texts:
        return
    reasons = [
        f"{name} holds texts in lists or objects, which nothing would read" for name in nested
    ]
    reasons += [f"{name} holds lists or objects written as JSON text" for name in json_texts]
    keys = [f"task={found.task}"]
    keys += [f"data.{key}={name}" for key, name in found.columns.items() if key.endswith("_column")]
    raise ConfigError(
        f"not sure what these rows are for: {'; '.join(reasons)}. {columns_in_words(rows)} If they"
        f" are to be read all the same, say so: {' '.join(keys)}."
    )


def _holds_texts_inside(values: Sequence[object]) -> bool:
    """Tell whether cells are lists or objects with a text somewhere in them."""

    def has_text(value: object) -> bool:
        if isinstance(value, dict):
            return any(map(has_text, value.values()))
        if isinstance(value, list):
            return any(map(has_text, value))
        return isinstance(value, str)

    return any(isinstance(value, dict | list) and has_text(value) for value in values)


def _is_json_text(values: Sequence[object]) -> bool:
    """Tell whether every cell is a text in the brackets of a list or an object of JSON."""
    for value in values:
        if not isinstance(value, str):
            return False
        text = value.strip()
        if text[:1] + text[-1:] not in ("[]", "{}"):
            return False
    return bool(values)


def undecoded(rows: Dataset) -> Dataset:
    """Leave images as they lie.

    One that cannot be decoded is told, with its row, when it is trained on.
    """
    for name, feature in rows.features.items():
        if type(feature).__name__ == "Image":
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows


Columns = Mapping[str, list[object]]


def _refuse_choices(columns: Columns) -> None:
    """Refuse rows of a question with its choices, whose label says nothing without them.

    Raises:
        ConfigError: With what to do.
    """
    for name in ("choices", "endings"):
        if _is_list(columns.get(name, [])):
            raise ConfigError(
                f"column {name} holds the choices of a row, and no task reads such lists. Write one"
                " row for each choice, with right or wrong as its label."
            )


def _by_names(columns: Columns) -> Roles | None:
    """Recognise tables whose task finds its columns by their names alone."""
    there = list(columns)
    if {"chosen", "rejected"} <= set(there):
        return Roles(
            "preference", {name: name for name in ("prompt", "chosen", "rejected") if name in there}
        )
    for first in ("query", "anchor"):
        if {first, "positive"} <= set(there):
            return Roles(
                "embedding",
                {name: name for name in there if name in (first, "positive", "negative", "score")},
            )
    for names in _CHATS:
        chats = [value for value in columns.get(names[0], []) if isinstance(value, list)]
        if set(names) <= set(there) and (len(names) > 1 or chats):
            more = [name for name in ("input", "system", "tools") if name in there]
            return Roles("sft", {name: name for name in (*names, *more)})
    return None


def _tagged(columns: Columns) -> Roles | None:
    lists = {
        name: [value for value in values if isinstance(value, list)]
        for name, values in columns.items()
        if _is_list(values)
    }
    texts = [
        name
        for name, values in lists.items()
        if all(isinstance(each, str) for value in values for each in value)
    ]
    words = next((name for name in [*USUAL_WORDS, *texts] if name in lists), "")
    lengths = {name: [len(value) for value in values] for name, values in lists.items()}
    same = [name for name in lists if name != words and lengths[name] == lengths.get(words)]
    tags = next((name for name in [*_TAGS, *same] if name in same), None)
    if tags is None:
        return None
    doubts = [f"data.label_column={name} may be its tags as well" for name in same if name != tags]
    return Roles(
        "token_classification", {"text_column": words, "label_column": tags}, doubts=doubts
    )


def _images(rows: Dataset, columns: Columns) -> Roles | None:
    images = [name for name, feature in rows.features.items() if type(feature).__name__ == "Image"]
    images += [
        name
        for name, values in columns.items()
        if values
        and all(isinstance(value, str) and Path(value).suffix.lower() in IMAGES for value in values)
    ]
    label = None if not images else _label(rows, columns, images)
    return (
        None
        if label is None
        else Roles("image_classification", {"image_column": images[0], "label_column": label})
    )


def _seq2seq(columns: Columns) -> Roles | None:
    for source, target in _TARGETS:
        found = usual_columns((source, target), list(columns))
        if (
            len(found) == 2
            and all(_is_text(columns[name]) for name in found)
            and not _is_few(columns[found[1]])
        ):
            named = "called prompt and completion they are a chat, which task=sft trains"
            doubts = (
                [f"{found[0]} and {found[1]}: {named}"] if target in ("answer", "response") else []
            )
            return Roles(
                "seq2seq_lm", {"text_column": found[0], "target_column": found[1]}, doubts=doubts
            )
    return None


def _classes(rows: Dataset, columns: Columns) -> Roles | None:
    label = _label(rows, columns, [])
    texts = [name for name in columns if name != label and _is_text(columns[name])]
    if label is None or not texts:
        return None
    pair = next((two for two in _PAIRS if len(usual_columns(two, texts)) == 2), None)
    if pair is not None:
        first, second = usual_columns(pair, texts)
        roles = {"text_column": first, "text_pair_column": second, "label_column": label}
    else:
        roles = {"text_column": _first_of(_TEXTS, texts, columns), "label_column": label}
    other = [name for name in texts if name not in roles.values()]
    doubts = [f"data.text_column={name} holds texts as well" for name in other[:2]]
    number = all(is_number(str(value)) for value in columns[label])
    graded = number and any(float(str(value)) % 1 for value in columns[label])
    return Roles(
        "sequence_classification",
        roles,
        ["task.problem_type=regression"] if graded else [],
        doubts=doubts,
    )


def _texts(columns: Columns) -> Roles | None:
    texts = [name for name in columns if _is_text(columns[name])]
    if not texts:
        return None
    text = _first_of(_TEXTS, texts, columns)
    several = _several_labels(columns)
    if several is not None:
        labels, keys = several
        return Roles("sequence_classification", {"text_column": text, **labels}, [*keys, _SEVERAL])
    doubts = [f"data.text_column={name}" for name in texts if name != text][:2]
    for name in usual_columns((*_LABELS, "chosen"), [name for name in columns if name != text]):
        held = {str(value) for value in columns[name]}
        why = (
            f"{len(held):,} different values"
            if len(held) > 1
            else f"the one value {', '.join(held)!r}"
        )
        doubts.append(f"{name} is no label: it holds {why}")
    return Roles("causal_lm", {"text_column": text}, doubts=doubts)


_SEVERAL = "task.problem_type=multi_label_classification"


def _several_labels(columns: Columns) -> tuple[Mapping[str, str], list[str]] | None:
    """Find several labels of a row, and the keys that read them.

    They are lists, or a column of 0 and 1 for each label.
    """
    listed = [name for name in usual_columns(_LABELS, list(columns)) if _is_list(columns[name])]
    binary = [name for name in columns if {str(value) for value in columns[name]} == {"0", "1"}]
    if listed:
        return {"label_column": listed[0]}, []
    if len(binary) > 1 and all(re.fullmatch(r"[A-Za-z]\w*(?<!_column)", name) for name in binary):
        return {name: name for name in binary}, [f"data.label_columns=[{','.join(binary)}]"]
    return None


def _label(rows: Dataset, columns: Columns, others: Sequence[str]) -> str | None:
    """Find the column of labels: by its name, else the only one with few values that repeat."""
    usual = usual_columns(_LABELS, [name for name in columns if name not in others])
    declared: list[str] = [
        name for name, feature in rows.features.items() if type(feature).__name__ == "ClassLabel"
    ]
    for name in [*declared, *usual]:
        if not _is_list(columns[name]) and (_is_few(columns[name]) or _are_numbers(columns[name])):
            return name
    few = [name for name, values in columns.items() if name not in others and _is_few(values)]
    return few[0] if len(few) == 1 else None


def _first_of(usual: Sequence[str], names: Sequence[str], columns: Columns) -> str:
    """Pick the column with a usual name, else that of the longest values."""
    found = usual_columns(usual, names)
    return (
        found[0]
        if found
        else max(names, key=lambda name: sum(len(str(value)) for value in columns[name]))
    )


def _is_list(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, list) for value in values)


def _is_text(values: Sequence[object]) -> bool:
    texts = [value for value in values if isinstance(value, str)]
    letters = any(
        letter.isalpha() for text in texts for letter in text
    )  # which numbers and dates lack
    return letters and len(texts) == len(values) and not _are_numbers(values)


def _are_numbers(values: Sequence[object]) -> bool:
    return bool(values) and all(
        isinstance(value, int | float) or (isinstance(value, str) and is_number(value))
        for value in values
    )


def _is_few(values: Sequence[object]) -> bool:
    """Tell whether values are classes: few different ones, each more than once on average."""
    if not values or not all(isinstance(value, str | int | bool) for value in values):
        return False
    different = len(set(values))
    return 2 <= different <= min(_MOST_CLASSES, max(2, len(values) // 2))
