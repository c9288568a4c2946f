"""Fill the templates beside this file with text from untrusted files.

Names of runs, labels and messages come from outside. Every value is escaped by default, for HTML or
for Markdown; only what is `Markup` (inline pictures, tables, code blocks, made here) goes through
as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from optrun.base.formatting import plain
from optrun.report.table import escape_markdown, format_metric, to_markdown


def fill_html(template: str, /, **content: object) -> str:
    """Fill a template with values as HTML text."""
    page = _environment(plain, "optrun.report").get_template(template).render(**content)
    return page.strip() + "\n"


def fill_markdown(template: str, package: str = "optrun.report", /, **content: object) -> str:
    """Fill a template with values as Markdown text for GitHub and the hub.

    Args:
        template: Its file name.
        package: Package whose folder `templates` holds it.
        content: Values by name.
    """
    page = _environment(_markdown, package).get_template(template).render(**content)
    return page.strip() + "\n"


def fill_text(template: str, /, **content: object) -> str:
    """Fill a template with values as plain text on one line."""
    text = _environment(plain, "optrun.report").get_template(template).render(**content)
    return " ".join(html.unescape(text).split())


@cache
def _environment(finalize: Callable[[str], str], package: str) -> Environment:
    """Build a Jinja environment that applies `finalize`, then HTML escapes, to every value.

    `Markup` passes unchanged, because it was made here. An undefined name is an error.
    """
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else finalize(str(value)),
    )
    environment.filters |= {
        "metric": format_metric,
        "table": lambda table: Markup(to_markdown(table)),
        "fenced": _fenced,
        "code": _code,
    }
    return environment


def _markdown(text: str) -> Markup:
    return Markup(escape_markdown(text))


def _fenced(text: str, language: str = "sh") -> Markup:
    """Put printable text into a code block."""
    printable = "".join(
        letter if letter.isprintable() or letter == "\n" else "?" for letter in text
    )
    return Markup(code_block(printable, language))


def code_block(text: str, language: str) -> str:
    """Put text into a Markdown code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _code(text: str) -> Markup:
    """Put text between backticks."""
    return Markup("`" + plain(text).replace("`", "'") + "`")
