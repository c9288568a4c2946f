"""Blocks of a stream of token ids in any number of mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import digest
from optrun.data.examples import Example
from optrun.data.spans import spans


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The ids of one file, mapped.

    Attributes:
        path: The file.
        ids: Shape (tokens,), an integer type.
        content: A digest of the ids.
        largest: The largest id; -1 where there is none.
        least: The smallest.
    """

    path: Path
    ids: np.ndarray
    content: str
    largest: int
    least: int


@dataclass(eq=False)
class TokenBlocks:
    """Blocks of a stream of tokens: the examples of `task=causal_lm`.

    Attributes:
        files: In the order of the stream.
        length: Tokens of a block.
        begin: First token of the stream that is taken.
        end: One past the last.
        left_out: Tokens at the end that fill no block.
    """

    files: Sequence[TokenFile]
    length: int
    begin: int
    end: int
    lost: ClassVar[None] = None
    hashes: ClassVar[None] = None

    def __post_init__(self) -> None:
        """Count the blocks."""
        self._ends = np.cumsum([len(file.ids) for file in self.files])
        self._count, self.left_out = divmod(max(0, self.end - self.begin), self.length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._count:
            raise IndexError(f"block {index} of {self._count}")
        at = self.begin + index * self.length
        parts = [
            self.files[number].ids[first:last]
            for number, first, last in spans(self._ends, at, at + self.length)
        ]
        return {"input_ids": np.concatenate(parts, dtype=np.int64, casting="unsafe")}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block; shape (blocks,), int64, in the memory of one number."""
        return np.broadcast_to(np.int64(self.length), (self._count,))

    def fingerprint(self) -> str:
        """Digest the tokens of all files and the borders of blocks, but not the paths of files."""
        return digest(
            "token blocks",
            *(file.content for file in self.files),
            f"{self.begin} {self.length} {len(self)}",
        )

    def expect_ids_below(self, size: int, key: str) -> None:
        """Refuse negative ids, and ids not below the size of a vocabulary.

        Args:
            size: Entries of the vocabulary.
            key: Key of the configuration that names the files, for the message.

        Raises:
            ConfigError: A file has such an id; the message names the first file.
        """
        for file in self.files:
            wrong = file.largest if file.largest >= size else file.least
            if not 0 <= wrong < size:
                raise ConfigError(
                    f"{key}={file.path}: it holds the token id {wrong:,}, and the tokenizer has"
                    f" {size:,} entries, from 0. It was written with another vocabulary (name its"
                    " tokenizer with model.tokenizer), or its ids are of another type"
                    " (data.dtype)."
                )
