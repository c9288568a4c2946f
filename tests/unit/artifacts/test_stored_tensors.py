"""Tensors put together from shards, in one process and without ranks.

What fits, and what does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.artifacts.manifest import foreign_files
from optrun.artifacts.ranks import (
    call_on_first,
    error_of_rank,
    gather_results,
    lost_rank_errors,
    rank_of,
    size_of,
)
from optrun.artifacts.sharded import StoredTensors, mesh_of
from optrun.artifacts.tensor_file import describe, tensors_on_disk, write_tensors
from optrun.base.errors import CheckpointError, NonFiniteError, StorageError

WHOLE = torch.arange(35, dtype=torch.float32).reshape(7, 5)
Part = tuple[int, int, int, int]


def stored(folder: Path, parts: list[Part], shape: Any = (7, 5)) -> StoredTensors:
    """Pieces of `WHOLE`, a file each, as rows from, to, columns from, to."""
    files = []
    for number, (top, bottom, left, right) in enumerate(parts):
        files.append(folder / f"shard-{number}.safetensors")
        offsets = json.dumps({"w": {"saved_offsets": [top, left]}})
        write_tensors(
            files[-1], {"w": WHOLE[top:bottom, left:right]}, {"DCP_SHARDING_INFO": offsets}
        )
    return StoredTensors(files, {"w": {"dtype": "float32", "shape": list(shape)}})


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 7, 0, 5)],
        [(0, 4, 0, 5), (4, 7, 0, 5)],
        [(4, 7, 0, 5), (0, 4, 0, 5), (7, 7, 0, 5)],
        [(0, 7, 0, 2), (0, 7, 2, 5)],
        [(0, 3, 0, 2), (0, 3, 2, 5), (3, 7, 0, 5)],
    ],
)
def test_pieces_make_a_whole(parts: list[Part], tmp_path: Path) -> None:
    assert torch.equal(stored(tmp_path, parts)["w"], WHOLE)


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4, 0, 5)],
        [(0, 4, 0, 5), (5, 7, 0, 5)],
        [(0, 4, 0, 5), (3, 6, 0, 5)],
        [(0, 4, 0, 5), (0, 4, 0, 5)],
        [(0, 4, 0, 5), (4, 7, 0, 5), (0, 4, 0, 5)],
        [(0, 7, 0, 3), (0, 7, 1, 3)],
        [(0, 3, 0, 2), (0, 3, 1, 4), (3, 7, 0, 5)],
    ],
)
def test_a_gap_or_a_piece_twice_is_found(parts: list[Part], tmp_path: Path) -> None:
    """Also where the number of elements is right.

    Nothing is made of memory that was never written.
    """
    with pytest.raises(CheckpointError, match=r"tensor w of shape \[7, 5\] is not whole"):
        stored(tmp_path, parts)


@pytest.mark.parametrize("shape", [(5, 7), (35,), (7, 5, 1), (10**30,), (-7, -5), ()])
def test_another_shape_in_the_manifest(shape: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor w"):
        stored(tmp_path, [(0, 4, 0, 5), (4, 7, 0, 5)], shape)


@pytest.mark.parametrize(
    "offsets", ["{", "[]", '{"w": 1}', '{"w": {}}', '{"w": {"saved_offsets": ["x"]}}', "[" * 10**5]
)
def test_offsets_that_are_garbage(offsets: str, tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write_tensors(path, {"w": WHOLE[:4]}, {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(CheckpointError):
        StoredTensors([path], {"w": {"dtype": "float32", "shape": [7, 5]}})


def test_offsets_beyond_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    for offsets in ([-1, 0], [4, 0], [0], [0, 0, 0]):
        path.unlink(missing_ok=True)
        write_tensors(
            path, {"w": WHOLE}, {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offsets}})}
        )
        with pytest.raises(CheckpointError, match="not whole"):
            StoredTensors([path], {"w": {"dtype": "float32", "shape": [7, 5]}})


def test_no_dimension_no_element_and_a_file_of_the_whole_form(tmp_path: Path) -> None:
    tensors = {
        "none": torch.empty(0, 3),
        "step": torch.tensor(3.0),
        "bf16": torch.ones(2).bfloat16(),
    }
    write_tensors(tmp_path / "a.safetensors", tensors)
    read = StoredTensors(
        [tmp_path / "a.safetensors"], {name: describe(tensor) for name, tensor in tensors.items()}
    )
    assert list(read) == list(tensors)
    assert len(read) == 3
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    with pytest.raises(KeyError):
        read["other"]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"junk" * 10)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read"):
        StoredTensors([tmp_path / "a.safetensors"], {})


def test_one_process_needs_no_group() -> None:
    assert (rank_of(None), size_of(None)) == (0, 1)
    assert gather_results(None, lambda: 3) == [3]
    assert call_on_first(None, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        gather_results(None, lambda: 1 // 0)
    assert mesh_of({"w": WHOLE}) is None


def test_errors_of_a_rank_keep_their_class() -> None:
    assert str(error_of_rank(2, NonFiniteError("step 3: w"))) == "rank 2: step 3: w"
    assert type(error_of_rank(2, StorageError("full"))) is StorageError
    told = error_of_rank(1, OSError(28, "No space left on device", "/a/b"))
    assert isinstance(told, OSError)
    assert (told.errno, told.strerror, told.filename) == (
        28,
        "rank 1: No space left on device",
        "/a/b",
    )
    assert "rank 0: KeyError" in str(error_of_rank(0, KeyError("x")))


def test_a_lost_rank_is_told_as_that() -> None:
    with (
        pytest.raises(Exception, match="another rank no longer answers: gone") as told,
        lost_rank_errors(),
    ):
        raise RuntimeError("gone\nwith a stack")
    assert getattr(told.value, "exit_code", None) == 1


def test_tensors_on_disk_are_the_same_in_a_file_that_has_no_name(tmp_path: Path) -> None:
    """They may be changed as others are; one that is read when it is its turn is held no longer."""
    tensors = {
        "w": WHOLE,
        "half": WHOLE.bfloat16()[:3].T,
        "count": torch.tensor(7),
        "none": torch.empty(0, 5),
    }
    found = tensors_on_disk(((name, tensor.clone()) for name, tensor in tensors.items()), tmp_path)
    assert not list(tmp_path.iterdir())
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 64 == 0
    found["w"].add_(1)
    assert torch.equal(found["w"], WHOLE + 1)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        tensors_on_disk([("w", WHOLE)], tmp_path / "missing")


def test_shards_in_a_whole_checkpoint_are_strangers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert foreign_files(tmp_path) == [tmp_path / "model"]
