"""Rows of chats: turns, prompt and completion, Alpaca's columns, ShareGPT's lists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.reading import parse_json
from optrun.config.schema.chat_tasks import ChatLayout
from optrun.data.columns import named_column
from optrun.data.row_advice import cell_repr, columns_in_words

if TYPE_CHECKING:
    from optrun.data.source import Source, Split

Message = dict[str, Any]
"""`role`, `content`, and whatever else a template reads, such as `tool_calls`."""
Cells = Mapping[str, object]
"""The values of a row by column."""
Read = TypeVar("Read")

ASSISTANT = "assistant"
ROLES = frozenset({"system", "developer", "user", ASSISTANT, "tool", "function"})
"""Roles that rows may have, besides those that a template names."""
_ROLE_OF_SPEAKER = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_REQUIRED_COLUMNS = {
    ChatLayout.messages: ("messages",),
    ChatLayout.prompt_completion: ("prompt", "completion"),
    ChatLayout.alpaca: ("instruction", "output"),
    ChatLayout.sharegpt: ("conversations",),
}
_USUAL_TURN_COLUMNS = ("messages", "conversations")
_OPTIONAL_COLUMNS = {
    ChatLayout.messages: ("system",),
    ChatLayout.sharegpt: ("system",),
    ChatLayout.prompt_completion: ("system", "label"),
    ChatLayout.alpaca: ("input", "system", "history"),
}
_TEMPLATE_KWARGS = "chat_template_kwargs"
_HISTORY = "history"
_LOSS_KEYS = ("weight", "train", "training", "trainable", "loss", "train_detail", "training_detail")
"""Keys by which other programs leave a turn, or a part of it, out of the loss."""
_UNWANTED_LABELS = (False, "False", "false", "0")
"""How the column `label` of KTO says that an answer is not wanted; 0 is equal to False."""
_WANTED_LABELS = (True, "True", "true", "1", None)
"""How it says that an answer is wanted, or says nothing; 1 is equal to True."""
_TOOLS = "tools"


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation."""

    turns: list[Message]
    prompt_turns: int | None
    """The number of first turns that are the prompt; None: the row does not say."""
    tools: list[Message] | None
    """JSON schemas of the tools; None: none."""
    row: int | None = field(repr=False)
    """The number of the row in the split, from 0; None: it is of a stream."""
    only_last_trained: bool = False
    """Whether the loss counts the last turn alone."""

    def turns_before_answer(self) -> list[Message]:
        """Return the prompt if the row has one, else all turns but a last answer.

        Of turns by user, assistant, user and assistant these are the first three.
        """
        if self.prompt_turns is not None:
            return self.turns[: self.prompt_turns]
        if self.turns[-1]["role"] == ASSISTANT:
            return self.turns[:-1]
        return self.turns


@dataclass(frozen=True, slots=True)
class Plain:
    """A row without turns: a prompt and its completion, as texts that no template changes."""

    prompt: str
    completion: str
    row: int | None = field(repr=False)


@dataclass(frozen=True)
class ChatColumns:
    """The columns of the chats of a split."""

    layout: ChatLayout
    names: tuple[str, ...]
    """Columns that the layout needs."""
    optional: tuple[str, ...]
    """Columns of the split that are read beside them, such as `system` and `tools`."""

    @property
    def all(self) -> list[str]:
        """All columns of the chats."""
        return [*self.names, *self.optional]


