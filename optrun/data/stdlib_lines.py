"""Labels that come from a rule, over logical lines of the standard library's source: no download.

`data=stdlib_tokens` names the kind of each token, `data=stdlib_statements` the keyword that a statement began with.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.config.schema.data import ColumnsConfig, StdlibStatementsConfig, StdlibTokensConfig
from optrun.data.source import Source
from optrun.data.stdlib import source_text, stdlib_source

if TYPE_CHECKING:
    from datasets import Dataset

_FILES = 60
_LONGEST = 32
"""Characters of a token; a docstring would fill the example by itself."""
_SHORTEST = 4
"""Tokens of a line."""
_PLAIN = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment", tokenize.OP: "operator"}
_STATEMENTS = frozenset(
    ("assert", "class", "def", "elif", "except", "for", "from", "if", "import", "raise", "return", "while", "with")
)

Line = list[tokenize.TokenInfo]
"""Tokens of a logical line, without line breaks and indentation."""


def load_stdlib_tokens(config: StdlibTokensConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read lines as tokens with their kinds; as `stdlib_source`."""
    columns = ColumnsConfig(name=config.name, text_column="tokens", label_column="labels")
    return stdlib_source(config, _token_rows, "lines of ", _FILES, columns)


def load_stdlib_statements(config: StdlibStatementsConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read statements without their keyword; as `stdlib_source`."""
    columns = ColumnsConfig(name=config.name, text_column="text", label_column="label")
    return stdlib_source(config, _statement_rows, "lines of ", _FILES, columns)


def _lines(paths: Sequence[Path]) -> Iterable[Line]:
    """List the lines of some files, each once: one that stands a hundred times would be learnt by heart."""
    return {tuple(token.string for token in line): line for path in paths for line in logical_lines(path)}.values()


def _token_rows(paths: Sequence[Path]) -> Dataset:
    import datasets

    texts = datasets.Sequence(datasets.Value("string"))
    lines = _lines(paths)
    columns = {
        "tokens": [[token.string for token in line] for line in lines],
        "labels": [kinds(line) for line in lines],
    }
    return datasets.Dataset.from_dict(columns, datasets.Features(tokens=texts, labels=texts))


def _statement_rows(paths: Sequence[Path]) -> Dataset:
    import datasets

    text = datasets.Value("string")
    found = [line for line in _lines(paths) if line[0].string in _STATEMENTS]
    columns = {
        "text": [" ".join(token.string for token in line[1:]) for line in found],
        "label": [line[0].string for line in found],
    }
    return datasets.Dataset.from_dict(columns, datasets.Features(text=text, label=text))


def logical_lines(path: Path) -> Iterator[Line]:
    """Yield the logical lines of a file that are no shorter and hold no longer token than an example should.

    A file that Python cannot read ends where it stops being Python.
    """
    line: Line = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source_text(path)).readline):
            if token.type == tokenize.NEWLINE:
                if len(line) >= _SHORTEST and all(len(each.string) <= _LONGEST for each in line):
                    yield line
                line = []
            elif token.string.strip():  # no indentation, no line break
                line.append(token)
    except (tokenize.TokenError, SyntaxError):
        return


def kinds(line: Line) -> list[str]:
    """Name the kind of each token of a line.

    Numbers, strings, comments, operators and keywords are known by what they are. Of the other names one after `def` or
    `class` is a definition, one before `(` a call, one after `.` an attribute: a model has to look around it.
    """
    before = ["", *(token.string for token in line)]
    after = [*(token.string for token in line[1:]), ""]
    found = []
    for token, left, right in zip(line, before, after, strict=False):
        if token.type != tokenize.NAME:
            found.append(_PLAIN.get(token.type, "other"))
        elif keyword.iskeyword(token.string):
            found.append("keyword")
        elif left in ("def", "class"):
            found.append("definition")
        elif right == "(":
            found.append("call")
        else:
            found.append("attribute" if left == "." else "name")
    return found
