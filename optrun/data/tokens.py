"""Token ids in files of nanoGPT and Megatron, mapped from disk as one stream.

    nanoGPT   NAME.bin           ids of 16 bits, nothing else
    Megatron  NAME.bin NAME.idx  the ids; their type, and the length of each document

The documents of all files, in their order, are one stream, which is cut into blocks. Nothing of it
is in memory but the block that is read. Sources: karpathy/nanoGPT, data/openwebtext/prepare.py;
NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from optrun.base.errors import ConfigError
from optrun.base.reading import open_file
from optrun.config.schema.data import TokensConfig, eval_key
from optrun.data.cache import cached_result
from optrun.data.files import Paths, resolve
from optrun.data.source import NO_SPLIT, Source, Split
from optrun.data.token_blocks import TokenBlocks, TokenFile

_LLM_C_BEGINNING = struct.pack("<i", 20240520)
"""First bytes of a file of llm.c, which is not read."""
_INDEX_BEGINNING = b"MMIDIDX\x00\x00"
_INDEX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_IDS_AT_ONCE = 1 << 22


def load_tokens(config: TokensConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Map the files of `data.train` and `data.eval`, cut into blocks of `data.max_length` tokens.

    Without `data.eval` the last blocks of the training stream are held out: the share
    `data.eval_fraction`, at least one block. Notes say so, and which tokens fill no block.

    Args:
        config: The data choice.
        documents: Makes no difference.

    Raises:
        ConfigError: A file is missing, cut short or of another format, or a stream is shorter than
            a block.
    """
    train_files = _open_token_files("data.train", config.train, config)
    total = _count_tokens(train_files)
    notes: list[str] = []
    # 1. Evaluation sets from files of their own.
    eval_sets = {}
    for name, paths in config.eval_files():
        key = eval_key(name)
        files = _open_token_files(key, paths, config)
        eval_sets[name] = _make_split(files, config, key, 0, _count_tokens(files))
    # 2. Without such files: the end of the training stream.
    train_end = total  # one past the last token to train on
    if not eval_sets and config.eval_fraction:
        held_blocks = max(1, round(config.eval_fraction * total / config.max_length))
        train_end = max(0, total - held_blocks * config.max_length)
        key = "data.train (held out)"
        eval_sets[""] = _make_split(train_files, config, key, train_end, total)
        notes.append(f"{NO_SPLIT}: the last {total - train_end:,} tokens of data.train held out")
    elif not eval_sets:
        # From the end up to the end.
        no_blocks: Any = TokenBlocks(train_files, config.max_length, total, total)
        eval_sets[""] = Split(no_blocks, "data.train (held out)")
        notes.append("data.eval_fraction=0: trained on all tokens, evaluated on none")
    # 3. The rest is trained on.
    train = _make_split(train_files, config, "data.train", 0, train_end)
    for split in (train, *eval_sets.values()):
        blocks: Any = split.rows
        if blocks.left_out:
            notes.append(
                f"{split.key}: its last {blocks.left_out:,} tokens fill no block, and are left out"
            )
    return Source(train, eval_sets, columns=None, cut_from_train=config.eval is None, notes=notes)


def _open_token_files(key: str, paths: Paths, config: TokensConfig) -> list[TokenFile]:
    """Map all files of a configuration key, in order; as `_open_token_file`."""
    return [_open_token_file(key, path, config) for path in resolve(key, paths)]


def _count_tokens(files: Sequence[TokenFile]) -> int:
    """Count the tokens of all files together."""
    return sum(len(file.ids) for file in files)


def _make_split(
    files: Sequence[TokenFile], config: TokensConfig, key: str, begin: int, end: int
) -> Split:
    """Make a split of the blocks from token `begin` up to `end` of the stream of some files.

    Raises:
        ConfigError: The tokens do not fill a block.
    """
    blocks: Any = TokenBlocks(files, config.max_length, begin, end)
    if not len(blocks):
        raise ConfigError(
            f"{key}: {end - begin:,} tokens do not fill one block of"
            f" data.max_length={config.max_length}. Give more, or take shorter blocks."
        )
    return Split(blocks, key)