def chat_columns(source: Source, split: Split, layout_key: ChatLayout | None) -> ChatColumns:
    """Find the columns of chats by the keys, else by usual names.

    1. `data.target_column` names completions. Their prompts are in the column of
       `data.text_column`, by default in `prompt`.
    2. `data.messages_column`, or `data.text_column` alone, names a column of turns.
    3. Without these keys the columns of exactly one layout must be there, such as `messages`, or
       `instruction` and `output`; `task.layout` decides between several.

    Args:
        source: Has the keys. Its training rows say the columns of a split without rows.
        split: Where the columns must be; they are marked as read.
        layout_key: `task.layout`; None: it is not set.

    Raises:
        ConfigError: A column is missing, the columns of several layouts are there, or a key names
            a column of another layout.
    """
    if not len(split.rows):
        split = source.train
    text = named_column(source.columns, "text_column", split)
    target = named_column(source.columns, "target_column", split)
    turns = named_column(source.columns, "messages_column", split)
    _refuse_beside_turns(source)
    # 1. Prompts and completions.
    if target is not None:
        _expect_layout(layout_key, ChatLayout.prompt_completion, f"data.target_column={target}")
        if text is None and "prompt" not in split.rows.column_names:
            raise ConfigError(
                f"data.text_column is needed: {split.key} has no column called prompt."
            )
        return _columns_of_layout(split, ChatLayout.prompt_completion, (text or "prompt", target))
    # 2. A column of turns.
    key = "data.messages_column"
    if turns is None:
        key = "data.text_column"
        turns = text
    if turns is not None:
        layout = layout_key if layout_key is ChatLayout.sharegpt else ChatLayout.messages
        _expect_layout(layout_key, layout, f"{key}={turns}")
        return _columns_of_layout(split, layout, (turns,))
    # 3. Usual names.
    usual = _layout_of_columns(split, layout_key)
    return _columns_of_layout(split, usual, _REQUIRED_COLUMNS[usual])


def _layout_of_columns(split: Split, layout_key: ChatLayout | None) -> ChatLayout:
    """Find the layout of a split by its columns; `layout_key` decides between several.

    A layout fits if the split has all columns of it, such as `instruction` and `output`.
    layout_key: `task.layout`; None: it is not set.

    Raises:
        ConfigError: The split lacks columns of every layout, or of `task.layout`; or it has the
            columns of several layouts, and `task.layout` is not set.
    """
    column_names = split.rows.column_names
    fitting = [
        layout for layout, names in _REQUIRED_COLUMNS.items() if set(names) <= set(column_names)
    ]
    # 1. `task.layout` says which.
    if layout_key is not None:
        if layout_key in fitting:
            return layout_key
        lacking = " and ".join(
            name for name in _REQUIRED_COLUMNS[layout_key] if name not in column_names
        )
        raise ConfigError(
            f"task.layout={layout_key.value}: {split.key} has no column {lacking}."
            f" {columns_in_words(split.rows)}"
        )
    # 2. Only one can be meant.
    if not fitting:
        layouts = "; ".join(" and ".join(names) for names in _REQUIRED_COLUMNS.values())
        raise ConfigError(
            f"{split.key} has no chats that task=sft knows by their columns: {layouts}."
            f" {columns_in_words(split.rows)} data.messages_column names a column of turns,"
            " data.text_column and data.target_column those of prompts and completions."
        )
    if len(fitting) > 1:
        layouts = ", ".join(
            f"{layout.value} ({' and '.join(_REQUIRED_COLUMNS[layout])})" for layout in fitting
        )
        raise ConfigError(
            f"{split.key} has the columns of several layouts: {layouts}. Say which:"
            " task.layout=NAME."
        )
    return fitting[0]


def _refuse_beside_turns(source: Source) -> None:
    """Refuse `data.text_column` and `data.target_column` beside `data.messages_column`."""
    turns = getattr(source.columns, "messages_column", None)
    for key in ("text_column", "target_column"):
        column = getattr(source.columns, key, None)
        if turns is not None and column is not None:
            raise ConfigError(
                f"data.messages_column={turns}: whole chats stand there, so data.{key}={column} has"
                " nothing to name. Leave one of them out."
            )


def _expect_layout(layout_key: ChatLayout | None, layout: ChatLayout, key: str) -> None:
    """Refuse a `task.layout` other than the layout of a named column; None: it is not set."""
    if layout_key is not None and layout_key is not layout:
        raise ConfigError(
            f"task.layout={layout_key.value}: {key} names a column of the layout {layout.value}."
        )


