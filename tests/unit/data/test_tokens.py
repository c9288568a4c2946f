"""Files of token ids, as three other programs write them, are one stream of blocks.

What is none of them is refused.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS
from optrun.data import cache as cache_module
from optrun.data.build import load_source
from optrun.data.cache import cached_result
from optrun.data.source import Source
from optrun.data.token_blocks import TokenBlocks

IDS = np.random.default_rng(0).integers(0, 300, size=1003)


def nanogpt(path: Path, ids: np.ndarray, dtype: str = "<u2") -> Path:
    """Write ids and nothing else."""
    ids.astype(dtype).tofile(path)
    return path


def megatron(path: Path, ids: np.ndarray, lengths: list[int], code: int = 4) -> Path:
    """Write Megatron's two files, of documents of these lengths."""
    dtype = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    ids.astype(dtype).tofile(path)
    starts = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, dtype="<i4").tobytes() + starts.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return path


def load(train: object, **given: object) -> Source:
    """Read token files as `data=tokens` does."""
    options = {"max_length": 10, "eval_fraction": 0.1, **given}
    paths = [str(path) for path in train] if isinstance(train, list) else str(train)
    return load_source(
        choice("data", SCHEMAS, "tokens", {"train": paths, **options}), seed=0, documents=True
    )


def blocks(source: Source) -> TokenBlocks:
    """The training rows."""
    assert isinstance(source.train.rows, TokenBlocks)
    return source.train.rows


def joined(found: TokenBlocks) -> np.ndarray:
    """All tokens of the blocks, in order."""
    return np.concatenate([found[index]["input_ids"] for index in range(len(found))])


def test_all_formats_are_the_same_stream(tmp_path: Path) -> None:
    files = [
        nanogpt(tmp_path / "nano.bin", IDS),
        megatron(tmp_path / "meg.bin", IDS, [500, 3, 500]),
        megatron(tmp_path / "meg8.bin", IDS, [1003], code=8),
        megatron(tmp_path / "meg5.bin", IDS, [1] * 1003, code=5),
    ]
    for path in files:
        found = blocks(load(path, eval_fraction=0.0))
        assert len(found) == 100
        assert found.left_out == 3
        assert joined(found).dtype == np.int64
        assert (joined(found) == IDS[:1000]).all()
    wide = nanogpt(tmp_path / "wide.bin", IDS + 70_000, "<i4")
    assert (
        joined(blocks(load(wide, dtype="int32", eval_fraction=0.0))) == IDS[:1000] + 70_000
    ).all()


@pytest.mark.parametrize("cuts", [[1, 2, 3], [10, 20], [5, 5, 1000], [333, 666]])
def test_shards_are_one_stream(tmp_path: Path, cuts: list[int]) -> None:
    for number, piece in enumerate(np.split(IDS, cuts)):
        if len(piece):
            nanogpt(tmp_path / f"part_{number}.bin", piece)
    found = blocks(load(tmp_path / "part_*.bin", eval_fraction=0.0))
    assert (joined(found) == IDS[:1000]).all()
    assert (joined(pickle.loads(pickle.dumps(found))) == IDS[:1000]).all(), (
        "a worker of the loader has it so"
    )
    with pytest.raises(IndexError, match="block 100 of 100"):
        found[100]


def test_the_end_is_held_back_or_named(tmp_path: Path) -> None:
    train, other = nanogpt(tmp_path / "train.bin", IDS), nanogpt(tmp_path / "other.bin", IDS[:50])
    made = load(train)
    held = made.eval_sets[""].rows
    assert isinstance(held, TokenBlocks)
    assert (len(blocks(made)), len(held)) == (90, 10)
    assert (joined(held) == IDS[903:1003]).all()
    assert "last 100 tokens of data.train held out" in made.notes[0]
    named = load(train, eval={"a": str(other), "b": str(train)})
    assert [len(split.rows) for split in named.eval_sets.values()] == [5, 100]
    assert len(blocks(named)) == 100
    assert not len(load(train, eval_fraction=0.0).eval_sets[""].rows)
    assert [len(split.rows) for split in load(train, eval_fraction=1e-9).splits] == [99, 1], (
        "one block at least"
    )


