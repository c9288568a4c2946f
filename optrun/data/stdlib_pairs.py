"""Summaries of functions of the standard library beside their code, without a download."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from optrun.config.schema.data import ColumnsConfig, StdlibPairsConfig
from optrun.data.source import Source
from optrun.data.stdlib import functions_of, stdlib_table

_MAX_FILES = 240
_SHORTEST_SUMMARY, _LONGEST_TEXT = 20, 400
"""Characters of a summary, and of its code."""


def load_stdlib_pairs(config: StdlibPairsConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read summaries of functions beside their code; `documents` makes no difference."""
    from datasets import Features, Value

    columns = ColumnsConfig(name=config.name, text_column="summary", text_pair_column="code")
    features = Features(summary=Value("string"), code=Value("string"))
    return stdlib_table(
        config, pairs_of, features, "functions of ", _MAX_FILES, columns, itemgetter("summary")
    )


def pairs_of(path: Path) -> Iterator[dict[str, str]]:
    """Yield the first paragraph of each docstring, and the code of its function."""
    for node, summary in functions_of(path):
        if len(node.body) > 1 and _SHORTEST_SUMMARY <= len(summary) <= _LONGEST_TEXT:
            code = (
                f"def {node.name}({ast.unparse(node.args)}):"
                f" {ast.unparse(ast.Module(node.body[1:], []))}"
            )
            yield {"summary": summary, "code": " ".join(code.split())[:_LONGEST_TEXT]}
