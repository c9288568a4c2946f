"""What the documentation says of tests is true: they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]


def test_every_test_that_is_named_exists() -> None:
    named = {
        (match[1], match[2])
        for page in PAGES
        for match in re.finditer(r"(tests/[\w/.-]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 80
    known: dict[str, set[str]] = {}
    for path in sorted({path for path, _ in named}):
        assert (ROOT / path).is_file(), path
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        known[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert sorted(f"{path}::{name}" for path, name in named if name not in known[path]) == []


def test_every_fault_table_has_whole_rows() -> None:
    """As many cells in each row as in the head: a pipe in a cell would shift what is claimed beside what is proved."""
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and "::" in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            assert "::" in cells[2], line
