"""Measure the size of the package: `python -m tests.house`.

A code line has a token that is no docstring, comment or blank; tokens are Python's own, counted on
these lines. The text below an attribute is its docstring.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.test_architecture import PACKAGE, imports, room_of, trees

ROOT = PACKAGE.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
ANY = re.compile(r"\bAny\b")


def size(text: str, tree: ast.Module) -> tuple[int, int]:
    """Count code lines and tokens of a source text, parsed as well."""
    docs = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in docs:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(lines - docs), tokens


@cache
def sources() -> dict[Path, str]:
    """Read every file of the package."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def rooms() -> dict[str, tuple[int, int]]:
    """Count code lines and tokens of each room."""
    counts: dict[str, tuple[int, int]] = {}
    for path, text in sources().items():
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines, tokens = size(text, trees()[path])
        before = counts.get(name, (0, 0))
        counts[name] = (before[0] + lines, before[1] + tokens)
    return counts


def arrows() -> dict[str, set[str]]:
    """Map each room to the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for module, targets in imports().items():
        room = room_of(module)
        found.setdefault(room, set()).update({room_of(target) for target in targets} - {room})
    return found


def depth(graph: Mapping[str, set[str]]) -> int:
    """Count the nodes of the longest path of a graph without circles."""

    @cache
    def below(node: str) -> int:
        return 1 + max((below(target) for target in graph.get(node, ())), default=0)

    return max(map(below, graph))


def pages() -> list[Path]:
    """List the pages that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Print the measures."""
    counts = rooms()
    for room, (lines, tokens) in sorted(counts.items(), key=lambda item: -item[1][0]):
        print(f"{room:14} {lines:6,} lines {tokens:8,} tokens")
    lines, tokens = (sum(values) for values in zip(*counts.values(), strict=True))
    graph = arrows()
    print(f"\npackage: {lines:,} code lines, {tokens:,} tokens, {len(sources())} files")
    print(f"rooms {len(graph) - 1}, floors {depth(graph)}, arrows {sum(map(len, graph.values()))}")
    print(f"import depth {depth(imports())} files")
    print(f"Any: {sum(len(ANY.findall(text)) for text in sources().values()):,}")
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages())
    print(f"pages: {len(pages())}, {words:,} words")


if __name__ == "__main__":
    main()
