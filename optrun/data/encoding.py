"""The encoding of a text.

UTF-8, UTF-16 and UTF-32, else cp1252 or Latin-1 if its bytes look like such a language.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from optrun.base.errors import UnreadableFileError

UTF8 = "utf-8"
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_HEAD = 4096
_SHOWN = 60
"""Characters of a line in a message."""
_UNDEFINED = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
"""Bytes that cp1252 does not have, and that are control characters in Latin-1."""
_OF_UTF8 = re.compile(
    rb"([\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})+"
)
_STRANGE = re.compile(
    rb"[\x80-\xff]{3,}|[A-Za-z][\x80-\x83\x86-\x89\x8b\x95\x98\x99\x9b\xa1-\xa7\xa9\xab-\xb6\xb8\xb9\xbb-\xbf][a-z]"
)
"""Words of other scripts, and signs of cp1252 inside of a word.

Which are letters of other encodings.
"""
_LATIN = frozenset(b"\t\n\r") | frozenset(range(0x20, 0x7F))
_HIGH = re.compile(rb"[\x80-\xff]+")


class NotDecodableError(UnreadableFileError):
    """Some bytes are not of an encoding.

    Attributes:
        line: Where, from 1.
        raw: That line.
    """

    def __init__(self, line: int, raw: bytes, encoding: str) -> None:
        super().__init__(f"the bytes of line {line:,} are no {encoding.upper()}.")
        self.line, self.raw = line, raw


def wide(head: bytes) -> str | None:
    """Name the encoding of a text of two or four bytes a letter by its first bytes; None.

    It is none.
    """
    if marked := next((name for mark, name in _MARKS.items() if head.startswith(mark)), None):
        return marked
    for at, name in (
        (0, "utf-16be"),
        (1, "utf-16le"),
    ):  # without a mark: Latin letters have a zero byte each
        zeros, letters = head[at:_HEAD:2], head[1 - at : _HEAD : 2]
        shown = sum(byte in _LATIN for byte in letters)  # other bytes are of a file that is no text
        if (
            len(zeros) > 4
            and zeros.count(0) > 0.4 * len(zeros)
            and shown > 0.4 * len(zeros) > 4 * letters.count(0)
        ):
            return name
    return None


def recoded(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Yield a text as UTF-8, without a mark of its order.

    Raises:
        NotDecodableError: Bytes that are not of this encoding.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding == UTF8 else encoding)()
    line, first = 1, True
    for chunk in chain(chunks, [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raw, at = error.object, error.start
            raise NotDecodableError(
                line + raw[:at].count(b"\n"),
                raw[raw.rfind(b"\n", 0, at) + 1 :].split(b"\n")[0],
                encoding,
            ) from error
        line += text.count("\n")
        if encoding == UTF8:
            yield chunk.removeprefix(codecs.BOM_UTF8) if first else chunk
        elif text:
            yield text.encode(UTF8, "surrogatepass")
        first = False


def of_one_byte(chunks: Iterable[bytes], fault: NotDecodableError) -> tuple[str, str]:
    """Judge a text that is no UTF-8: is it cp1252 or Latin-1?

    Args:
        chunks: All of it.
        fault: Where UTF-8 ends.

    Returns:
        Its name, and a line of it for a person to judge by.

    Raises:
        UnreadableFileError: It is damaged UTF-8, or of another encoding, which nothing in it names.
    """
    utf8 = strange = groups = undefined = 0
    windows = False
    for chunk in chunks:
        high = _HIGH.findall(chunk)
        groups += len(high)
        utf8 += sum(_OF_UTF8.fullmatch(each) is not None for each in high)
        strange += len(_STRANGE.findall(chunk))
        undefined += len(_UNDEFINED.findall(chunk))
        windows = windows or any(min(each) < 0xA0 for each in high)
    name = "cp1252" if windows else "latin-1"
    shown = fault.raw.decode("cp1252", "replace").strip()[:_SHOWN]
    where = f"the bytes of line {fault.line:,} are no UTF-8"
    if 4 * utf8 > groups:
        raise UnreadableFileError(
            f"{where}, and those of other lines are: the file is damaged, or joined of several"
            f" encodings. In cp1252 that line is {shown!r}; data.encoding=cp1252 reads all of"
            " it so."
        )
    if undefined or 20 * strange > groups:
        raise UnreadableFileError(
            f"{where}, and in cp1252 they would be {shown!r}, which is no text. Name the encoding,"
            " such as data.encoding=cp1251 (Cyrillic), cp1250 (Central Europe), gb18030 (Chinese)"
            " or shift_jis (Japanese)."
        )
    return name, f"line {fault.line:,} is {shown!r}"
