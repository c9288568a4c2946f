"""The figures that docs/distributed.md promises, read from its tables.

What is tested is what is written.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def promised(first: str, column: str) -> dict[str, float]:
    """Read a column of the table whose header has it, by the names between backticks in the
    first column.

    Args:
        first: In the header of the first column.
        column: The whole header of the column. The number at the beginning of a cell counts; rows
            without one are left out.
    """
    found: dict[str, float] = {}
    place = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            place = None
        elif first in cells[0] and column in cells:
            place = cells.index(column)
        elif place is not None and not set(line) <= set("|- "):
            number = re.match(r"[0-9.]+(e-?[0-9]+)?", cells[place])
            if number:
                found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), float(number[0]))
    assert found, f"no table with {first} and {column}"
    return found