def _columns_of_layout(split: Split, layout: ChatLayout, names: tuple[str, ...]) -> ChatColumns:
    """Return the columns of a layout: the given ones, and optional ones of the split.

    All are marked as read.

    Args:
        split: The rows.
        layout: Decides the optional columns: `tools`, `system`, and so on. A column `label` counts
            only if it says which answers are wanted, as in KTO.
        names: The required columns; the split has them.
    """
    optional = []
    for name in (*_OPTIONAL_COLUMNS.get(layout, ()), _TOOLS, _TEMPLATE_KWARGS, _HISTORY):
        if name in names or name not in split.rows.column_names:
            continue
        if name != "label" or _says_what_is_wanted(split):
            optional.append(name)
    split.columns_read.update((*names, *optional))
    return ChatColumns(layout, names, tuple(optional))


def _says_what_is_wanted(split: Split) -> bool:
    """Tell whether the column `label` says which answers are wanted, as in KTO.

    It does if one of its first 1,000 values is false, or if all of them are true or missing.
    """
    labels = split.rows.select_columns(["label"])[:1000]["label"]
    if any(label in _UNWANTED_LABELS for label in labels):
        return True
    return all(label in _WANTED_LABELS for label in labels)


def chats(
    split: Split, columns: ChatColumns, roles: frozenset[str] = ROLES
) -> Iterator[Chat | Plain]:
    """Yield each row as a conversation, or as two texts if prompt and completion are texts.

    Args:
        split: The rows.
        columns: The columns of the chats.
        roles: Roles that a turn may have.

    Raises:
        ConfigError: With the first row that has no assistant's turn, an unknown role, an empty
            completion, or cells of another kind.
    """
    return read_rows(split, columns.all, lambda cells, row: read_chat(cells, columns, roles, row))


def read_rows(
    split: Split, names: Sequence[str], read: Callable[[Cells, int], Read]
) -> Iterator[Read]:
    """Yield what a function reads from each row.

    Args:
        split: The rows.
        names: Columns that are read.
        read: Called with the values of a row by column, and with the number of the row, from 0.

    Raises:
        ConfigError: `read` raised `Unreadable`; the message begins with the number of the row.
    """
    for row, cells in enumerate(cells_of(split, names)):
        try:
            yield read(cells, row)
        except Unreadable as error:
            raise ConfigError(f"{split.key}: row {split.number(row)} {error}") from None


def cells_of(split: Split, names: Sequence[str]) -> Iterator[Cells]:
    """Yield the values of these columns for each row, by column."""
    return (dict(zip(names, values, strict=True)) for values in split.cells(names))


def question_columns(source: Source, split: Split, layout_key: ChatLayout | None) -> ChatColumns:
    """Find the columns of questions for a model to answer; rows need no answers.

    1. `data.messages_column` names a column of turns.
    2. `data.text_column` names a column of prompts if the run was trained on prompts and
       completions, unless the column is called `messages` or `conversations`; else one of turns.
    3. Without these keys exactly one layout must have its first column: `messages`, `prompt`,
       `instruction` or `conversations`; `task.layout` decides between several.

    Args:
        source: Has the keys.
        split: Where the columns must be; they are marked as read.
        layout_key: `task.layout`; None: it is not set.

    Returns:
        The layout, with the column of the questions alone as its `names`.

    Raises:
        ConfigError: A named column is missing, the columns of no layout or of several ones are
            there, or a column of turns is named beside others.
    """
    _refuse_beside_turns(source)
    # 1. A column of turns.
    turns = named_column(source.columns, "messages_column", split)
    if turns is not None:
        return _columns_of_layout(split, ChatLayout.messages, (turns,))
    # 2. A column of prompts or of turns.
    text = named_column(source.columns, "text_column", split)
    if text is not None:
        was_trained_on_pairs = (
            layout_key is ChatLayout.prompt_completion
            or getattr(source.columns, "target_column", None) is not None
        )
        text_layout = ChatLayout.messages
        if was_trained_on_pairs and text not in _USUAL_TURN_COLUMNS:
            text_layout = ChatLayout.prompt_completion
        return _columns_of_layout(split, text_layout, (text,))
    # 3. Usual names.
    fitting = [
        layout
        for layout, names in _REQUIRED_COLUMNS.items()
        if names[0] in split.rows.column_names and layout_key in (None, layout)
    ]
    if len(fitting) == 1:
        return _columns_of_layout(split, fitting[0], _REQUIRED_COLUMNS[fitting[0]][:1])
    first_columns = ", ".join(
        _REQUIRED_COLUMNS[layout][0] for layout in fitting or _REQUIRED_COLUMNS
    )
    problem = "none of the columns of questions"
    if fitting:
        problem = "the columns of several layouts"
    raise ConfigError(
        f"{split.key} has {problem}: {first_columns}. {columns_in_words(split.rows)} Say which:"
        " data.text_column=NAME, or data.messages_column=NAME for a column of turns."
    )


