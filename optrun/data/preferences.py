"""Rows of preferences: a prompt, a preferred answer and another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optrun.base.errors import ConfigError, nearest
from optrun.config.schema.chat_tasks import ChatLayout
from optrun.data.chat import (
    ROLES,
    Cells,
    Chat,
    ChatColumns,
    Plain,
    Unreadable,
    cells_of,
    chat_of,
    leaves,
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
        more: The columns of tools, of a system text, and of options of the template.
    """

    prompt: str | None
    more: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [
            *([self.prompt] if self.prompt else []),
            CHOSEN,
            REJECTED,
            *self.more,
        ]


def pair_columns(source: Source, split: Split) -> PairColumns:
    """Find the columns `chosen`, `rejected`, and the prompt.

    Raises:
        ConfigError: One is missing, with the name that is nearest to it.
    """
    if not len(split.rows):  # nothing to evaluate on has the columns of the training rows
        split = source.train
    column_names = split.rows.column_names
    for column in (CHOSEN, REJECTED):
        if column not in column_names:
            close = nearest(column, column_names)
            hint = f" Did you mean {' or '.join(close)}? Call it {column}." if close else ""
            raise ConfigError(
                f"{split.key} has no column {column}: task=preference reads {CHOSEN}, {REJECTED},"
                f" and {PROMPT} where the prompt stands apart.{hint} {columns_in_words(split.rows)}"
            )
    prompt = named_column(source.columns, "text_column", split) or (
        PROMPT if PROMPT in column_names else None
    )
    more = (TOOLS, SYSTEM, "chat_template_kwargs", "history")
    columns = PairColumns(prompt, tuple(name for name in more if name in column_names))
    split.columns_read.update(columns.names)
    return columns


def preferences(
    split: Split, columns: PairColumns, roles: frozenset[str] = ROLES
) -> Iterator[Pair]:
    """Yield each row as two conversations, or as two prompts with completions.

    Raises:
        ConfigError: With the first row that is none.
    """
    return read_rows(split, columns.names, lambda cells, row: pair_of(cells, columns, roles, row))


def pair_of(cells: Cells, columns: PairColumns, roles: frozenset[str], row: int | None) -> Pair:
    """Read one row as the chosen and the rejected side, each a prompt and its answer.

    If there is no column of prompts, or the prompt is a text beside answers in turns, the common
    beginning of both answers is the prompt: turns, or characters of texts, as in TRL's
    `extract_prompt`.

    Args:
        cells: The values of the row by column.
        columns: The columns of the split.
        roles: Roles that a turn may have.
        row: The number of the row, from 0; None: it is of a stream.

    Raises:
        Unreadable: It is no pair.
    """
    prompt = None if columns.prompt is None else cells[columns.prompt]
    chosen = cells[CHOSEN]
    rejected = cells[REJECTED]
    if isinstance(chosen, list) and isinstance(rejected, list):
        is_shared = columns.prompt is None or isinstance(prompt, str)
        if is_shared and _common_prefix_length(chosen, rejected) == 0:
            raise Unreadable(f"has no prompt: {CHOSEN} and {REJECTED} share no first turn.")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        is_shared = columns.prompt is None
    else:
        raise Unreadable(
            f"has {type(chosen).__name__} and {type(rejected).__name__} as {CHOSEN} and {REJECTED},"
            " where two texts or two lists of turns are expected."
        )
    if is_shared:
        length = _common_prefix_length(chosen, rejected)
        prompt = chosen[:length]
        chosen = chosen[length:]
        rejected = rejected[length:]
    more = {name: cells.get(name) for name in columns.more}
    return (
        _read_side(prompt, chosen, CHOSEN, more, roles, row),
        _read_side(prompt, rejected, REJECTED, more, roles, row),
    )


def _read_side(
    prompt: object, answer: object, name: str, more: Cells, roles: frozenset[str], row: int | None
) -> Chat | Plain:
    """Read a prompt with one of its answers; `name` is the column of the answer."""
    names = (PROMPT, f"{name} answer")
    columns = ChatColumns(ChatLayout.prompt_completion, names, (TOOLS, SYSTEM))
    return chat_of({PROMPT: prompt, names[1]: answer, **more}, columns, roles, row)


def preference_texts(source: Source) -> Iterator[str]:
    """Yield every text of the training rows, for a vocabulary.

    Raises:
        ConfigError: A missing column.
    """
    for cells in cells_of(source.train, pair_columns(source, source.train).names):
        for value in cells.values():
            yield from leaves(value)


def _common_prefix_length(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Count the turns or characters of the common beginning; each answer keeps at least one.

    A space at the end of the beginning belongs to the answers, as in TRL.
    """
    shared = 0
    limit = min(len(chosen), len(rejected)) - 1
    while shared < limit and chosen[shared] == rejected[shared]:
        shared += 1
    if shared and chosen[shared - 1] == " ":
        return shared - 1
    return shared
