"""A text file of any size as one text, of which only the part that is looked at is in memory."""

from __future__ import annotations

import codecs
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optrun.base.reading import open_file
from optrun.data.cache import known_by
from optrun.data.parts import Recent, spans

LONG = 16 << 20
"""Bytes from which a text file is read in parts."""
_CHUNK = 1 << 20
_KEPT = 4
_NEAR = 1 << 16


@dataclass(eq=False, repr=False)
class LongText:
    """A part of a text file, read as Python reads one.

    UTF-8 without the mark of its order, with one kind of line end.

    Attributes:
        path: The file.
        content: A digest of its bytes, by which the text is known.
        places: Byte and character at which each chunk begins, and at which the last one ends.
        begin: First character of the part.
        end: One past the last.
    """

    path: Path
    content: str
    places: Sequence[Sequence[int]]
    begin: int
    end: int

    def __post_init__(self) -> None:
        """Note where chunks end."""
        self._ends = [character for _, character in self.places[1:]]
        self._recent: Recent[int, str] = Recent(_KEPT)

    def __len__(self) -> int:
        return self.end - self.begin

    def __repr__(self) -> str:
        return f"LongText({self.content}, {self.begin}, {self.end})"

    def __str__(self) -> str:
        return self[:]

    def __getitem__(self, part: slice) -> str:
        """Its characters."""
        begin, end, _ = part.indices(len(self))
        wanted = spans(self._ends, self.begin + begin, self.begin + end)
        return "".join(
            self._recent.read(number, partial(self._chunk, number))[first:last]
            for number, first, last in wanted
        )

    def _chunk(self, number: int) -> str:
        begin, end = self.places[number][0], self.places[number + 1][0]
        with open_file(self.path, follow=True) as file:
            file.seek(begin)
            return _decoded(file.read(end - begin))

    def rfind(self, wanted: str, begin: int, end: int) -> int:
        """Find the last place of one character in a part, as `str.rfind` gives it."""
        while begin < end:
            first = max(begin, end - _NEAR)
            found = self[first:end].rfind(wanted)
            if found >= 0:
                return first + found
            end = first
        return -1

    def cut(self, at: int) -> tuple[LongText, LongText]:
        """Cut into the part before a character, and the part from there on."""
        middle = self.begin + at
        return replace(self, end=middle), replace(self, begin=middle)


def long_text(path: Path, content: str) -> LongText:
    """Open a file as a text.

    Args:
        path: The file; UTF-8.
        content: A digest of its bytes.
    """
    places = known_by("characters-1", lambda: _places(path), path)
    return LongText(path, content, places, 0, places[-1][1])


def _places(path: Path) -> list[tuple[int, int]]:
    """Find byte and character at which each chunk begins.

    None begins inside of a character or of a line end.
    """
    found, byte, character = [], 0, 0
    with open_file(path, follow=True) as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            byte = len(codecs.BOM_UTF8)
        file.seek(byte)
        rest = b""
        while chunk := file.read(_CHUNK):
            raw = rest + chunk
            end = _clean_end(raw)
            found.append((byte, character))
            byte, character, rest = byte + end, character + len(_decoded(raw[:end])), raw[end:]
    found.append((byte, character))
    if rest:
        found.append((byte + len(rest), character + len(_decoded(rest))))
    return found


def _clean_end(raw: bytes) -> int:
    """Find where a chunk may end: behind a whole character that is no carriage return."""
    end = len(raw)
    while end and (raw[end - 1] & 0xC0 == 0x80):
        end -= 1
    if end and raw[end - 1] >= 0xC0:
        width = 2 + (raw[end - 1] >= 0xE0) + (raw[end - 1] >= 0xF0)
        end = len(raw) if end - 1 + width == len(raw) else end - 1
    while end and raw[end - 1] == ord("\r"):
        end -= 1
    return end


def _decoded(raw: bytes) -> str:
    return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8").read()
