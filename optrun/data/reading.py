"""What is asked of the reader of a format.

Files of one format, and how they were said to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optrun.data.cache import digest
from optrun.data.content import as_utf8, compression_of
from optrun.data.encoding import UTF8

_USUAL = (None, "gzip", "bz2", "xz")
"""How a file may be packed that every reader unpacks by itself."""


@dataclass(frozen=True)
class ReadOptions:
    """How files are read, as it was said; None: as it is found."""

    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    column_names: Sequence[str] | None = None


@dataclass
class Reading:
    """Files of one format to be read.

    Attributes:
        key: The configuration key, for messages.
        files: Not empty; or folders.
        encodings: Of each.
        contents: Digest of the bytes of each.
        documents: Whether a text file is one row.
        options: As they were said.
        notes: Takes what was found where nothing was said.
    """

    key: str
    files: list[Path]
    encodings: list[str]
    contents: list[str]
    documents: bool
    options: ReadOptions
    notes: list[str] = field(default_factory=list)

    @property
    def is_utf8(self) -> bool:
        """Whether every reader takes the files as they are."""
        return set(self.encodings) == {UTF8}

    def address(self, *parts: str) -> str:
        """Digest what decides the rows; of UTF-8 files it is that of older versions."""
        content = self.contents[0] if len(self.contents) == 1 else digest(*self.contents)
        return digest(*parts, content, *([] if self.is_utf8 else self.encodings))

    def in_utf8(self, folder: Path) -> list[Path]:
        """Write files that are no UTF-8, or oddly packed, as UTF-8 into a folder."""
        return [
            (
                path
                if encoding == UTF8 and compression_of(path) in _USUAL
                else as_utf8(path, encoding, folder)
            )
            for path, encoding in zip(self.files, self.encodings, strict=True)
        ]
