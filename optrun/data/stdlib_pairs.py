"""What functions of the standard library do, beside their code: no download."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.config.schema.data import ColumnsConfig, StdlibPairsConfig
from optrun.data.source import Source
from optrun.data.stdlib import functions_of, stdlib_source

if TYPE_CHECKING:
    from datasets import Dataset

_FILES = 240
_SHORTEST, _LONGEST = 20, 400
"""Characters of a summary, and of its code."""


def load_stdlib_pairs(config: StdlibPairsConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read summaries and code; as `stdlib_source`."""
    columns = ColumnsConfig(name=config.name, text_column="summary", text_pair_column="code")
    return stdlib_source(config, _rows, "functions of ", _FILES, columns)


def _rows(paths: list[Path]) -> Dataset:
    import datasets

    text = datasets.Value("string")
    pairs = dict(pair for path in paths for pair in pairs_of(path))  # each summary once
    rows = {"summary": list(pairs), "code": list(pairs.values())}
    return datasets.Dataset.from_dict(rows, datasets.Features(summary=text, code=text))


def pairs_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first paragraph of each docstring of a file, and the code of its function without it."""
    for node, summary in functions_of(path):
        if len(node.body) > 1 and _SHORTEST <= len(summary) <= _LONGEST:
            code = f"def {node.name}({ast.unparse(node.args)}): {ast.unparse(ast.Module(node.body[1:], []))}"
            yield summary, " ".join(code.split())[:_LONGEST]