def questions(
    split: Split, columns: ChatColumns, roles: frozenset[str] = ROLES
) -> Iterator[Chat | str]:
    """Yield the turns before the last answer of each chat, or the prompt if it is a text.

    Raises:
        ConfigError: With the first row that cannot be read.
    """
    return read_rows(
        split, columns.all, lambda cells, row: _read_question(cells, columns, roles, row)
    )


def _read_question(
    cells: Cells, columns: ChatColumns, roles: frozenset[str], row: int
) -> Chat | str:
    """Read the turns before the last answer of a row, or its text.

    Args:
        cells: The values of the row by column.
        columns: From `question_columns`.
        roles: Roles that a turn may have.
        row: The number of the row, from 0.

    Raises:
        Unreadable: There is no turn to answer, or a cell of another kind.
    """
    question = cells.get(columns.names[0])
    # 1. Alpaca's columns: instruction and input.
    if columns.layout is ChatLayout.alpaca:
        any_answer = "-"  # the row needs none; it becomes the last turn, which is dropped here
        chat = _read_alpaca((question, any_answer), cells, _read_tools(cells), row)
        return Chat(chat.turns[:-1], None, chat.tools, row)
    # 2. A text.
    if isinstance(question, str):
        return question
    # 3. Turns. A prompt may end with an answer that the model is to continue; of a chat the last
    #    answer is what was to be said.
    turns = _read_turns(question, roles, "chat")
    if not turns:
        raise Unreadable("has no turn to answer.")
    turns = _with_system(turns, cells)
    is_prompt = columns.layout is ChatLayout.prompt_completion
    if turns[-1]["role"] == ASSISTANT and not is_prompt:
        turns = turns[:-1]
    if not turns:
        raise Unreadable("begins with its only answer: there is nothing to answer.")
    return Chat(turns, None, _read_tools(cells), row)


def chat_texts(source: Source, split: Split) -> Iterator[str]:
    """Yield every text of the columns of chats, named or usual ones, to train a vocabulary.

    Columns of all layouts are read, and optional ones such as `system` and `tools`: every text at
    any depth of a cell.

    Raises:
        ConfigError: There are no columns of chats.
    """
    names = {_TOOLS}
    for layout, required in _REQUIRED_COLUMNS.items():
        names.update(required, _OPTIONAL_COLUMNS.get(layout, ()))
    names &= set(split.rows.column_names)
    for key in ("messages_column", "text_column", "target_column"):
        name = named_column(source.columns, key, split)
        if name is not None:
            names.add(name)
    if not names:
        chat_columns(source, split, None)  # raises: it finds no columns either
    columns = sorted(names)
    # Texts come column by column within each batch of rows; their order makes no difference.
    for batch in split.rows.select_columns(columns).iter(batch_size=1000):
        for name in columns:
            for value in batch[name]:
                yield from leaves(value)


def leaves(value: object) -> Iterator[str]:
    """Yield every text inside a cell, at any depth of lists and objects, but not their keys."""
    if isinstance(value, str):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


class Unreadable(Exception):
    """An unreadable row; the message follows the number of the row in a sentence."""


