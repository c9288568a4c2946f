"""Plot a curve with block characters in a terminal."""

from bisect import bisect_right
from collections.abc import Sequence

from rich.text import Text

from optrun.base.formatting import rate

_BLOCKS = " ▁▂▃▄▅▆▇█"


def area_plot(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    width: int,
    height: int,
    top: float,
    left_label: str,
    right_label: str,
) -> list[Text]:
    """Plot the area below a curve; each character is filled by eighths.

    Args:
        xs: Rising x values.
        ys: The y value of each x, at least 0.
        width: Characters in all, axis labels included.
        height: Rows of the plot itself.
        top: Value at the upper edge, above 0.
        left_label: Text under the left end of the axis.
        right_label: Text under the right end of the axis.

    Returns:
        `height` + 2 lines.

    Example: xs 0 to 9, ys 1 to 10, `top=10.0`, `height=2`, 10 columns, without labels:

             ▂▃▅▆█
        ▂▃▅▆██████
    """
    # 1. The value of each column, and how much of it is filled from the bottom, in eighths of a
    # character. The label of the top, a space and the axis come before the columns.
    top_label = rate(top)
    margin = len(top_label) + 1
    columns = max(width - margin - 1, 10)
    x_per_column = max(xs[-1] - xs[0], 1) / (columns - 1)
    values = [_value_at(xs, ys, xs[0] + x_per_column * column) for column in range(columns)]
    eighths = [round(8 * height * min(value / top, 1.0)) for value in values]

    # 2. The rows, from the top; `below` is what fits under a row, 8 eighths for each row there. A
    # cell gets what is filled above that, from nothing to a full block. The first and the last row
    # are labelled.
    lines = []
    for row in range(height):
        below = 8 * (height - 1 - row)
        cells = "".join(_BLOCKS[min(max(filled - below, 0), 8)] for filled in eighths)
        row_label = {0: top_label, height - 1: "0"}.get(row, "")
        lines.append(Text.assemble((f"{row_label:>{margin - 1}} │", "dim"), (cells, "cyan")))

    # 3. The axis, and the labels of its ends.
    lines.append(Text(f"{'':{margin}}└{'─' * columns}", style="dim"))
    labels = left_label + right_label.rjust(columns - len(left_label))
    lines.append(Text(f"{'':{margin + 1}}{labels}", style="dim"))
    return lines


def _value_at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y of the last of xs up to `x`: a learning rate holds until the next step.

    1e-9 allows for rounding.
    """
    return ys[max(bisect_right(xs, x + 1e-9) - 1, 0)]
