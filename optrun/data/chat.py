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
_SHAREGPT = {
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
_COLUMNS = {
    ChatLayout.messages: ("messages",),
    ChatLayout.prompt_completion: ("prompt", "completion"),
    ChatLayout.alpaca: ("instruction", "output"),
    ChatLayout.sharegpt: ("conversations",),
}
_MORE = {
    ChatLayout.messages: ("system",),
    ChatLayout.sharegpt: ("system",),
    ChatLayout.prompt_completion: ("system", "label"),
    ChatLayout.alpaca: ("input", "system", "history"),
}
_KWARGS = "chat_template_kwargs"
_HISTORY = "history"
_WHETHER_LEARNT = (
    "weight",
    "train",
    "training",
    "trainable",
    "loss",
    "train_detail",
    "training_detail",
)
"""Keys by which other programs leave a turn, or a part of it, out of the loss."""
_UNWANTED = (False, "False", "false", "0")
"""How the column `label` of KTO says that an answer is not wanted; 0 is equal to False."""
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
    """Whether only the last turn is trained on."""

    def turns_before_answer(self) -> list[Message]:
        """Return the turns before the answer.

        These are the prompt if the row says what it is, else all turns without a last one of the
        assistant.
        """
        if self.prompt_turns is not None:
            return self.turns[: self.prompt_turns]
        if self.turns[-1]["role"] == ASSISTANT:
            return self.turns[:-1]
        return self.turns


@dataclass(frozen=True, slots=True)
class Plain:
    """A prompt and its completion, as texts."""

    prompt: str
    completion: str
    row: int | None = field(repr=False)


@dataclass(frozen=True)
class ChatColumns:
    """The columns of the chats of a split."""

    layout: ChatLayout
    names: tuple[str, ...]
    """Columns that the layout needs."""
    more: tuple[str, ...]
    """Columns that are read beside them, if the rows have them."""

    @property
    def all(self) -> list[str]:
        """All columns of the chats."""
        return [*self.names, *self.more]


def chat_columns(source: Source, split: Split, layout_key: ChatLayout | None) -> ChatColumns:
    """Find the columns of chats, as keys name them, else by their usual names.

    `data.messages_column` names the column of turns, `data.text_column` and `data.target_column`
    those of prompts and completions; `data.text_column` alone is a column of turns, too.

    Args:
        source: Carries the names.
        split: Where the columns must be.
        layout_key: The layout of `task.layout`; None: it is not set.

    Raises:
        ConfigError: No such column, none at all, those of several layouts, or a column of turns
            beside others.
    """
    if not len(split.rows):  # nothing to evaluate on has the columns of the training rows
        split = source.train
    text = named_column(source.columns, "text_column", split)
    target = named_column(source.columns, "target_column", split)
    turns = named_column(source.columns, "messages_column", split)
    column_names = split.rows.column_names
    _refuse_beside_turns(source)
    if target is not None:
        _expect_layout(layout_key, ChatLayout.prompt_completion, f"data.target_column={target}")
        if text is None and "prompt" not in column_names:
            raise ConfigError(
                f"data.text_column is needed: {split.key} has no column called prompt."
            )
        return _columns_of(split, ChatLayout.prompt_completion, (text or "prompt", target))
    key = "data.messages_column"
    if turns is None:
        key = "data.text_column"
        turns = text
    if turns is not None:
        layout = layout_key if layout_key is ChatLayout.sharegpt else ChatLayout.messages
        _expect_layout(layout_key, layout, f"{key}={turns}")
        return _columns_of(split, layout, (turns,))
    fitting = [layout for layout, names in _COLUMNS.items() if set(names) <= set(column_names)]
    if layout_key is not None:
        if layout_key not in fitting:
            lacking = " and ".join(
                name for name in _COLUMNS[layout_key] if name not in column_names
            )
            raise ConfigError(
                f"task.layout={layout_key.value}: {split.key} has no column {lacking}."
                f" {columns_in_words(split.rows)}"
            )
        fitting = [layout_key]
    if not fitting:
        layouts = "; ".join(" and ".join(names) for names in _COLUMNS.values())
        raise ConfigError(
            f"{split.key} has no chats that task=sft knows by their columns: {layouts}."
            f" {columns_in_words(split.rows)} data.messages_column names a column of turns,"
            " data.text_column and data.target_column those of prompts and completions."
        )
    if len(fitting) > 1:
        layouts_in_words = ", ".join(
            f"{layout.value} ({' and '.join(_COLUMNS[layout])})" for layout in fitting
        )
        raise ConfigError(
            f"{split.key} has the columns of several layouts: {layouts_in_words}. Say which:"
            " task.layout=NAME."
        )
    return _columns_of(split, fitting[0], _COLUMNS[fitting[0]])


def _refuse_beside_turns(source: Source) -> None:
    """Refuse keys of other columns beside one of whole chats."""
    turns = getattr(source.columns, "messages_column", None)
    for key in ("text_column", "target_column"):
        column = getattr(source.columns, key, None)
        if turns is not None and column is not None:
            raise ConfigError(
                f"data.messages_column={turns}: whole chats stand there, so data.{key}={column} has"
                " nothing to name. Leave one of them out."
            )


def _expect_layout(layout_key: ChatLayout | None, layout: ChatLayout, key: str) -> None:
    """Refuse a `task.layout` that is not the layout of a named column; None: it is not set."""
    if layout_key is not None and layout_key is not layout:
        raise ConfigError(
            f"task.layout={layout_key.value}: {key} names a column of the layout {layout.value}."
        )


def _columns_of(split: Split, layout: ChatLayout, names: tuple[str, ...]) -> ChatColumns:
    """Add the columns that a layout may have beside the needed ones, and mark all as read."""
    more = tuple(
        name
        for name in (*_MORE.get(layout, ()), _TOOLS, _KWARGS, _HISTORY)
        if name in split.rows.column_names and name not in names
    )
    split.columns_read.update((*names, *more))
    return ChatColumns(layout, names, more)


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
    return read_rows(split, columns.all, lambda cells, row: chat_of(cells, columns, roles, row))


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
    """Find the columns of chats whose answers a model is to write; rows need no answers.

    A column that `data.text_column` names has prompts if the run was trained on prompts and
    completions, unless it has the usual name of a column of turns; else it has chats. Without a
    key, exactly one layout must have its first column among the columns.

    Raises:
        ConfigError: No such column, none at all, those of several layouts, or a column of turns
            beside others.
    """
    _refuse_beside_turns(source)
    keys = ("messages_column", "text_column")
    key = next((key for key in keys if getattr(source.columns, key, None)), None)
    column_names = split.rows.column_names
    if key is not None:
        name = named_column(source.columns, key, split)
        assert name is not None
        has_pairs = (
            layout_key is ChatLayout.prompt_completion
            or getattr(source.columns, "target_column", None) is not None
        )
        usual_turns = (*_COLUMNS[ChatLayout.messages], *_COLUMNS[ChatLayout.sharegpt])
        if has_pairs and key == "text_column" and name not in usual_turns:
            return _columns_of(split, ChatLayout.prompt_completion, (name,))
        return _columns_of(split, ChatLayout.messages, (name,))
    fitting = [
        layout
        for layout, names in _COLUMNS.items()
        if names[0] in column_names and layout_key in (None, layout)
    ]
    if len(fitting) == 1:
        return _columns_of(split, fitting[0], _COLUMNS[fitting[0]][:1])
    first_columns = ", ".join(
        names[0] for layout, names in _COLUMNS.items() if layout in (fitting or _COLUMNS)
    )
    problem = "the columns of several layouts" if fitting else "nothing to answer"
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

    Raises:
        Unreadable: There is no turn to answer, or a cell of another kind.
    """
    question = cells.get(columns.names[0])
    if columns.layout is ChatLayout.alpaca:
        chat = _read_alpaca((question, "-"), cells, _read_tools(cells.get(_TOOLS)), row)
        return Chat(chat.turns[:-1], None, chat.tools, row)
    if isinstance(question, str):
        return question
    turns = _read_turns(question, roles, "chat")
    if not turns:
        raise Unreadable("has no turn to answer.")
    turns = _with_system(turns, cells)
    prompt_turns = len(turns) if columns.layout is ChatLayout.prompt_completion else None
    turns = Chat(turns, prompt_turns, None, row).turns_before_answer()
    if not turns:
        raise Unreadable("begins with its only answer: there is nothing to answer.")
    return Chat(turns, None, _read_tools(cells.get(_TOOLS)), row)


def chat_texts(source: Source, split: Split) -> Iterator[str]:
    """Yield every text of the columns of chats, named or usual ones, to train a vocabulary.

    Raises:
        ConfigError: There is no such column.
    """
    column_names = set(split.rows.column_names)
    configured = [
        named_column(source.columns, key, split)
        for key in ("messages_column", "text_column", "target_column")
    ]
    usual = {
        name
        for layout, names in _COLUMNS.items()
        for name in (*names, *_MORE.get(layout, ()), _TOOLS)
    }
    names = sorted({name for name in configured if name is not None} | (usual & column_names))
    if not names:
        chat_columns(source, split, None)
    for batch in split.rows.select_columns(names).iter(batch_size=1000):
        for name in names:
            for value in batch[name]:
                yield from leaves(value)


def leaves(value: object) -> Iterator[str]:
    """Yield every text inside a cell, at any depth of lists and objects; their keys are none."""
    if isinstance(value, str):
        yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


class Unreadable(Exception):
    """An unreadable row; the message follows the number of the row in a sentence."""


def chat_of(
    cells: Cells, columns: ChatColumns, roles: frozenset[str], row: int | None
) -> Chat | Plain:
    """Read one row as a conversation, or as two texts.

    Args:
        cells: Its values by column; other columns are not read.
        columns: The columns of chats.
        roles: Roles that a turn may have.
        row: Its number; None: it is of a stream.

    Raises:
        Unreadable: It is no conversation.
    """
    layout = columns.layout
    values = tuple(cells.get(name) for name in columns.names)
    tools = _read_tools(cells.get(_TOOLS))
    refuse_unread(cells)
    if layout is not ChatLayout.alpaca:
        refuse_history(cells)
    if layout is ChatLayout.prompt_completion:
        prompt, completion = values
        name = columns.names[1]
        if isinstance(prompt, str) or isinstance(completion, str):
            if cells.get("system"):
                raise Unreadable(
                    "has a column system beside a prompt that is a text, and no template writes"
                    " both. Write prompt and completion as lists of turns, or join the texts."
                )
            return _read_plain(prompt, completion, name, row)
        turns = _read_turns(prompt, roles, "prompt")
        answer = _read_turns(completion, roles, name)
        if not answer:
            raise Unreadable(f"has an empty {name}: nothing to learn from it. Leave such rows out.")
        _expect_answers(answer, name)
        turns = _with_system(turns, cells)
        return Chat([*turns, *answer], len(turns), tools, row)
    if layout is ChatLayout.alpaca:
        return _read_alpaca(values, cells, tools, row)
    turns = _read_turns(values[0], roles, "chat")
    if not turns:
        raise Unreadable("has no turns at all. Leave such rows out.")
    _expect_answers(turns, "chat")
    return Chat(_with_system(turns, cells), None, tools, row)


def refuse_unread(cells: Cells) -> None:
    """Refuse values that change what should be learnt, and that nothing reads.

    Raises:
        Unreadable: `chat_template_kwargs` with a value, or `label: false`, an unwanted answer.
    """
    if _without_nulls(cells.get(_KWARGS)):
        raise Unreadable(
            f"has {cell_repr(cells[_KWARGS])} as {_KWARGS}, which are not read. Leave the column"
            " out, or set the values in a template of your own: task.chat_template=FILE.jinja."
        )
    if cells.get("label") in _UNWANTED:
        raise Unreadable(
            f"has label={cells['label']!r}, an answer that is not wanted (KTO), and every"
            " completion is learnt."
            " Leave such rows out, or write pairs of chosen and rejected for task=preference."
        )


def refuse_history(cells: Cells) -> None:
    """Refuse earlier turns in a column of their own, which only instructions have.

    Raises:
        Unreadable: There are some.
    """
    if cells.get(_HISTORY):
        raise Unreadable(
            f"has earlier turns in a column {_HISTORY}, which is read beside instruction and output"
            " alone. Write all turns into one list, or leave the column out."
        )


def _with_system(turns: list[Message], cells: Cells) -> list[Message]:
    """Put the text of a column `system` before the turns of a row.

    Raises:
        Unreadable: The turns have another one, or it is no text.
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


def _read_plain(prompt: object, completion: object, name: str, row: int | None) -> Plain:
    """Read two texts, of which the prompt may be missing; `name` is that of the completion."""
    for part_name, value in (("prompt", prompt), (name, completion)):
        if not isinstance(value, str | None):
            raise Unreadable(
                f"has a text and a list of turns: its {part_name} is {cell_repr(value)}. Write both"
                " alike."
            )
    completion = str(completion or "")
    if not completion.strip():
        raise Unreadable(f"has an empty {name}: nothing to learn from it. Leave such rows out.")
    return Plain(str(prompt or ""), completion, row)


def _read_alpaca(
    values: tuple[object, ...], more: Cells, tools: list[Message] | None, row: int | None
) -> Chat:
    """Make a chat of Alpaca's columns: instruction and input are the question, output the answer.

    Args:
        values: Instruction and output.
        more: The other cells, of which `input`, `history` and `system` are read.
        tools: Tools of the row.
        row: The number of the row, from 0; None: it is of a stream.

    Raises:
        Unreadable: One of them is no text, or the output is empty.
    """
    instruction, output = values
    if not isinstance(instruction, str) or not isinstance(output, str | None):
        raise Unreadable(
            f"has {cell_repr(values)} as instruction and output, where texts are expected."
        )
    if not (output or "").strip():
        raise Unreadable("has an empty output: nothing to learn from it. Leave such rows out.")
    question: Message = {"role": "user", "content": instruction}
    if more.get("input"):
        content = f"{instruction}\n\n{more['input']}"
        question |= {"content": content, "instruction": instruction, "input": more["input"]}
    prompt = _with_system([*_read_history(more.get("history")), question], more)
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
        turns.append({"role": "user", "content": pair[0]})
        turns.append({"role": ASSISTANT, "content": pair[1]})
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
    """Read one turn, of `role` and `content` or of ShareGPT's `from` and `value`.

    Its other keys stay, without nulls; the arguments of tool calls become objects.

    Args:
        value: The turn.
        number: Its number in the chat, from 1, for messages.
        roles: Roles that it may have.

    Raises:
        Unreadable: It is no turn, its role is unknown, its content is no text, it is an empty
            answer, or it says that it is not to be trained on.
    """
    if not isinstance(value, Mapping) or not ({"role", "from"} & set(value)):
        raise Unreadable(
            f'has no turn {number} as {{"role": ..., "content": ...}}: {cell_repr(value)}.'
        )
    turn: Message = _without_nulls(value)
    for key in _WHETHER_LEARNT:
        if turn.pop(key, 1) != 1:
            raise Unreadable(
                f"has {key}={value[key]!r} in turn {number}, and whether a turn is learnt is not"
                " read from rows. End the chat before it, or write it as prompt and completion, of"
                " which the completion alone is learnt."
            )
    if "tool_calls" in turn:
        turn["tool_calls"] = _read_tool_calls(turn["tool_calls"], number)
    if "role" in turn:
        role = turn.pop("role")
    else:
        speaker = str(turn.pop("from", None))
        if speaker not in _SHAREGPT and speaker not in roles:
            raise Unreadable(
                f"has an unknown speaker in turn {number}: {speaker!r}."
                f" {did_you_mean(speaker, [*_SHAREGPT, *roles])}"
            )
        role = _SHAREGPT.get(speaker, speaker)
        turn["content"] = turn.pop("value", "")
    if role not in roles:
        raise Unreadable(
            f"has an unknown role in turn {number}: {str(role)!r}. {did_you_mean(str(role), roles)}"
        )
    content = _join_content(turn.pop("content", ""), number)
    if role == ASSISTANT and not content.strip() and not turn.get("tool_calls"):
        raise Unreadable(
            f"has an empty answer in turn {number}: nothing to learn from it. Leave such rows out."
        )
    return {"role": role, "content": content, **turn}


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

    number: Of the turn, for messages.

    Raises:
        Unreadable: It holds something else.
    """
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise Unreadable(
                f"has something else than text in turn {number}: {cell_repr(content)}."
            )
        return "".join(texts)
    if not isinstance(content, str):
        raise Unreadable(
            f"has {cell_repr(content)} as the content of turn {number}, where a text is expected."
        )
    return content


def _expect_answers(turns: list[Message], part_name: str) -> None:
    """Raise `Unreadable` if no turn is the assistant's; `part_name` says which turns these are."""
    if not any(turn["role"] == ASSISTANT for turn in turns):
        have = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
        raise Unreadable(
            f"has no turn of the assistant in its {part_name}, only {have}: nothing to learn. Leave"
            " it out."
        )


def _read_tools(value: object) -> list[Message] | None:
    """Read a list of JSON schemas, or its JSON text; None: it is empty.

    Raises:
        Unreadable: It is something else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value.encode(), "tools") if value.strip() else None
        except ValueError:
            raise Unreadable(f"has tools that are no JSON: {cell_repr(value)}.") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Unreadable(
            f"has {cell_repr(value)} as tools, where a list of JSON schemas is expected."
        )
    return [_without_nulls(tool) for tool in value]


def _without_nulls(value: object) -> Any:
    """Return a cell without the keys of null, at any depth: Arrow adds the keys of other rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