def read_chat(
    cells: Cells, columns: ChatColumns, roles: frozenset[str], row: int | None
) -> Chat | Plain:
    """Read one row as a conversation, or as two texts if prompt and completion are texts.

    Example: `{"messages": [{"role": "user", "content": "2 + 2?"}, ...]}` is a Chat with these
    turns; `{"prompt": "2 + 2 =", "completion": " 4"}` is a Plain.

    Args:
        cells: Its values by column; other columns are not read.
        columns: The columns of chats.
        roles: Roles that a turn may have.
        row: Its number; None: it is of a stream.

    Raises:
        Unreadable: It is no conversation, or has no answer.
    """
    values = tuple(cells.get(name) for name in columns.names)
    tools = _read_tools(cells)
    refuse_ignored_cells(cells)  # raises Unreadable, as all that reads below
    # 1. Alpaca's columns.
    if columns.layout is ChatLayout.alpaca:
        return _read_alpaca(values, cells, tools, row)
    if cells.get(_HISTORY):
        raise Unreadable(
            f"has earlier turns in a column {_HISTORY}, which is only read beside instruction and"
            " output. Write all turns into one list, or leave the column out."
        )
    # 2. A prompt and its completion, both texts or both turns.
    if columns.layout is ChatLayout.prompt_completion:
        prompt, completion = values
        name = columns.names[1]
        if isinstance(prompt, str) or isinstance(completion, str):
            return _read_plain(prompt, completion, name, cells, row)
        prompt_turns = _read_turns(prompt, roles, "prompt")
        answer = _read_turns(completion, roles, name)
        if not answer:
            raise Unreadable(f"has an empty {name}: nothing to learn from it. Leave such rows out.")
        _expect_answers(answer, name)  # refuses a completion without an assistant's turn
        prompt_turns = _with_system(prompt_turns, cells)
        return Chat([*prompt_turns, *answer], len(prompt_turns), tools, row)
    # 3. All turns in one column, `messages` or ShareGPT's `conversations`.
    turns = _read_turns(values[0], roles, "chat")
    if not turns:
        raise Unreadable("has no turns at all. Leave such rows out.")
    _expect_answers(turns, "chat")
    return Chat(_with_system(turns, cells), None, tools, row)


def refuse_ignored_cells(cells: Cells) -> None:
    """Refuse a row with cells that change what should be learnt, but that optrun does not read.

    These are `chat_template_kwargs` with a value, and `label: false`.

    Raises:
        Unreadable: The row has one of them.
    """
    if _without_nulls(cells.get(_TEMPLATE_KWARGS)):
        raise Unreadable(
            f"has {cell_repr(cells[_TEMPLATE_KWARGS])} as {_TEMPLATE_KWARGS}, which are not read."
            " Leave the column out, or set the values in a template of your own:"
            " task.chat_template=FILE.jinja."
        )
    if cells.get("label") in _UNWANTED_LABELS:
        raise Unreadable(
            f"has label={cells['label']!r}, an answer that is not wanted (KTO), but task=sft"
            " learns every completion. Leave such rows out, or write pairs of chosen and rejected"
            " for task=preference."
        )


def _with_system(turns: list[Message], cells: Cells) -> list[Message]:
    """Return the turns behind a system turn with the text of the column `system`, if there is one.

    Raises:
        Unreadable: The turns have another system text, or the cell is no text.
    """
    system = cells.get("system")
    if not system:
        return turns
    if not isinstance(system, str):
        raise Unreadable(f"has {cell_repr(system)} as system, where a text is expected.")
    if turns and turns[0]["role"] == "system":
        if turns[0]["content"] == system:
            return turns
        raise Unreadable(
            "has a system turn, and another text in column system. Leave one of them out."
        )
    return [{"role": "system", "content": system}, *turns]


