"""Find the commands of the documentation: fenced bash and console blocks of every page."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S
)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?([^\n]*)\n.*?^\1$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    body: str
    not_run: str
    """Why it takes too long, or needs too much, to be run; empty where it is run."""


@dataclass(frozen=True)
class Command:
    """One command of a block."""

    page: str
    line: int
    arguments: tuple[str, ...]
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.arguments)}"


def blocks(page: Path) -> list[Block]:
    """List the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(
            name,
            text[: found.start("body")].count("\n") + 1,
            found["language"],
            found["body"],
            found["why"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> list[Command]:
    """List the commands of a page's bash and console blocks, in order."""
    return [
        command
        for block in blocks(page)
        if block.language in SHELLS
        for command in commands_of(block)
    ]


SHELLS = ("bash", "console", "sh")


def commands_of(block: Block) -> list[Command]:
    """List the commands of a bash or console block, in order."""
    body = _HEREDOC.sub(r"\2", block.body).replace("\\\n", " ")
    lines = body.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        current: list[str] = []
        for token in [*lexer, ";"]:
            if token in (";", "&&", "||", "|", "&"):
                while current and re.fullmatch(
                    r"[A-Z_]+=.*", current[0]
                ):  # set for this command alone
                    current.pop(0)
                if current:
                    found.append(Command(block.page, block.line, tuple(current), block.not_run))
                current = []
            else:
                current.append(token)
    return found
