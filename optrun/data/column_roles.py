"""Guess the roles of the columns of a table, and the task that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.data.chat import leaves
from optrun.data.columns import USUAL_WORDS, is_image_path
from optrun.data.first_values import (
    LABEL_NAMES,
    Columns,
    are_classes,
    are_numbers,
    first_values,
    guess_label_column,
    usual_columns,
)
from optrun.data.row_advice import USUAL_TEXTS, columns_in_words

if TYPE_CHECKING:
    from datasets import Dataset

_TEXT_NAMES = (*USUAL_TEXTS, "review", "body", "comment", "message", "document", "description")
_TAG_NAMES = ("tags", "ner_tags", "labels", "pos_tags")
_NAMES_OF_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
)
_SOURCE_NAMES = (
    "source",
    "input",
    "article",
    "document",
    "question",
    "prompt",
    "instruction",
    "text",
)
_TARGET_NAMES = ("target", "output", "highlights", "summary", "answer", "response")
_COLUMNS_OF_TASKS = (
    ("preference", ("chosen", "rejected"), ("prompt", "system", "tools")),
    ("embedding", ("query", "positive"), ("negative", "score")),
    ("embedding", ("anchor", "positive"), ("negative", "score")),
    ("sft", ("messages",), ("system", "tools")),
    ("sft", ("conversations",), ("system", "tools")),
    ("sft", ("prompt", "completion"), ("system", "tools")),
    ("sft", ("instruction", "output"), ("input", "system", "history")),
)
"""Task, columns that it needs, and columns that it takes in beside them."""
_BINARY_NAME = re.compile(r"[A-Za-z]\w*(?<!_column)")
"""A name that needs no quotes in a list, and that is not taken for a key such as `text_column`."""
_SEVERAL_LABELS = "task.problem_type=multi_label_classification"
_GUESSED = ("sequence_classification", "seq2seq_lm", "causal_lm")
"""Tasks that are recognised by values alone. They are doubtful if texts would not be read."""


@dataclass(frozen=True)
class Roles:
    """The task of a table and the roles of its columns.

    Attributes:
        task: The name of the task.
        columns: Key of the data, such as `text_column`, to column; columns that the task finds
            without a key stand under their own names.
        overrides: Other overrides that the task needs.
    """

    task: str
    columns: Mapping[str, str]
    overrides: Sequence[str] = ()


def roles_of(rows: Dataset) -> Roles:
    """Recognise the task of a table, and the roles of its columns, by its first 1,000 rows.

    The table needs at least one row. The first fit wins: columns with the usual names of a task,
    words with tags, images with labels, a text and the text to produce, texts with labels, and
    texts alone.

    Raises:
        ConfigError: The columns fit no task, or the guess is doubtful.
    """
    columns = first_values(rows)
    label = guess_label_column(rows)
    roles = (
        _recognise_by_names(columns)
        or _recognise_tagged(columns)
        or _recognise_images(columns, label)
        or _recognise_seq2seq(columns)
        or _recognise_classes(columns, label)
        or _recognise_texts(columns)
    )
    if roles is None:
        raise ConfigError(
            "its columns make no task that optrun knows: it trains on texts, and on images with"
            f" labels. {columns_in_words(rows)}"
        )
    if roles.task in _GUESSED:
        _refuse_if_unsure(rows, columns, roles)
    return roles


def _refuse_if_unsure(rows: Dataset, columns: Columns, roles: Roles) -> None:
    """Refuse a guess if texts in lists or objects would not be read, or JSON read as plain text.

    Raises:
        ConfigError: With the reasons, and the keys that confirm the guess.
    """
    reasons = []
    read_columns = roles.columns.values()
    for name, values in columns.items():
        if values and all(map(_is_json_text, values)):
            reasons.append(f"{name} holds lists or objects written as JSON text")
        if name not in read_columns and any(map(_has_text_inside, values)):
            reasons.append(f"{name} holds texts in lists or objects, which nothing would read")
    if not reasons:
        return
    keys = [f"task={roles.task}"]
    keys += [f"data.{key}={name}" for key, name in roles.columns.items() if key.endswith("_column")]
    raise ConfigError(
        f"not sure what these rows are for: {'; '.join(reasons)}. {columns_in_words(rows)} To read"
        f" them in spite of this, add: {' '.join(keys)}."
    )


def _has_text_inside(value: object) -> bool:
    """Tell whether a cell is a list or an object with a text at any depth."""
    return isinstance(value, dict | list) and any(leaves(value))


def _is_json_text(value: object) -> bool:
    """Tell whether a cell is a text in square brackets or braces, as JSON is."""
    text = value.strip() if isinstance(value, str) else ""
    return text[:1] + text[-1:] in ("[]", "{}")


def _recognise_by_names(columns: Columns) -> Roles | None:
    """Recognise the first task of `_COLUMNS_OF_TASKS` whose required columns exist.

    None: there is none. If a task requires a single column, that must hold lists, as chats are.

    Example:
        >>> roles = _recognise_by_names({"chosen": ["a"], "rejected": ["b"], "id": [1]})
        >>> roles.task, list(roles.columns)
        ('preference', ['chosen', 'rejected'])
    """
    for task, required, optional in _COLUMNS_OF_TASKS:
        if not set(required) <= set(columns):
            continue
        has_turns = any(isinstance(value, list) for value in columns[required[0]])
        if len(required) > 1 or has_turns:
            names = (*required, *optional)
            return Roles(task, {name: name for name in names if name in columns})
    return None


def _recognise_tagged(columns: Columns) -> Roles | None:
    """Recognise a column of word lists and one of tag lists with equal lengths in each row.

    Columns with usual names come first. None: there is no such pair.

    Example:
        >>> columns = {"words": [["a", "dog"], ["it"]], "pos": [[0, 1], [2]], "ids": [[0], [1]]}
        >>> _recognise_tagged(columns).columns
        {'text_column': 'words', 'label_column': 'pos'}
    """
    # The length of the list in each row, for each column of lists.
    lengths: dict[str, list[int]] = {}
    for name, values in columns.items():
        if _are_lists(values):
            lengths[name] = list(map(len, values))
    word_columns = [name for name in lengths if all(map(_is_text_list, columns[name]))]
    for words in (*USUAL_WORDS, *word_columns):
        if words not in lengths:
            continue
        for tags in (*_TAG_NAMES, *lengths):
            # None is a usual name that is no column of lists.
            if tags != words and lengths.get(tags) == lengths[words]:
                return Roles("token_classification", {"text_column": words, "label_column": tags})
    return None


def _recognise_images(columns: Columns, label: str | None) -> Roles | None:
    """Recognise the first column of images beside a label column; None: one is missing."""
    for name, values in columns.items():
        if label is not None and values and all(map(_is_image, values)):
            return Roles("image_classification", {"image_column": name, "label_column": label})
    return None


def _is_image(value: object) -> bool:
    """Tell whether a cell is an encoded image, or the path of one."""
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"}
    return is_image_path(value)


def _recognise_seq2seq(columns: Columns) -> Roles | None:
    """Recognise a text and the text to produce, by usual names of both columns.

    None: one of them is missing, or the second column holds classes.

    Example:
        >>> _recognise_seq2seq({"article": ["a b", "c d"], "summary": ["a", "c"], "id": [1, 2]})
        >>> columns = {"article": ["a b c", "d e f", "g"], "summary": ["a", "d", "h"]}
        >>> _recognise_seq2seq(columns).columns
        {'text_column': 'article', 'target_column': 'summary'}
    """
    texts = [name for name, values in columns.items() if _are_texts(values)]
    sources = usual_columns(_SOURCE_NAMES, texts)
    targets = [
        name for name in usual_columns(_TARGET_NAMES, texts) if not are_classes(columns[name])
    ]
    if not sources or not targets:
        return None
    return Roles("seq2seq_lm", {"text_column": sources[0], "target_column": targets[0]})


def _recognise_classes(columns: Columns, label: str | None) -> Roles | None:
    """Recognise one or two texts and a label; None: there is no label, or no text.

    Two texts need usual names, those in `_NAMES_OF_PAIRS`, such as `premise` and `hypothesis`.
    Labels with fractions are a regression.

    Example:
        >>> roles = _recognise_classes({"text": ["good", "bad"], "stars": [4.5, 1.0]}, "stars")
        >>> roles.columns, roles.overrides
        ({'text_column': 'text', 'label_column': 'stars'}, ['task.problem_type=regression'])
    """
    texts = [name for name in columns if name != label and _are_texts(columns[name])]
    if label is None or not texts:
        return None
    # 1. Two texts with usual names, else one.
    roles = {"text_column": _text_column(texts, columns)}
    for pair in _NAMES_OF_PAIRS:
        names = usual_columns(pair, texts)
        if len(names) == 2:
            roles = {"text_column": names[0], "text_pair_column": names[1]}
            break
    # 2. Their label, a class or a number.
    roles["label_column"] = label
    overrides = []
    labels = columns[label]
    if are_numbers(labels) and any(float(str(value)) % 1 != 0 for value in labels):
        overrides.append("task.problem_type=regression")
    return Roles("sequence_classification", roles, overrides)


def _recognise_texts(columns: Columns) -> Roles | None:
    """Recognise a text with several labels, else texts alone; None: there is no column of texts.

    Several labels are lists in a column with a usual name, or at least two columns of 0 and 1 whose
    names can be written in `data.label_columns`.

    Example:
        >>> columns = {"comment": ["nice", "oh no"], "toxic": [0, 1], "rude": [1, 0]}
        >>> _recognise_texts(columns).overrides
        ['data.label_columns=[toxic,rude]', 'task.problem_type=multi_label_classification']
        >>> _recognise_texts({"comment": ["nice", "oh no"]}).task
        'causal_lm'
    """
    texts = [name for name in columns if _are_texts(columns[name])]
    if not texts:
        return None
    text = _text_column(texts, columns)
    # 1. A list of labels in each row.
    label_names = usual_columns(LABEL_NAMES, list(columns))
    label_lists = [name for name in label_names if _are_lists(columns[name])]
    if label_lists:
        roles = {"text_column": text, "label_column": label_lists[0]}
        return Roles("sequence_classification", roles, [_SEVERAL_LABELS])
    # 2. A column of 0 and 1 for each label.
    binary = [name for name in columns if {str(value) for value in columns[name]} == {"0", "1"}]
    if len(binary) > 1 and all(map(_BINARY_NAME.fullmatch, binary)):
        roles = {"text_column": text} | {name: name for name in binary}
        keys = [f"data.label_columns=[{','.join(binary)}]", _SEVERAL_LABELS]
        return Roles("sequence_classification", roles, keys)
    # 3. Texts alone.
    return Roles("causal_lm", {"text_column": text})


def _text_column(names: Sequence[str], columns: Columns) -> str:
    """Pick the first column with a usual name, else the one with the most characters."""
    usual = usual_columns(_TEXT_NAMES, names)
    if usual:
        return usual[0]
    return max(names, key=lambda name: sum(len(str(value)) for value in columns[name]))


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_lists(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, list) for value in values)


def _are_texts(values: Sequence[object]) -> bool:
    """Tell whether all values are texts, at least one of them with letters."""
    texts = [value for value in values if isinstance(value, str)]
    has_letters = any(map(str.isalpha, "".join(texts)))
    return has_letters and len(texts) == len(values) and not are_numbers(values)