def _read_plain(
    prompt: object, completion: object, name: str, cells: Cells, row: int | None
) -> Plain:
    """Read a prompt and a completion as texts; the prompt may be missing.

    Args:
        prompt: The cell of the prompt.
        completion: The cell of the completion.
        name: The column of the completion, for messages.
        cells: The whole row.
        row: Its number; None: it is of a stream.

    Raises:
        Unreadable: One of them is a list of turns, the completion is empty, or the row has a system
            text.
    """
    if cells.get("system"):
        raise Unreadable(
            "has a column system beside a prompt that is a text, and no template writes both."
            " Write prompt and completion as lists of turns, or join the texts."
        )
    for part_name, value in (("prompt", prompt), (name, completion)):
        if not isinstance(value, str | None):
            raise Unreadable(
                f"has a text and a list of turns: its {part_name} is {cell_repr(value)}. Write both"
                " as texts, or both as turns."
            )
    completion = str(completion or "")
    if not completion.strip():
        raise Unreadable(f"has an empty {name}: nothing to learn from it. Leave such rows out.")
    return Plain(str(prompt or ""), completion, row)


def _read_alpaca(
    values: tuple[object, ...], cells: Cells, tools: list[Message] | None, row: int | None
) -> Chat:
    """Make a chat of Alpaca's columns: instruction and input are the question, output the answer.

    The content of the question is the instruction, then an empty line and the input if there is
    one. With an input the question also has the keys `instruction` and `input`, for templates that
    write the two apart. An empty instruction is a question without text.

    Args:
        values: Instruction and output, two cells.
        cells: The whole row; `input`, `history` and `system` are read.
        tools: Tools of the row.
        row: The number of the row, from 0; None: it is of a stream.

    Raises:
        Unreadable: A cell is of another kind, or the output is empty.
    """
    instruction, output = values
    context = cells.get("input")
    if (
        not isinstance(instruction, str)
        or not isinstance(output, str | None)
        or not isinstance(context, str | None)
    ):
        raise Unreadable(
            f"has {cell_repr((*values, context))} as instruction, output and input, where texts"
            " are expected."
        )
    if not (output or "").strip():
        raise Unreadable("has an empty output: nothing to learn from it. Leave such rows out.")
    question: Message = {"role": "user", "content": instruction}
    if context:
        question["content"] = f"{instruction}\n\n{context}"
        question |= {"instruction": instruction, "input": context}
    prompt = _with_system([*_read_history(cells.get(_HISTORY)), question], cells)
    return Chat([*prompt, {"role": ASSISTANT, "content": output}], len(prompt), tools, row)