def _open_token_file(key: str, path: Path, config: TokensConfig) -> TokenFile:
    """Map a file of token ids, and find its digest and the range of its ids.

    The type of ids is that of Megatron's index `NAME.idx` if it exists, else `data.dtype`, else
    `uint16`.

    Raises:
        ConfigError: The file is empty, an index or one of llm.c, `data.dtype` is not the type of
            the index, or the size does not fit.
    """
    where = f"{key}={path}"
    if path.suffix == ".idx":
        raise ConfigError(
            f"{where}: this is Megatron's index. Give the ids beside it:"
            f" {path.with_suffix('.bin')}."
        )
    size = path.stat().st_size
    if not size:
        raise ConfigError(f"{where}: the file is empty.")
    # 1. The type of the ids; Megatron's index also says how many there are.
    index = path.with_suffix(".idx")
    dtype = _parse_dtype(config.dtype or "uint16")
    count = None
    if index.is_file():
        dtype, count = _read_megatron_index(f"{key}={index}", index)
        if config.dtype is not None and _parse_dtype(config.dtype) != dtype:
            raise ConfigError(
                f"data.dtype={config.dtype}: the index of {path} says that its ids are"
                f" {dtype.name}. Leave it null."
            )
    else:
        with open_file(path, follow=True) as file:
            if file.read(4) == _LLM_C_BEGINNING:
                raise ConfigError(
                    f"{where}: this is a file of llm.c. Write its ids without the header of 1,024"
                    " bytes: tail -c +1025 FILE > NEW.bin"
                )
    # 2. The size must fit.
    id_bytes = dtype.itemsize
    if size % id_bytes or (count is not None and size != count * id_bytes):
        expected = f"tokens of {id_bytes} bytes"
        if count is not None:
            expected = f"{count:,} tokens, {count * id_bytes:,} bytes"
        raise ConfigError(
            f"{where}: {size:,} bytes; expected {expected}. The file was cut short, or bytes were"
            " added."
        )
    # 3. Map the ids; digest and range are cached as long as the file is unchanged.
    ids = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    content, largest, least = cached_result(
        f"tokens {dtype.str}", lambda: _digest_and_range(path, dtype), path
    )
    return TokenFile(path, ids, content, largest, least)


def _parse_dtype(name: str) -> np.dtype[Any]:
    """Return a little-endian type by its name, such as `uint16`."""
    return np.dtype(name).newbyteorder("<")


def _digest_and_range(path: Path, dtype: np.dtype[Any]) -> tuple[str, int, int]:
    """Compute the digest, the largest and the smallest id of a file.

    The file is read piece by piece, since a mapped one would count as memory of the process. The
    largest id is -1 at least, the smallest 0 at most.
    """
    total = xxhash.xxh3_128()
    count = 0
    largest = -1
    least = 0
    with open_file(path, follow=True) as file:
        while len(piece := np.fromfile(file, dtype, _IDS_AT_ONCE)):
            total.update(piece.data)
            count += len(piece)
            largest = max(largest, int(piece.max()))
            least = min(least, int(piece.min()))
    return f"{dtype.str} {count} {total.hexdigest()}", largest, least


def _read_megatron_index(where: str, path: Path) -> tuple[np.dtype[Any], int]:
    """Read the type of the ids and their number from Megatron's index.

    The index has a header of 34 bytes: a name, version, code of the type, and the numbers of
    sequences and documents. Then 12 bytes for each sequence, its length among them, and 8 bytes for
    each document.

    Args:
        where: Key and path, for messages.
        path: The index.

    Raises:
        ConfigError: It is another file, of another version, or cut short.
    """
    with open_file(path, follow=True) as file:
        raw = file.read()
    header = struct.Struct("<9sQBQQ")
    if len(raw) < header.size or not raw.startswith(_INDEX_BEGINNING):
        raise ConfigError(
            f"{where}: this is not Megatron's index, which begins with"
            f" {_INDEX_BEGINNING[:7].decode()}. If the .bin beside it is nanoGPT's, move the .idx"
            " elsewhere."
        )
    _, version, code, sequences, documents = header.unpack_from(raw)
    if version != 1 or code not in _INDEX_TYPES:
        types = [f"{number} ({np.dtype(kind).name})" for number, kind in _INDEX_TYPES.items()]
        raise ConfigError(
            f"{where}: version {version}, type {code}. optrun reads version 1 with the types"
            f" {', '.join(types)}."
        )
    if len(raw) != header.size + 12 * sequences + 8 * documents:
        raise ConfigError(
            f"{where}: {len(raw):,} bytes do not hold {sequences:,} lengths: it was cut short."
        )
    # The lengths come first, 4 bytes each.
    lengths = np.frombuffer(raw, dtype="<i4", count=sequences, offset=header.size)
    return np.dtype(_INDEX_TYPES[code]), int(lengths.sum(dtype=np.int64))
