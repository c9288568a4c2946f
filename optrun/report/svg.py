"""Write a figure as an inline `<svg>` element that follows the reader's colours, with values to point at."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from optrun.report.theme import DARK, LIGHT, PAGE, Chart, Mark, any_letters, css_variables, variables


def to_svg(figure: Figure, *, name: str, label: str) -> str:
    """Render the figure as an inline `<svg>` element that asks for nothing outside itself.

    Args:
        figure: Drawn with the theme `PAGE`. The marks of a `Chart` become circles with a `<title>`, which a browser
            shows on hover without any script.
        name: Unique in the page; keeps the ids of several pictures apart.
        label: What a screen reader says.

    Returns:
        One `<svg>` element: text stays text, colours are CSS variables, size follows the page. What belongs to
        contender 3 has the class `s3`, its entry in the legend `k3`, what shows on hover alone `h3`.
    """
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), any_letters(figure):
        figure.set_facecolor("none")
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # `savefig` draws twice
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="([skh])-(\d+)"', r'<g class="\1\2"', text)  # of a group's id what is ours
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for variable, colour in variables(PAGE).items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()
    return text.removesuffix("</svg>") + _circles(figure.marks if isinstance(figure, Chart) else ()) + "</svg>"


def standalone_svg(figure: Figure, *, name: str, label: str) -> str:
    """Render the figure as a file of its own, light or dark as the reader's screen is.

    Args:
        figure: Drawn with the theme `PAGE`.
        name: Keeps the ids of several pictures apart.
        label: What a screen reader says.
    """
    style = (
        f"<style>:root {{ {css_variables(LIGHT)} }} svg {{ background: var(--paper); }} "
        f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}</style>"
    )
    head, _, body = to_svg(figure, name=name, label=label).partition(">")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>{style}{body}\n'


def _circles(marks: Iterable[Mark]) -> str:
    """Write marks that lie inside their axes, where the last layout has put them."""
    found = []
    for mark in marks:
        figure = mark.axes.get_figure(root=True)
        x, y = mark.transform.transform((mark.x, mark.y))
        if figure is None or not mark.shown or not mark.axes.bbox.padded(2).contains(x, y):
            continue
        points = 72 / figure.dpi
        series = "" if mark.series is None else f" s{mark.series}"
        at = f'cx="{x * points:.1f}" cy="{(figure.bbox.height - y) * points:.1f}"'
        found.append(f'<circle class="m{series}" {at} r="6"><title>{html.escape(mark.text)}</title></circle>\n')
    return "".join(found)
