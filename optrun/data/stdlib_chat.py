"""Questions about functions of the standard library, answered from their docstrings.

What a function does has to be known; the other answers stand in the question, where a small model
learns to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from optrun.config.schema.data import DataConfig, StdlibChatConfig, StdlibPreferencesConfig
from optrun.data.source import Source
from optrun.data.stdlib import Function, functions_of, stdlib_table

_MAX_FILES = 120
_LONGEST_TEXT = 90
"""Characters of a signature and of a summary."""
_SYSTEM_TEXT = "You answer questions about Python in one sentence."
_NOT_PARAMETERS = ("self", "cls")

Turns = list[dict[str, str]]


def load_stdlib_chat(config: StdlibChatConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read chats about functions; `documents` makes no difference."""
    return _load(
        config, "chats", lambda path: ({"messages": chat} for chat in chats_of(path)), "messages"
    )


def load_stdlib_preferences(config: StdlibPreferencesConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read pairs of answers, the right one chosen; `documents` makes no difference."""
    return _load(config, "pairs of answers", pairs_of, "prompt", "chosen", "rejected")


def _load(
    config: DataConfig,
    what: str,
    read: Callable[[Path], Iterable[Mapping[str, Turns]]],
    *columns: str,
) -> Source:
    from datasets import Features, List, Value

    turns = List({"role": Value("string"), "content": Value("string")})
    features = Features(dict.fromkeys(columns, turns))
    return stdlib_table(config, read, features, f"{what} about functions of ", _MAX_FILES)


def pairs_of(path: Path) -> Iterator[dict[str, Turns]]:
    """Yield the last answer of each chat as chosen, one about another function as rejected.

    The rejected answer is that of the next chat of the file whose last question has the same first
    two words: it sounds alike and is wrong. Behind the last chat comes the first. A chat without
    such another one is skipped.
    """
    chats = list(chats_of(path))
    for number, chat in enumerate(chats):
        question, answer = chat[-2:]
        other_chats = chats[number + 1 :] + chats[:number]
        for other_chat in other_chats:
            other_question, other_answer = other_chat[-2:]
            is_same_kind = _first_words(other_question) == _first_words(question)
            if is_same_kind and other_answer != answer:
                yield {"prompt": chat[:-1], "chosen": [answer], "rejected": [other_answer]}
                break


def _first_words(turn: Mapping[str, str]) -> list[str]:
    """Return the first two words of a turn: the kind of a question."""
    return turn["content"].split()[:2]


def chats_of(path: Path) -> Iterator[Turns]:
    """Yield a chat about each function of a file that has parameters and a short signature.

    The questions ask what the function does if it has a short docstring, else for its parameters;
    the position of the function in the file decides which ones, and whether there is a system turn.
    """
    for number, (node, summary) in enumerate(functions_of(path)):
        names = [name for name in _parameters(node) if name not in _NOT_PARAMETERS]
        signature = f"{node.name}({', '.join(names)})"
        if not names or len(signature) > _LONGEST_TEXT:
            continue
        chat = [{"role": "system", "content": _SYSTEM_TEXT}] if number % 3 == 0 else []
        if 10 <= len(summary) <= _LONGEST_TEXT:
            chat += _make_chat(f"What does {signature} do?", summary)
            chat += _make_chat("Which parameters does it take?", f"{_join_names(names)}.")
        elif number % 2:
            chat += _make_chat(f"Which parameters does {signature} take?", f"{_join_names(names)}.")
            chat += _make_chat("How many are they?", f"{len(names)}.")
        else:
            chat += _make_chat(f"What is the first parameter of {signature}?", f"{names[0]}.")
            chat += _make_chat("And the last?", f"{names[-1]}.")
        yield chat


def _make_chat(question: str, answer: str) -> Turns:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _parameters(node: Function) -> list[str]:
    arguments = node.args
    return [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]


def _join_names(names: Sequence[str]) -> str:
    """Name several, such as `a, b and c`."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
