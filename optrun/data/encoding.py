"""The encoding of a text: UTF-8, UTF-16 or UTF-32 by its mark, cp1252 if it reads as such."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from optrun.base.errors import UnreadableFileError

UTF8 = "utf-8"
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WESTERN = "cp1252"
_HEAD_BYTES = 1 << 12
"""Bytes of the beginning by which cp1252 is judged; behind them only lines beyond ASCII count."""
_SAMPLE_BYTES = 1 << 16
"""Bytes of the beginning and of these lines, at most."""
_MOST_CHAOS = 0.35
"""What charset-normalizer may find odd of a text; quotes around one word are a third."""
_DOUBTFUL_LETTERS = re.compile("[ÐÝÞðýþ]|[^\\W\\d_][¡¢£¤¥¹³¼¾¿][^\\W\\d_]")
"""What bytes of cp1254 (Turkish) and cp1250 (Central Europe) are as cp1252: letters of Icelandic,
and signs inside of words.
"""
_SHOWN_CHARACTERS = 60
"""Characters of a line in a message."""


class TextEncoding(NamedTuple):
    """How a text is decoded."""

    name: str
    """As `codecs` knows it."""
    sample: str
    """A line with characters beyond ASCII, by which a person can check a guess; else empty."""


class NotDecodableError(UnreadableFileError):
    """Some bytes are not of an encoding.

    Attributes:
        line: The number of the line, from 1.
        raw: The bytes of that line.
    """

    def __init__(self, line: int, raw: bytes, encoding: str) -> None:
        super().__init__(f"the bytes of line {line:,} are no {encoding.upper()}.")
        self.line = line
        self.raw = raw


def find_encoding(
    chunks: Callable[[], Iterable[bytes]],
    encoding: str | None,
    check: Callable[[Iterator[bytes]], object],
) -> TextEncoding:
    """Find the encoding of a text by decoding all of it.

    Args:
        chunks: Gives the bytes of the text anew at each call.
        encoding: `data.encoding`; None: the one of its byte order mark, else UTF-8, else cp1252 if
            charset-normalizer finds that plausible.
        check: Called with the whole text as UTF-8, which it must read; its errors are passed on.

    Returns:
        The name of the encoding, and a line to check it by if it is a guess.

    Raises:
        UnreadableFileError: It is another encoding, or damaged.
    """
    # 1. The named encoding, else the one of the mark, else UTF-8.
    name = encoding
    if name is None:
        head = next(iter(chunks()), b"")
        name = next((name for mark, name in _BYTE_ORDER_MARKS if head.startswith(mark)), UTF8)
    try:
        check(recode_to_utf8(chunks(), name))  # decodes as it is read
        return TextEncoding(name, "")
    except NotDecodableError as error:
        if encoding is not None:
            raise UnreadableFileError(f"data.encoding={encoding}: {error}") from error
        if name != UTF8:
            raise
        # 2. cp1252, which decodes all bytes but five, if it is plausible; else this raises.
        sample = _quote_line_if_western(chunks(), error)
        check(recode_to_utf8(chunks(), _WESTERN))
        return TextEncoding(_WESTERN, sample)


def recode_to_utf8(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a text as UTF-8, without a byte order mark, one piece for each chunk with characters.

    A character may be split between two chunks: the decoder keeps its first bytes for the next one.

    Raises:
        NotDecodableError: Some bytes are not of this encoding; the error has their line.
    """
    name = "utf-8-sig" if encoding == UTF8 else encoding
    decoder = codecs.getincrementaldecoder(name)()
    # 1 + the line breaks decoded so far: the line of the first byte that is not decoded yet. The
    # bytes that the decoder keeps are not decoded, so they are never counted twice.
    line = 1
    for chunk in chain(chunks, [b""]):  # the empty one ends the text
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            # error.object has all bytes not decoded yet: those kept, then this chunk. The line is
            # quoted from there on, without what earlier chunks had of it.
            before = error.object[: error.start]
            line += before.count(b"\n")
            line_begin = before.rfind(b"\n") + 1
            raw_line = error.object[line_begin:].split(b"\n")[0]
            raise NotDecodableError(line, raw_line, encoding) from error
        line += text.count("\n")
        if text:
            yield text.encode(UTF8, "surrogatepass")


def zero_bytes_error(line: int) -> UnreadableFileError:
    """Build the refusal of a text with zero bytes."""
    return UnreadableFileError(
        f"line {line:,} holds zero bytes, as a binary or a damaged file does. If it is UTF-16"
        " without a mark, say so: data.encoding=utf-16-le."
    )


def _quote_line_if_western(chunks: Iterable[bytes], fault: NotDecodableError) -> str:
    """Quote a line of a text as cp1252, for a person to check this guess; refuse other texts.

    The guess is made if charset-normalizer finds cp1252 possible, not only if it is its best one:
    it prefers cp1250 for short texts ("naďve" for "naïve"). Turkish looks as possible to it in
    cp1252 as in cp1254, so a text with letters that differ there is refused.

    Args:
        chunks: The bytes of the text. 64 KiB are judged: its first 4 KiB, and then the lines with
            bytes beyond ASCII.
        fault: Has the number and the bytes of the first line that is not UTF-8.

    Returns:
        A clause such as `line 3 is 'naïve'`.

    Raises:
        UnreadableFileError: The text is in another encoding or damaged, or has bytes of 0.
    """
    from charset_normalizer import from_bytes

    # 1. The part of the text that is judged.
    text = b"".join(chunks)
    lines = text[_HEAD_BYTES:].splitlines(keepends=True)
    beyond_ascii = b"".join(line for line in lines if not line.isascii())
    sample = text[:_HEAD_BYTES] + beyond_ascii
    sample = sample[:_SAMPLE_BYTES]
    if b"\x00" in sample:
        raise zero_bytes_error(fault.line)
    # 2. Whether it may be cp1252, and has no letters that are doubtful there.
    line = fault.raw.decode(_WESTERN, "replace").strip()[:_SHOWN_CHARACTERS]
    matches = from_bytes(sample, threshold=_MOST_CHAOS)
    is_possible = any(_WESTERN in match.could_be_from_charset for match in matches)
    if is_possible and not _DOUBTFUL_LETTERS.search(sample.decode(_WESTERN, "replace")):
        return f"line {fault.line:,} is {line!r}"
    raise UnreadableFileError(
        f"the bytes of line {fault.line:,} are not UTF-8; as cp1252 it would be {line!r}. If"
        " the file is not damaged, name its encoding: data.encoding=cp1251 (Cyrillic), cp1250"
        " (Central Europe), cp1252 (Western Europe), cp1254 (Turkish), gb18030 (Chinese) or"
        " shift_jis (Japanese)."
    )
