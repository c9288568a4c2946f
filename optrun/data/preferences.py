"""Rows of preferences: a prompt, a preferred answer and another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.chat_tasks import ChatLayout
from optrun.data.chat import (
    Cells,
    Chat,
    ChatColumns,
    Plain,
    Unreadable,
    cells_of,
    leaves,
    read_chat,
    read_rows,
)
from optrun.data.columns import named_column
from optrun.data.row_advice import columns_in_words
from optrun.data.source import Source, Split

CHOSEN, REJECTED, PROMPT, TOOLS = "chosen", "rejected", "prompt", "tools"
"""Columns, by TRL's names."""
Pair = tuple[Chat | Plain, Chat | Plain]
"""The preferred answer and the other one, each behind its prompt."""
SYSTEM = "system"


@dataclass(frozen=True)
class PairColumns:
    """The columns of the pairs of a split.

    Attributes:
        prompt: The column of prompts; None: the common beginning of both answers is the prompt.
        optional: The columns of tools, of a system text, of options of the template, and of earlier
            turns that the split has.
    """

    prompt: str | None
    optional: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All columns; the prompt comes first if there is a column of prompts."""
        names = [CHOSEN, REJECTED, *self.optional]
        if self.prompt:
            names.insert(0, self.prompt)
        return names


def pair_columns(source: Source, split: Split) -> PairColumns:
    """Find the columns `chosen`, `rejected` and the prompt, and mark them as read.

    The prompt is the column of `data.text_column`, else `prompt`, else there is none. A split
    without rows has the columns of the training rows.

    Raises:
        ConfigError: `chosen` or `rejected` is missing; the message has the nearest name.
    """
    if not len(split.rows):
        split = source.train
    column_names = split.rows.column_names
    for column in (CHOSEN, REJECTED):
        if column not in column_names:
            hint = did_you_mean(column, column_names, "")
            if hint:
                hint = f" {hint} Call it {column}."
            raise ConfigError(
                f"{split.key} has no column {column}: task=preference reads {CHOSEN}, {REJECTED},"
                f" and {PROMPT} if the prompt has a column.{hint} {columns_in_words(split.rows)}"
            )
    prompt = named_column(source.columns, "text_column", split)
    if prompt is None and PROMPT in column_names:
        prompt = PROMPT
    optional = [
        name for name in (TOOLS, SYSTEM, "chat_template_kwargs", "history") if name in column_names
    ]
    columns = PairColumns(prompt, tuple(optional))
    split.columns_read.update(columns.names)
    return columns


def preferences(split: Split, columns: PairColumns, roles: frozenset[str]) -> Iterator[Pair]:
    """Read each row of a split as a pair: the chosen and the rejected answer, with one prompt.

    Both answers are chats if the cells are lists of turns, else texts.

    Args:
        split: The rows.
        columns: Their columns, from `pair_columns`.
        roles: Roles that turns may have.

    Raises:
        ConfigError: A row is no pair; the message names the first such row.
    """
    return read_rows(split, columns.names, lambda cells, row: read_pair(cells, columns, roles, row))


def read_pair(cells: Cells, columns: PairColumns, roles: frozenset[str], row: int | None) -> Pair:
    """Read one row as the chosen and the rejected side, each a prompt and its answer.

    If there is no column of prompts, or the prompt is a text beside answers in turns, the common
    beginning of both answers is the prompt: turns, or characters of texts, as in TRL's
    `extract_prompt`.

    Example: `{"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}` without a column of prompts is the
    prompt `2 + 2 =` with the answers ` 4` and ` 5`.

    Args:
        cells: The values of the row by column.
        columns: The columns of the split.
        roles: Roles that a turn may have.
        row: The number of the row, from 0; None: it is of a stream.

    Raises:
        Unreadable: The answers are not two texts or two lists, or there is no prompt.
    """
    # 1. The cells: two answers of one kind.
    prompt = None if columns.prompt is None else cells[columns.prompt]
    chosen: Any = cells[CHOSEN]
    rejected: Any = cells[REJECTED]
    are_turns = isinstance(chosen, list) and isinstance(rejected, list)
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    if not are_turns and not are_texts:
        raise Unreadable(
            f"has {type(chosen).__name__} and {type(rejected).__name__} as {CHOSEN} and {REJECTED},"
            " where two texts or two lists of turns are expected."
        )
    # 2. Cut the prompt off both answers if it is inside of them: without a column of prompts, or
    #    if that has only its text, where the answers are whole chats.
    if columns.prompt is None or (are_turns and isinstance(prompt, str)):
        length = _common_prefix_length(chosen, rejected)
        if are_turns and length == 0:
            raise Unreadable(f"has no prompt: {CHOSEN} and {REJECTED} share no first turn.")
        prompt = chosen[:length]
        chosen = chosen[length:]
        rejected = rejected[length:]
    # 3. Read each answer behind the prompt.
    optional = {name: cells.get(name) for name in columns.optional}
    return (
        _read_side(prompt, chosen, CHOSEN, optional, roles, row),
        _read_side(prompt, rejected, REJECTED, optional, roles, row),
    )


def _read_side(
    prompt: object,
    answer: object,
    name: str,
    optional: Cells,
    roles: frozenset[str],
    row: int | None,
) -> Chat | Plain:
    """Read a prompt with one of its answers, as a row of prompt and completion.

    Args:
        prompt: The prompt, a text or turns; None: it is empty.
        answer: The answer, a text or turns.
        name: The column of the answer, for messages.
        optional: The other cells, such as `tools` and `system`.
        roles: Roles that a turn may have.
        row: The number of the row, from 0; None: it is of a stream.

    Raises:
        Unreadable: As `read_chat`.
    """
    names = (PROMPT, f"{name} answer")
    columns = ChatColumns(ChatLayout.prompt_completion, names, (TOOLS, SYSTEM))
    return read_chat({PROMPT: prompt, names[1]: answer, **optional}, columns, roles, row)


def preference_texts(source: Source) -> Iterator[str]:
    """Yield every text of the training rows in the columns of pairs, to train a vocabulary.

    Raises:
        ConfigError: `chosen` or `rejected` is missing.
    """
    for cells in cells_of(source.train, pair_columns(source, source.train).names):
        for value in cells.values():
            yield from leaves(value)


def _common_prefix_length(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Count the turns or characters of the common beginning; each answer keeps at least one.

    If it ends with a space, that belongs to the answers, as in TRL.

    Example:
        >>> _common_prefix_length("2 + 2 = 4", "2 + 2 = 5")
        7
    """
    length = 0
    limit = min(len(chosen), len(rejected)) - 1
    while length < limit and chosen[length] == rejected[length]:
        length += 1
    if length and chosen[length - 1] == " ":
        return length - 1
    return length
