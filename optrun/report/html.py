"""One self-contained page: works offline, asks for nothing, follows the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from optrun.formatting import plain
from optrun.report.tables import Table
from optrun.report.theme import DARK, LIGHT, css_variables

MARK = '<meta name="generator" content="optrun report">'
"""By this line an earlier report is told from a person's own file."""

_COLOURED = {"better": "better", "worse": "worse", "failed": "bad", "diverged": "bad"}
_FOLD = 40  # a longer table starts folded

_STYLE = """
:root { color-scheme: light dark; LIGHT --card: #f6f7f9; --soft: #eceff3; --accent: #0067a5; --warn: #b25e00;
  --warn-card: #fff6e8; --good: #0b7a54; --bad: #b3172b; }
@media (prefers-color-scheme: dark) { :root { DARK --card: #1d2127; --soft: #272c34; --accent: #58aef0;
  --warn: #f0b25a; --warn-card: #2b2417; --good: #4fd0a0; --bad: #ff7d88; } }
* { box-sizing: border-box; }
html { background: var(--paper); }
body { margin: 0 auto; padding: 3rem 1.5rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 .8rem; letter-spacing: -.01em; }
h3 { font-size: 1.02rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 48rem; }
.sub, figcaption, footer, .note { color: var(--muted); font-size: .88rem; }
.lead { font-size: 1.12rem; line-height: 1.5; margin: 1.4rem 0; padding: 1rem 1.2rem; background: var(--card);
  border-left: 4px solid var(--accent); border-radius: 0 8px 8px 0; max-width: none; overflow-wrap: anywhere; }
ul.warnings { list-style: none; margin: 0; padding: 0; display: grid; gap: .5rem; }
ul.warnings li { background: var(--warn-card); border-left: 4px solid var(--warn); border-radius: 0 8px 8px 0;
  padding: .55rem .9rem; font-size: .93rem; overflow-wrap: anywhere; }
ul.warnings b { color: var(--warn); font-weight: 650; margin-right: .5em; }
.scroll { overflow-x: auto; margin: .6rem 0; border: 1px solid var(--grid); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--muted); background: var(--card); white-space: nowrap; cursor: pointer;
  user-select: none; }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover td { background: var(--soft); }
td.n, th.n { text-align: right; } td.n { white-space: nowrap; }
td { max-width: 28rem; overflow-wrap: break-word; }
td:nth-child(2) { min-width: 7.5rem; } td:not(.n) { min-width: 6rem; }
tr.best td:nth-child(-n+2) { font-weight: 650; }
td.better { color: var(--good); font-weight: 600; } td.worse, td.bad { color: var(--bad); font-weight: 600; }
tr.muted td { color: var(--muted); }
table.facts th { cursor: default; white-space: nowrap; width: 12rem; text-align: left; }
.figures { display: grid; gap: 1.6rem; }
figure { margin: 0; padding: 1.1rem 1.2rem .9rem; border: 1px solid var(--grid); border-radius: 12px; }
figure svg { display: block; width: 100%; height: auto; margin: .3rem 0; }
figure svg text { font-family: inherit !important; }
figcaption { max-width: 52rem; }
.command { margin: .9rem 0; } .command h3 span { color: var(--muted); font-weight: 400; }
.shell { display: flex; gap: .6rem; align-items: flex-start; background: var(--card); border: 1px solid var(--grid);
  border-radius: 8px; padding: .55rem .6rem .55rem .9rem; }
.shell code { flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; }
code { font: .86rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
button { font: inherit; font-size: .78rem; color: var(--muted); background: none; border: 1px solid var(--grid);
  border-radius: 6px; padding: .1rem .6rem; cursor: pointer; } button:hover { color: var(--ink); }
details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--grid); }
@media (max-width: 40rem) { body { padding: 1.5rem .8rem 3rem; } figure { padding: .7rem .5rem; } }
@media print { body { max-width: none; padding: 0; } button { display: none; } figure, li { break-inside: avoid; } }
"""

_SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500);
});
const key = text => {
  const word = text.trim(), first = word.replace(/\\u2212/g, "-").replace(/[,\\u00d7\\u2265<#]/g, "").trim();
  const value = parseFloat(first); return isNaN(value) ? (word === "\\u2013" ? null : word.toLowerCase()) : value;
};
for (const head of document.querySelectorAll("table.sortable th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = [...body.rows].map(row => [key(row.cells[column].textContent), row]);
  order.sort(([a], [b]) => a === null ? 1 : b === null ? -1 : (down ? -1 : 1) *
    (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1));
  body.append(...order.map(([, row]) => row));
});
"""


@dataclass(frozen=True)
class Section:
    """One part of the page; `body` is markup made by the functions of this module."""

    title: str
    body: str


def page(*, title: str, subtitle: str, lead: str, sections: Sequence[Section], footer: str) -> str:
    """The whole document.

    Args:
        title: Heading and window title, plain text.
        subtitle: One line below it, plain text.
        lead: The finding in a few sentences, plain text.
        sections: Parts in order; one with an empty body is left out.
        footer: Plain text.

    Returns:
        HTML whose content policy forbids every request, to anywhere.
    """
    style = _STYLE.replace("LIGHT", css_variables(LIGHT)).replace("DARK", css_variables(DARK))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    parts = [f"<section><h2>{text(part.title)}</h2>\n{part.body}\n</section>" for part in sections if part.body]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            MARK,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{text(title)}</title><style>{style}</style></head><body>",
            f'<header><h1>{text(title)}</h1><p class="sub">{text(subtitle)}</p></header>',
            f'<p class="lead">{text(lead)}</p>' if lead else "",
            *parts,
            f"<footer>{text(footer)}</footer>",
            f"<script>{_SCRIPT}</script></body></html>",
            "",
        ]
    )


def text(content: str) -> str:
    """Plain text as markup."""
    return escape(plain(content), quote=True)


def table(content: Table, *, fold: str = "") -> str:
    """A table that can be sorted by clicking; a long one is folded under the words `fold`."""
    heads = "".join(
        f'<th{_side(numeric)} scope="col">{text(column)}</th>'
        for column, numeric in zip(content.columns, content.numeric, strict=True)
    )
    rows = []
    for cells, style in zip(content.rows, content.styles, strict=True):
        inner = "".join(
            f"<td{_side(numeric, cell)}>{text(cell)}</td>" for cell, numeric in zip(cells, content.numeric, strict=True)
        )
        rows.append(f'<tr class="{escape(style)}">{inner}</tr>' if style else f"<tr>{inner}</tr>")
    body = "\n".join(rows)
    made = (
        f'<div class="scroll"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
    if fold and len(content.rows) > _FOLD:
        return f"<details><summary>{text(fold)} ({len(content.rows):,})</summary>{made}</details>"
    return made


def facts(content: Table) -> str:
    """A table of names and values."""
    rows = "\n".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in content.rows
    )
    return f'<div class="scroll"><table class="facts"><tbody>\n{rows}\n</tbody></table></div>'


def warning_list(entries: Sequence[tuple[str, str]]) -> str:
    """Warnings as kind and sentence."""
    items = "\n".join(f"<li><b>{text(kind)}</b>{text(sentence)}</li>" for kind, sentence in entries)
    return f'<ul class="warnings">\n{items}\n</ul>' if items else ""


def figures(entries: Sequence[tuple[str, str, str]]) -> str:
    """Pictures as title, inline SVG (markup of our own), and caption."""
    made = "\n".join(
        f"<figure><h3>{text(title)}</h3>\n{svg}\n<figcaption>{text(caption)}</figcaption></figure>"
        for title, svg, caption in entries
    )
    return f'<div class="figures">\n{made}\n</div>' if made else ""


def commands(entries: Sequence[tuple[str, str, str]]) -> str:
    """Shell lines as name, what it is, and the line, each with a button that copies it."""
    return "\n".join(
        f'<div class="command"><h3>{text(name)} <span>{text(what)}</span></h3><div class="shell">'
        f'<code>{text(line)}</code><button class="copy" type="button">copy</button></div></div>'
        for name, what, line in entries
    )


def paragraphs(sentences: Sequence[str]) -> str:
    """Notes, one paragraph each."""
    return "\n".join(f'<p class="note">{text(sentence)}</p>' for sentence in sentences)


def _side(numeric: bool, cell: str = "") -> str:
    """Classes of a cell: numbers flush right, verdicts and bad ends in colour."""
    word = _COLOURED.get(cell, "")
    classes = " ".join(name for name in ("n" if numeric else "", word) if name)
    return f' class="{classes}"' if classes else ""
