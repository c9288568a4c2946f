"""Plot a line out of characters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rich.text import Text

from optrun.base.formatting import rate

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def line_plot(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    width: int,
    height: int,
    top: float,
    left_label: str,
    right_label: str,
) -> list[Text]:
    """Plot a line in braille: each character holds two by four dots.

    Args:
        xs: Rising.
        ys: Of each x, 0 or more.
        width: Characters in all, axis labels included.
        height: Rows of the plot itself.
        top: Value at the upper edge, above 0.
        left_label: Under the left end of the axis.
        right_label: Under its right end.

    Returns:
        `height` + 2 lines.
    """
    ticks = {
        0: rate(top),
        height // 2: rate(top * (1 - (height // 2) / (height - 1))),
        height - 1: "0",
    }
    margin = max(len(label) for label in ticks.values()) + 1
    columns = max(width - margin - 1, 10)
    cells = [[0] * columns for _ in range(height)]
    start = xs[0]
    end = max(xs[-1], start + 1)
    before: int | None = None
    for dot in range(2 * columns):
        y = _at(xs, ys, start + (end - start) * dot / (2 * columns - 1))
        row = round((1 - min(max(y / top, 0.0), 1.0)) * (4 * height - 1))
        low = row if before is None else min(row, before + 1)
        high = row if before is None else max(row, before - 1)
        for at in range(low, high + 1):
            cells[at // 4][dot // 2] |= _DOTS[at % 4][dot % 2]
        before = row
    lines = []
    for number, row_cells in enumerate(cells):
        text = Text(f"{ticks.get(number, ''):>{margin - 1}} ", style="dim", no_wrap=True)
        text.append("┤" if number in ticks else "│", style="dim")
        for cell in row_cells:
            text.append(chr(0x2800 + cell) if cell else " ", style="cyan" if cell else "")
        lines.append(text)
    lines.append(Text(f"{'':{margin}}└{'─' * columns}", style="dim", no_wrap=True))
    room = columns - len(left_label) - len(right_label)
    lines.append(
        Text(
            f"{'':{margin + 1}}{left_label}{'':{max(room, 1)}}{right_label}",
            style="dim",
            no_wrap=True,
        )
    )
    return lines


def _at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Look up the value at the last point up to x.

    A learning rate holds until the next step.
    """
    return ys[max(bisect_right(xs, x + 1e-9) - 1, 0)]
