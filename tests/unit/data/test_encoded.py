"""Ids on the disk.

The type that is enough, and nothing read again where it is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optrun.data import cache as cache_module
from optrun.data import encoded, examples
from optrun.data.cache import cached, cached_result
from optrun.data.examples import encode, packed


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))


def encoder(batch: list[str], _: bool) -> dict[str, list[Any]]:
    return {"input_ids": [list(text.encode()) for text in batch]}


def test_two_bytes_an_id_are_enough_for_small_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab", "long text", "c", "another long one", "de"]
    monkeypatch.setattr(encoded, "_CHARACTERS_AT_ONCE", 12)
    wide = encode(lambda: iter(texts), encoder, "key")
    small = encode(lambda: iter(texts), encoder, "key", ids_below=1 << 16)
    assert (wide.ragged["input_ids"].dtype, small.ragged["input_ids"].dtype) == (
        np.int32,
        np.uint16,
    )
    for made in (wide, small):
        assert [
            bytes(made[index]["input_ids"].astype(np.uint8)).decode() for index in range(5)
        ] == texts
        assert made[0]["input_ids"].dtype == np.int64
    assert wide.fingerprint() == small.fingerprint()
    assert (
        packed(wide, 4, keep_rest=True).fingerprint()
        == packed(small, 4, keep_rest=True).fingerprint()
    )
    assert small.fingerprint() != packed(small, 4, keep_rest=True).fingerprint()
    labels = [small.with_scalars(labels=np.arange(5) + add).fingerprint() for add in (0, 0, 1)]
    assert labels[0] == labels[1] != labels[2]
    assert small.renamed({"labels": "input_ids"}).fingerprint() != small.fingerprint()


def test_known_texts_are_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def texts() -> Any:
        asked.append(1)
        return iter(["ab", "cd"])

    first = encode(texts, encoder, "key", content="content").fingerprint()
    assert len(asked) == 2
    monkeypatch.setattr(examples.Examples, "_fingerprint", lambda self: pytest.fail("it is known"))
    monkeypatch.setattr(cache_module, "checksum", lambda path: pytest.fail("nobody wrote to it"))
    assert encode(texts, encoder, "key", content="content").fingerprint() == first
    assert len(asked) == 2
    encode(texts, encoder, "key", content="other content")
    assert len(asked) == 3, "the texts are the same ones after all"


def test_a_changed_entry_is_noticed_by_its_state(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "a").write_bytes(b"x" * 10)

    folder = cached("kind", "key", make)
    entry = (folder / "a").stat()
    (folder / "a").write_bytes(b"y" * 10)
    os.utime(folder / "a", ns=(entry.st_atime_ns, entry.st_mtime_ns))
    assert (cached("kind", "key", make) / "a").read_bytes() == b"x" * 10


def test_a_copied_entry_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(folder: Path) -> None:
        (folder / "a").write_bytes(b"x" * 10)

    folder = cached("kind", "key", make)
    content = (folder / "a").read_bytes()
    (folder / "a").unlink()
    (folder / "a").write_bytes(content)
    now = time.time()
    monkeypatch.setattr(cache_module.time, "time", lambda: now + 60)
    reads = []
    checksum = cache_module.checksum
    monkeypatch.setattr(cache_module, "checksum", lambda path: reads.append(path) or checksum(path))
    for _ in range(3):
        assert cached("kind", "key", make) == folder
    assert len(reads) == 1


def test_what_is_known_is_not_found_out_again() -> None:
    assert cached_result("a" * 64, lambda: [1, None]) == [1, None]
    assert cached_result("a" * 64, lambda: pytest.fail("it is known")) == [1, None]


def test_ids_of_another_version_of_the_tokenizers_are_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def counted(batch: list[str], cut: bool) -> dict[str, list[Any]]:
        made.append(batch)
        return encoder(batch, cut)

    def fingerprint() -> str:
        return encode(lambda: iter(["ab"]), counted, "key", content="known").fingerprint()

    first = fingerprint()
    assert (fingerprint(), len(made)) == (first, 1)
    for package in encoded.MAKERS:
        monkeypatch.setattr(
            cache_module, "version", lambda name, package=package: f"{name == package}"
        )
        assert fingerprint() == first, "a run goes on: the ids are the same"
    assert len(made) == 1 + len(encoded.MAKERS)
