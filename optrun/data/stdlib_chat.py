"""Questions about functions of the standard library, answered by a rule from signature and docstring: no download.

What a function does has to be known; the other answers stand in the question, where a small model learns to find them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.config.schema.data import StdlibChatConfig
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.stdlib import stdlib_files

_FILES = 120
"""Files that are read; all of them would take seconds at the begin of every run."""
_LONGEST = 90
"""Characters of a signature and of a summary."""
_SYSTEM = "You answer questions about Python in one sentence."
_NOT_PARAMETERS = ("self", "cls")

Turns = list[dict[str, str]]


def load_stdlib_chat(config: StdlibChatConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read chats, from other files for training than for evaluation, the same ones for every seed.

    Raises:
        ConfigError: This Python has no source files.
    """
    import datasets

    files = stdlib_files()
    picked = [files[index] for index in generator(0, "split").permutation(len(files))[:_FILES]]
    held = max(1, round(config.eval_fraction * len(picked))) if config.eval_fraction else 0
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features(messages=datasets.List(turn))

    def split(paths: Sequence[Path], key: str) -> Split:
        rows = {str(chat): chat for path in paths for chat in chats_of(path)}  # each once
        return Split(datasets.Dataset.from_dict({"messages": list(rows.values())}, features), key)

    train = split(picked[held:], "data=stdlib_chat")
    if not len(train.rows):
        raise ConfigError("data=stdlib_chat: no function of the standard library has a docstring here.")
    return Source(
        train=train,
        eval_sets={"": split(picked[:held], "data=stdlib_chat (held back)")},
        columns=None,
        cut_from_train=True,
        notes=[
            f"chats about functions of {len(picked) - held} files of the standard library to train on, of {held} "
            "others to evaluate on"
        ],
    )


def chats_of(path: Path) -> Iterator[Turns]:
    """Yield a chat about each function of a file that has parameters.

    What is asked depends on the place of the function in its file, and what it does only where a docstring says it.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for number, node in enumerate(functions):
        names = [name for name in _parameters(node) if name not in _NOT_PARAMETERS]
        signature = f"{node.name}({', '.join(names)})"
        if not names or len(signature) > _LONGEST:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        chat = [{"role": "system", "content": _SYSTEM}] if number % 3 == 0 else []
        if 10 <= len(summary) <= _LONGEST:
            chat += _asked(f"What does {signature} do?", summary)
            chat += _asked("Which parameters does it take?", f"{_joined(names)}.")
        elif number % 2:
            chat += _asked(f"Which parameters does {signature} take?", f"{_joined(names)}.")
            chat += _asked("How many are they?", f"{len(names)}.")
        else:
            chat += _asked(f"What is the first parameter of {signature}?", f"{names[0]}.")
            chat += _asked("And the last?", f"{names[-1]}.")
        yield chat


def _asked(question: str, answer: str) -> Turns:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = node.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _joined(names: Sequence[str]) -> str:
    """Name several, such as `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