def test_a_fingerprint_knows_tokens_and_cuts(tmp_path: Path) -> None:
    path, copy = nanogpt(tmp_path / "a.bin", IDS), nanogpt(tmp_path / "copy.bin", IDS)
    known = blocks(load(path)).fingerprint()
    assert blocks(load(copy)).fingerprint() == known
    others = [load(path, max_length=11), load(path, eval_fraction=0.2), load([path, copy])]
    changed = IDS.copy()
    changed[400] += 1
    others.append(load(nanogpt(tmp_path / "b.bin", changed)))
    assert len({known, *(blocks(other).fingerprint() for other in others)}) == 5


REFUSED = [
    ("empty.bin", b"", {}, "the file is empty"),
    ("odd.bin", b"abc", {}, "3 bytes; expected tokens of 2 bytes"),
    ("some.idx", b"x", {}, "Give the ids beside it: .*some.bin"),
    (
        "few.bin",
        b"\x01\x00" * 9,
        {"eval_fraction": 0.0},
        "9 tokens do not fill one block of data.max_length=10",
    ),
    ("few.bin", b"\x01\x00" * 19, {}, "9 tokens do not fill one block"),
    (
        "few.bin",
        b"\x01\x00" * 6,
        {"eval_fraction": 0.9},
        r"data.train \(held out\): 6 tokens do not fill one block",
    ),
    ("c.bin", np.full(2, 20240520, dtype="<i4").tobytes(), {}, "a file of llm.c.*tail -c"),
]


@pytest.mark.parametrize(("name", "raw", "given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_such_file_is_refused(
    tmp_path: Path, name: str, raw: bytes, given: dict[str, object], message: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name, **given)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path / "m.bin", IDS, [1003])
    with pytest.raises(
        ConfigError, match=r"data.dtype=uint16: the index of .*m.bin says that its ids are int32"
    ):
        load(path, dtype="uint16")
    nanogpt(path, IDS, "<i2")
    with pytest.raises(ConfigError, match="cut short"):
        load(path)
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    for raw, message in (
        (b"none", "not Megatron's index"),
        (whole[:-4], "do not hold 1 lengths"),
        (whole[:9] + struct.pack("<Q", 2) + whole[17:], "version 2, type 4"),
        (whole[:17] + b"\x07" + whole[18:], r"type 7. optrun reads .*4 \(int32\)"),
    ):
        index.write_bytes(raw)
        with pytest.raises(ConfigError, match=message):
            load(path)


def test_ids_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    found = blocks(load(nanogpt(tmp_path / "a.bin", IDS)))
    found.expect_ids_below(int(IDS.max()) + 1, "data.train")
    with pytest.raises(
        ConfigError,
        match=rf"data.train=.*a.bin: it holds the token id {IDS.max()}, and .* 299 entries",
    ):
        found.expect_ids_below(299, "data.train")
    below = blocks(load(nanogpt(tmp_path / "b.bin", IDS - 1, "<i4"), dtype="int32"))
    with pytest.raises(ConfigError, match="token id -1"):
        below.expect_ids_below(1000, "data.train")


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a file was read, with a cache of its own."""
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))
    return []


def test_a_file_is_read_once(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")

    def found(kind: str = "text") -> str:
        return str(cached_result(kind, lambda: reads.append(kind) or path.read_text(), path))

    assert (found(), found()) == ("one", "one")
    assert len(reads) == 2, "so young a file may change within a tick of the clock"
    monkeypatch.setattr(cache_module, "YOUNG_SECONDS", -1)
    assert (found(), found(), found("other")) == ("one", "one", "one")
    assert len(reads) == 4
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found() == "two", "its time was set back, and its size is the same"
    (tmp_path / "b").write_bytes(b"six")
    time.sleep(0.01)
    (tmp_path / "b").replace(path)
    assert found() == "six"
    for memory in (tmp_path / "cache" / "known").iterdir():
        memory.write_text("{")
    assert found() == "six"


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "YOUNG_SECONDS", -1)
    path = tmp_path / "a"
    path.write_bytes(b"one")

    def read() -> str:
        reads.append("")
        was = path.read_text()
        path.write_bytes(b"more")
        return was

    assert cached_result("text", read, path) == "one"
    assert cached_result("text", path.read_text, path) == "more"
    monkeypatch.setenv("OPTRUN_CACHE", "/proc/none")
    assert cached_result("text", path.read_text, path) == "more", "without a cache it is read"
