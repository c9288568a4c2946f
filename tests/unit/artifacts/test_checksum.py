"""Checksums of files by either algorithm."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import xxhash

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.checksum import Entry, digest_of
from optrun.artifacts.manifest import problems, read_manifest
from optrun.base.errors import CheckpointError
from tests.faults.checkpoints import edit_manifest, make_run, snapshot

CONTENT = bytes(range(256)) * 40_000
"""More than one piece, and a rest."""


def test_they_are_those_of_the_libraries() -> None:
    assert digest_of(io.BytesIO(CONTENT), "xxh3").hexdigest() == xxhash.xxh3_128_hexdigest(CONTENT)
    assert digest_of(io.BytesIO(CONTENT)).hexdigest() == hashlib.sha256(CONTENT).hexdigest()
    for size in (0, 7, 5_000_000, len(CONTENT)):
        assert (
            digest_of(io.BytesIO(CONTENT), size=size).hexdigest()
            == hashlib.sha256(CONTENT[:size]).hexdigest()
        )


def test_a_checkpoint_says_which_it_has_and_is_held_to_it(tmp_path: Path) -> None:
    folder = save_checkpoint(make_run(tmp_path / "run"), snapshot(1))
    assert {name: entry.algorithm for name, entry in read_manifest(folder).files.items()} == {
        "model.safetensors": "xxh3",
        "optimizer.safetensors": "xxh3",
        "state.json": "sha256",
    }
    assert problems(folder) == []
    assert load_checkpoint(folder).model["weight"].equal(snapshot(1).model["weight"])
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert [str(path) in problem for problem in problems(folder)] == [True]


@pytest.mark.parametrize(
    "entry", [{"size": 1}, {"size": 1, "xxh3": "0", "sha256": "0"}, {"size": 1, "md5": "0"}]
)
def test_none_two_or_an_unknown_one_is_damage(tmp_path: Path, entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unpack"):
        Entry.read(entry)
    folder = make_run(tmp_path / "run", (1,)).checkpoint(1)
    edit_manifest(
        folder,
        lambda manifest: manifest["files"].__setitem__(0, {"name": "model.safetensors", **entry}),
    )
    with pytest.raises(CheckpointError, match=r"manifest.json: damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("strange", [0, 3])
def test_a_shard_of_no_rank_is_named(strange: int, tmp_path: Path) -> None:
    """0 is a number that torch never gives, though it is less than that of the last rank."""
    folder = save_checkpoint(make_run(tmp_path / "run"), snapshot(1))

    def shard(manifest: dict[str, Any]) -> None:
        *_, state = manifest["files"]
        names = [f"model/shard-{n:05d}-model-00001-of-00001.safetensors" for n in (1, 2, strange)]
        manifest["files"] = [*({**state, "name": name} for name in names), state]
        manifest["tensors"] = {"model": {}, "optimizer": {}}
        manifest["world_size"] = 2

    edit_manifest(folder, shard)
    with pytest.raises(CheckpointError, match=f"names shard 0000{strange}; 2 ranks write 00001 to"):
        read_manifest(folder)
