"""Rows of chats in their layouts."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.chat_tasks import ChatLayout
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.data.chat import (
    Chat,
    Plain,
    chat_columns,
    chat_texts,
    chats,
    question_columns,
    questions,
)
from optrun.data.columns import unread_columns
from optrun.data.source import Source, Split

USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


def source_of(*rows: dict[str, Any], **options: Any) -> Source:
    data: Any = choice("data", DATA, "files", {"train": "x", **options})
    return Source(Split(Dataset.from_list(list(rows)), "data.train"), {}, data)


def read(*rows: dict[str, Any], layout: ChatLayout | None = None, **options: Any) -> list[Any]:
    source = source_of(*rows, **options)
    return list(chats(source.train, chat_columns(source, source.train, layout)))


def test_turns_and_what_arrow_filled_in() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = '[{"type": "function", "function": {"name": "add"}}]'
    rows = read(
        {"messages": [USER, BOT], "tools": None},
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "2"},
                BOT,
            ],
            "tools": tool,
        },
    )
    assert rows[0] == Chat([USER, BOT], None, None, 0)
    parsed = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert rows[1].turns[1] == {"role": "assistant", "content": "", "tool_calls": [parsed]}
    assert rows[1].tools == [{"type": "function", "function": {"name": "add"}}]
    assert [row.row for row in rows] == [0, 1]
    assert repr(rows[0]) == repr(Chat([USER, BOT], None, None, 7)), (
        "where it stands is no part of it"
    )


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}
    )[0].turns[1] == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [USER], "completion": [BOT]}, {}),
        (
            {"question": [USER], "answer": [BOT]},
            {"text_column": "question", "target_column": "answer"},
        ),
        ({"instruction": "Hi", "output": "Ho"}, {}),
        (
            {"messages": "other", "instruction": "Hi", "output": "Ho", "input": ""},
            {"layout": ChatLayout.alpaca},
        ),
    ],
)
def test_prompt_and_completion(row: dict[str, Any], options: dict[str, Any]) -> None:
    assert read(row, **options) == [Chat([USER, BOT], 1, None, 0)]


def test_plain_texts() -> None:
    assert read({"prompt": "Hi", "completion": " Ho"}) == [Plain("Hi", " Ho", 0)]
    assert read({"q": None, "completion": "Ho"}, text_column="q", target_column="completion") == [
        Plain("", "Ho", 0)
    ]


def test_alpaca_with_input_and_system() -> None:
    (row,) = read({"instruction": "Add", "input": "1, 2", "output": "3", "system": "Be brief"})
    assert [turn["content"] for turn in row.turns] == ["Be brief", "Add\n\n1, 2", "3"]
    assert (row.prompt_turns, row.turns[1]["input"]) == (2, "1, 2")


@pytest.mark.parametrize("key", ["text_column", "messages_column"])
@pytest.mark.parametrize("name", ["conversations", "dialog"])
def test_sharegpt(name: str, key: str) -> None:
    said = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Ho"},
    ]
    options = {} if name == "conversations" else {key: name}
    (row,) = read({name: said}, **options)
    assert row.turns == [{"role": "system", "content": "S"}, USER, BOT]


def test_what_is_to_be_answered() -> None:
    def of(*turns: dict[str, str], given: int | None = None) -> Any:
        return Chat(list(turns), given, None, 0).turns_before_answer()

    assert of(USER, BOT, USER, BOT) == [USER, BOT, USER]
    assert of(USER, BOT, USER) == [USER, BOT, USER]
    assert of(USER, BOT, USER, BOT, given=1) == [USER]


def test_a_vocabulary_is_learnt_from_all_that_is_said() -> None:
    source = source_of({"messages": [USER, BOT], "other": "unsaid"})
    assert set(chat_texts(source, source.train)) == {"user", "Hi", "assistant", "Ho"}


@pytest.mark.parametrize(
    ("row", "options", "facts"),
    [
        (
            {"text": "a"},
            {},
            ["messages; prompt and completion; instruction and output; conv", "Columns: text"],
        ),
        (
            {"messages": [USER, BOT], "prompt": "a", "completion": "b"},
            {},
            ["several layouts", "task.layout"],
        ),
        (
            {"messages": [USER, BOT]},
            {"layout": ChatLayout.alpaca},
            ["task.layout=alpaca", "instruction and output"],
        ),
        (
            {"messages": [USER, BOT]},
            {"target_column": "messages"},
            ["data.text_column is needed", "prompt"],
        ),
        (
            {"a": [USER], "b": "c"},
            {"messages_column": "b", "text_column": "a"},
            ["messages_column=b", "text_column=a"],
        ),
        (
            {"chat": [USER]},
            {"messages_column": "chats"},
            ["data.messages_column=chats", "Did you mean chat?"],
        ),
        ({"messages": [USER]}, {}, ["row 1", "no turn of the assistant", "user"]),
        ({"messages": []}, {}, ["row 1", "no turns"]),
        ({"messages": ["a"]}, {}, ["row 1", "turn 1", "'a' (str)"]),
        ({"messages": "a"}, {}, ["row 1", "list of turns"]),
        (
            {"messages": [{"role": "asistant", "content": "a"}]},
            {},
            ["row 1", "'asistant'", "Did you mean assistant?"],
        ),
        (
            {"conversations": [{"from": "humn", "value": "a"}]},
            {},
            ["row 1", "'humn'", "Did you mean human?"],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": " "}]},
            {},
            ["row 1", "empty answer in turn 2"],
        ),
        ({"messages": [{"role": "assistant", "content": 3}]}, {}, ["row 1", "3 (int)", "turn 1"]),
        ({"prompt": "a", "completion": ""}, {}, ["row 1", "empty completion"]),
        (
            {"prompt": "a", "completion": " \n"},
            {},
            ["row 1", "has an empty completion: nothing to learn from it"],
        ),
        ({"prompt": "a", "completion": [BOT]}, {}, ["row 1", "a text and a list of turns"]),
        ({"prompt": [USER], "completion": []}, {}, ["row 1", "empty completion"]),
        (
            {"prompt": [USER], "completion": [USER]},
            {},
            ["row 1", "no turn of the assistant in its completion"],
        ),
        ({"instruction": "a", "output": ""}, {}, ["row 1", "empty output"]),
        ({"instruction": "a", "input": 3, "output": "b"}, {}, ["row 1", "input", "texts are"]),
        (
            {"instruction": "a", "output": "\t "},
            {},
            ["row 1", "has an empty output: nothing to learn from it"],
        ),
        ({"messages": [USER, BOT], "tools": "[{"}, {}, ["row 1", "is not JSON"]),
        ({"messages": [USER, BOT], "tools": [1]}, {}, ["row 1", "tools", "JSON schemas"]),
    ],
)
def test_what_cannot_be_read(
    row: dict[str, Any], options: dict[str, Any], facts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(row, **options)
    for fact in facts:
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, BOT, USER, BOT]}, [USER, BOT, USER]),
        ({"messages": [USER, BOT, USER]}, [USER, BOT, USER]),
        ({"prompt": [USER]}, [USER]),
        ({"prompt": [USER, BOT]}, [USER, BOT]),
        ({"instruction": "Hi", "other": 1}, [USER]),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, [USER]),
        ({"prompt": "Hi", "completion": None}, "Hi"),
    ],
)
def test_questions_need_no_answer(row: dict[str, Any], expected: Any) -> None:
    source = source_of(row)
    (asked,) = questions(source.train, question_columns(source, source.train, None))
    assert (asked if isinstance(asked, str) else asked.turns) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("question", [USER, BOT]), ("messages", [USER]), ("conversations", [USER])],
)
def test_a_named_column_is_read_as_in_training(name: str, expected: Any) -> None:
    """The names are those of a run on prompts and completions; whole chats are known by theirs."""
    source = source_of({name: [USER, BOT]}, text_column=name, target_column="answer")
    (asked,) = questions(source.train, question_columns(source, source.train, None))
    assert isinstance(asked, Chat)
    assert asked.turns == expected


def test_a_column_of_turns_is_asked_up_to_its_last_answer() -> None:
    source = source_of({"chat": [USER, BOT], "messages": "other"}, messages_column="chat")
    assert set(chat_texts(source, source.train)) == {"user", "Hi", "assistant", "Ho", "other"}
    for layout in (None, ChatLayout.prompt_completion):
        (asked,) = questions(source.train, question_columns(source, source.train, layout))
        assert isinstance(asked, Chat)
        assert asked.turns == [USER]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (
            {"text": "a"},
            [
                "none of the columns of questions",
                "messages, prompt, instruction, conversations",
                "data.messages_column",
            ],
        ),
        (
            {"messages": [USER], "prompt": "a"},
            ["several layouts", "messages, prompt", "data.text_column"],
        ),
        ({"messages": [BOT]}, ["row 1", "nothing to answer"]),
        ({"messages": []}, ["row 1", "no turn"]),
    ],
)
def test_what_cannot_be_answered(row: dict[str, Any], facts: list[str]) -> None:
    source = source_of(row)
    with pytest.raises(ConfigError) as refused:
        list(questions(source.train, question_columns(source, source.train, None)))
    for fact in facts:
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("labels", "is_read"),
    [
        ([True, True], True),
        (["true", None], True),
        ([1, 1], True),
        ([3, 0], True),  # a row of these is refused, as one of KTO
        (["maths", "code"], False),
        ([1, 3], False),
    ],
)
def test_a_label_of_something_else_than_wanted_answers_is_named(
    labels: list[object], is_read: bool
) -> None:
    source = source_of(*({"prompt": "a", "completion": "b", "label": label} for label in labels))
    assert ("label" in chat_columns(source, source.train, None).optional) is is_read
    sentence = "data.train: not read by task=sft: label"
    assert unread_columns(source, "sft") == ([] if is_read else [sentence])
