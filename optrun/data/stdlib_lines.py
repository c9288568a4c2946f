"""Labels by a rule, for logical lines of the source of the standard library.

`data=stdlib_tokens` names the kind of each token, `data=stdlib_statements` the keyword that a
statement began with.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterator
from pathlib import Path

from optrun.config.schema.data import ColumnsConfig, StdlibStatementsConfig, StdlibTokensConfig
from optrun.data.source import Source
from optrun.data.stdlib import source_text, stdlib_table

_MAX_FILES = 60
_LONGEST_TOKEN = 32
"""Characters of a token; a docstring would fill a whole example."""
_SHORTEST_LINE = 4
"""Tokens of a line."""
_KIND_OF_TYPE = {
    tokenize.NUMBER: "number",
    tokenize.STRING: "string",
    tokenize.COMMENT: "comment",
    tokenize.OP: "operator",
}
_STATEMENT_KEYWORDS = {
    "assert",
    "class",
    "def",
    "elif",
    "except",
    "for",
    "from",
    "if",
    "import",
    "raise",
    "return",
    "while",
    "with",
}

Line = list[tokenize.TokenInfo]
"""Tokens of a logical line, without line breaks and indentation."""


def load_stdlib_tokens(config: StdlibTokensConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read lines as lists of tokens with their kinds; `documents` makes no difference."""
    from datasets import Features, Sequence, Value

    columns = ColumnsConfig(name=config.name, text_column="tokens", label_column="labels")
    texts = Sequence(Value("string"))
    return stdlib_table(
        config, _tokens_of, Features(tokens=texts, labels=texts), "lines of ", _MAX_FILES, columns
    )


def _tokens_of(path: Path) -> Iterator[dict[str, list[str]]]:
    for line in logical_lines(path):
        yield {"tokens": [token.string for token in line], "labels": kinds(line)}


def load_stdlib_statements(config: StdlibStatementsConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read statements without their first keyword, which is the label; `documents` is ignored."""
    from datasets import Features, Value

    columns = ColumnsConfig(name=config.name, text_column="text", label_column="label")
    features = Features(text=Value("string"), label=Value("string"))
    return stdlib_table(config, _statements_of, features, "lines of ", _MAX_FILES, columns)


def _statements_of(path: Path) -> Iterator[dict[str, str]]:
    for first, *rest in logical_lines(path):
        if first.string in _STATEMENT_KEYWORDS:
            yield {"text": " ".join(token.string for token in rest), "label": first.string}


def logical_lines(path: Path) -> Iterator[Line]:
    """Yield the logical lines of a file; skip short lines and those with an overlong token.

    A logical line may go over several lines of the file, as inside of brackets. Short are lines of
    fewer than 4 tokens, overlong tokens of more than 32 characters.

    A file that Python cannot read ends where it stops being Python.
    """
    line: Line = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source_text(path)).readline):
            if token.type == tokenize.NEWLINE:
                if len(line) >= _SHORTEST_LINE and all(
                    len(part.string) <= _LONGEST_TOKEN for part in line
                ):
                    yield line
                line = []
            elif token.string.strip():  # no indentation, no line break
                line.append(token)
    except (tokenize.TokenError, SyntaxError):
        return


def kinds(line: Line) -> list[str]:
    """Name the kind of each token of a line.

    The kind of a name depends on its neighbours, so that a model has to look at them: behind `def`
    or `class` it is a definition, before `(` a call, behind `.` an attribute. The line
    `x = f(a.b)` has the kinds name, operator, call, operator, name, operator, attribute, operator.
    """
    before = ["", *(token.string for token in line)]
    after = [*(token.string for token in line[1:]), ""]
    kinds_of_tokens = []
    for token, previous, following in zip(line, before, after, strict=False):
        if token.type != tokenize.NAME:
            kinds_of_tokens.append(_KIND_OF_TYPE.get(token.type, "other"))
        elif keyword.iskeyword(token.string):
            kinds_of_tokens.append("keyword")
        elif previous in ("def", "class"):
            kinds_of_tokens.append("definition")
        elif following == "(":
            kinds_of_tokens.append("call")
        else:
            kinds_of_tokens.append("attribute" if previous == "." else "name")
    return kinds_of_tokens
