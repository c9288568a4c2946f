"""What functions of the standard library do, beside their code: no download."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from optrun.base.reading import read_text
from optrun.config.schema.data import ColumnsConfig, StdlibPairsConfig
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.stdlib import stdlib_files

_FILES = 240
_SHORTEST, _LONGEST = 20, 400
"""Characters of a summary, and of its code."""


def load_stdlib_pairs(config: StdlibPairsConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read summaries and code, from other files for training than for evaluation, the same ones for every seed.

    Raises:
        ConfigError: This Python has no source files.
    """
    import datasets

    files = stdlib_files()
    chosen = [files[index] for index in generator(0, "split").permutation(len(files))[:_FILES]]
    held = max(1, round(config.eval_fraction * len(chosen))) if config.eval_fraction else 0
    text = datasets.Value("string")

    def split(paths: Sequence[Path], key: str) -> Split:
        pairs = dict(pair for path in paths for pair in pairs_of(path))  # each summary once
        rows = {"summary": list(pairs), "code": list(pairs.values())}
        return Split(datasets.Dataset.from_dict(rows, datasets.Features(summary=text, code=text)), key)

    return Source(
        train=split(chosen[held:], "data=stdlib_pairs"),
        eval_sets={"": split(chosen[:held], "data=stdlib_pairs (held back)")},
        columns=ColumnsConfig(name=config.name, text_column="summary", text_pair_column="code"),
        cut_from_train=True,
        notes=[
            f"functions of {len(chosen) - held} files of the standard library to train on, of {held} others to "
            "evaluate on"
        ],
    )


def pairs_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first paragraph of each docstring of a file, and the code of its function without it."""
    try:
        tree = ast.parse(read_text(path, follow=True, errors="replace"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        code = " ".join(
            f"def {node.name}({ast.unparse(node.args)}): {ast.unparse(ast.Module(node.body[1:], []))}".split()
        )
        if _SHORTEST <= len(summary) <= _LONGEST:
            yield summary, code[:_LONGEST]