def _read_history(value: object) -> list[Message]:
    """Read earlier questions with their answers, as LLaMA-Factory writes them.

    Raises:
        Unreadable: Something else than pairs of texts.
    """
    turns: list[Message] = []
    if not value:
        return turns
    pairs: list[Any] = value if isinstance(value, list) else [value]
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise Unreadable(
                f"has {cell_repr(value)} as history, where lists of a question and its answer are"
                " expected."
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": ASSISTANT, "content": pair[1]}]
    return turns


def _read_turns(value: object, roles: frozenset[str], part_name: str) -> list[Message]:
    """Read a list of turns, or a single turn; None: no turns. `part_name` is for messages.

    Raises:
        Unreadable: It is something else, or `_read_turn` refuses a turn.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | type(None)):
        raise Unreadable(
            f"has {cell_repr(value)} as its {part_name}, where a list of turns is expected."
        )
    return [_read_turn(turn, number, roles) for number, turn in enumerate(value or [], start=1)]


def _read_turn(value: object, number: int, roles: frozenset[str]) -> Message:
    """Read one turn: `role` and `content`, or ShareGPT's `from` and `value`.

    Its other keys stay, without nulls; arguments of tool calls become objects. Keys that leave a
    turn out of the loss, such as `weight`, are dropped if they are 1.

    Args:
        value: The turn.
        number: Its number in the chat, from 1, for messages.
        roles: Roles that it may have.

    Raises:
        Unreadable: It is no turn, its role is unknown, its content is no text, it is an empty
            answer, or a key leaves it out of the loss.
    """
    if not isinstance(value, Mapping) or not ({"role", "from"} & set(value)):
        raise Unreadable(
            f'has no turn {number} as {{"role": ..., "content": ...}}: {cell_repr(value)}.'
        )
    turn: Message = _without_nulls(value)
    # A key such as `weight` may stand there if it changes nothing: true and 1.0 are equal to 1.
    for key in _LOSS_KEYS:
        if turn.pop(key, 1) != 1:
            raise Unreadable(
                f"has {key}={value[key]!r} in turn {number}, but rows cannot leave turns out of"
                " the loss. End the chat before this turn, or write prompt and completion: only"
                " the completion is learnt."
            )
    if "tool_calls" in turn:
        turn["tool_calls"] = _read_tool_calls(turn["tool_calls"], number)
    role = _pop_role(turn, number, roles)
    content = _join_content(turn.pop("content", ""), number)
    if role == ASSISTANT and not content.strip() and not turn.get("tool_calls"):
        raise Unreadable(
            f"has an empty answer in turn {number}: nothing to learn from it. Leave such rows out."
        )
    return {"role": role, "content": content, **turn}


def _pop_role(turn: Message, number: int, roles: frozenset[str]) -> Any:
    """Take the role out of a turn, and return it. Of ShareGPT's turns `value` becomes `content`.

    Example: `{"from": "human", "value": "Hi"}` becomes `{"content": "Hi"}`; the role is `user`.

    Args:
        turn: The turn; changed in place.
        number: Its number in the chat, from 1, for messages.
        roles: Roles that it may have, besides ShareGPT's names of them.

    Raises:
        Unreadable: The role is unknown.
    """
    if "role" in turn:
        role = turn.pop("role")
    else:
        speaker = str(turn.pop("from", None))
        if speaker not in _ROLE_OF_SPEAKER and speaker not in roles:
            raise Unreadable(
                f"has an unknown speaker in turn {number}: {speaker!r}."
                f" {did_you_mean(speaker, [*_ROLE_OF_SPEAKER, *roles])}"
            )
        role = _ROLE_OF_SPEAKER.get(speaker, speaker)
        turn["content"] = turn.pop("value", "")
    if role not in roles:
        raise Unreadable(
            f"has an unknown role in turn {number}: {str(role)!r}. {did_you_mean(str(role), roles)}"
        )
    return role


def _read_tool_calls(value: object, number: int) -> list[Any]:
    """Read the tool calls of a turn, a list or its JSON text.

    Raises:
        Unreadable: They are something else.
    """
    calls = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            calls = parse_json(value.encode(), "tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise Unreadable(
            f"has {cell_repr(value)} as tool_calls of turn {number}, where a list of calls is"
            " expected."
        )
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: Mapping[str, Any]) -> Any:
    """Return a tool call with its arguments parsed, if they are the JSON text of an object."""
    function: Any = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = parse_json(arguments.encode(), "arguments")
    except ValueError:
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _join_content(content: object, number: int) -> str:
    """Return the text of a turn, joined if it is a list of texts or of objects with `text`.

    number: The number of the turn, for messages.

    Raises:
        Unreadable: It holds something else.
    """
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise Unreadable(
                    f"has something else than text in turn {number}: {cell_repr(content)}."
                )
            texts.append(text)
        return "".join(texts)
    if not isinstance(content, str):
        raise Unreadable(
            f"has {cell_repr(content)} as the content of turn {number}, where a text is expected."
        )
    return content


def _expect_answers(turns: list[Message], part_name: str) -> None:
    """Raise `Unreadable` if no turn is of the assistant; `part_name` is for the message."""
    if not any(turn["role"] == ASSISTANT for turn in turns):
        have = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
        raise Unreadable(
            f"has no turn of the assistant in its {part_name}, only {have}: nothing to learn. Leave"
            " it out."
        )


def _read_tools(cells: Cells) -> list[Message] | None:
    """Read the column `tools` of a row, JSON schemas or their JSON text; None: it has none.

    Raises:
        Unreadable: The cell is something else.
    """
    value = cells.get(_TOOLS)
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = parse_json(value.encode(), "tools")
        except ValueError:
            raise Unreadable(
                f"has {cell_repr(value)} as tools, which is not JSON. Write a list of JSON schemas."
            ) from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Unreadable(
            f"has {cell_repr(value)} as tools, where a list of JSON schemas is expected."
        )
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: object) -> Any:
    """Return a cell without keys of null values, at any depth.

    Arrow gives each object the keys of all rows.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
