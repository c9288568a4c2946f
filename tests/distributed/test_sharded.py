"""Sharded checkpoints: written by some ranks, read by any number of them, one process included."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from optrun.artifacts.checkpoint import load_checkpoint, read_local_parts, save_checkpoint
from optrun.artifacts.manifest import foreign_files, problems
from optrun.artifacts.run_dir import RunDir
from tests.distributed.shards import (
    assert_equal,
    divide,
    group,
    in_ranks,
    make_run,
    meshes,
    sharded_run,
    snapshot,
    whole_state,
)


def assert_read_whole(folder: Path, step: int) -> None:
    loaded = load_checkpoint(folder)
    for found, wanted in zip((loaded.model, loaded.optimizer), whole_state(step), strict=True):
        assert_equal(found, wanted)
    assert loaded.metadata.train == {"tokens": 10 * step}


def read_slices(folder: Path, step: int, rank: int) -> None:
    """Every layout there is; of a divided tensor, no rank is given more than its part."""
    for mesh, placements in meshes(dist.get_world_size()).values():
        params = divide(whole_state(99)[0], mesh, placements)
        loaded = read_local_parts(load_checkpoint(folder, lazy=True), params)
        for found, wanted in zip((loaded.model, loaded.optimizer), whole_state(step), strict=True):
            assert_equal(found, wanted)
        divided = {
            name
            for part in (loaded.model, loaded.optimizer)
            for name, t in part.items()
            if type(t) is DTensor
        }
        assert divided >= {
            "weight",
            "bias",
            "one",
            "deep",
            "none",
            "weight/exp_avg",
            "bias/master",
            "one/exp_avg",
        }
        assert not divided & {"mask", "weight/step", "groups/0/step", "deep/exp_avg_sq_row"}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "fsdp"),
        *(pytest.param(4, layout, marks=pytest.mark.slow) for layout in ("fsdp", "hsdp")),
    ],
)
def test_any_world_reads_what_any_world_saved(ranks: int, layout: str, tmp_path: Path) -> None:
    run = sharded_run(tmp_path / "run", (3,), ranks, layout)
    folder = run.checkpoint(3)
    assert problems(folder) == []
    assert_read_whole(folder, 3)
    for readers in (2, 4):
        in_ranks(tmp_path / "run", partial(read_slices, folder, 3), readers)


def test_ranks_read_their_slices_of_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = save_checkpoint(make_run(tmp_path / "run"), snapshot(3))
    in_ranks(tmp_path / "run", partial(read_slices, folder, 3), 2)


def test_one_process_reads_by_templates_too(tmp_path: Path) -> None:
    folder = sharded_run(tmp_path / "run", (3,)).checkpoint(3)
    loaded = read_local_parts(load_checkpoint(folder, lazy=True), whole_state(4)[0])
    assert_equal(loaded.model, whole_state(3)[0])
    lazily = load_checkpoint(folder, lazy=True)
    assert_equal(lazily.optimizer, whole_state(3)[1])
    assert_equal(read_local_parts(lazily, {}).optimizer, whole_state(3)[1])


def test_what_stands_on_the_disk(tmp_path: Path) -> None:
    run = sharded_run(tmp_path / "run", (3,))
    folder = run.checkpoint(3)
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    in_folders = [f"{part}/{name}" for part in ("model", "optimizer") for name in shards]
    assert names == ["manifest.json", *in_folders, "state.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["world_size"]) == (4, 2)
    assert manifest["mesh"] == {"dim_names": ["dp_shard"], "shape": [2]}
    assert {entry["name"] for entry in manifest["files"]} == set(names) - {"manifest.json"}
    assert manifest["tensors"]["model"]["weight"] == {"dtype": "float32", "shape": [7, 5]}
    assert manifest["tensors"]["optimizer"]["bias/master"] == {"dtype": "float32", "shape": [3]}
    held = [load_file(folder / "model" / name) for name in shards]
    assert [tuple(part["weight"].shape) for part in held] == [(4, 5), (3, 5)]
    assert sum("mask" in part for part in held) == 1, "what all ranks hold is written once"
    assert (run.last.read_text(), foreign_files(folder)) == ("step-00000003\n", [])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards(tmp_path: Path) -> None:
    """The form is that of torch.distributed.checkpoint: its own reader takes a folder as it is."""
    folder = sharded_run(tmp_path / "run", (3,)).checkpoint(3)
    wanted, _ = whole_state(3)
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items() if tensor.numel()}
    dcp.load(
        state, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "model")), no_dist=True
    )
    assert_equal(state, {name: tensor for name, tensor in wanted.items() if tensor.numel()})


def saves_twice(folder: Path, rank: int) -> None:
    run, saving = RunDir(folder), group()
    mesh, placements = meshes(2)["fsdp"]
    first = snapshot(3, mesh, placements)
    assert save_checkpoint(run, first, saving=saving) == run.checkpoint(3)
    inode = (run.checkpoint(3) / "manifest.json").stat().st_ino
    dist.barrier()
    assert save_checkpoint(run, first, saving=saving) == run.checkpoint(3)
    assert (run.checkpoint(3) / "manifest.json").stat().st_ino == inode, "it was there already"
    dist.barrier()
    first.metadata.train["tokens"] = 31
    save_checkpoint(run, first, saving=saving)
    assert load_checkpoint(run.checkpoint(3)).metadata.train == {"tokens": 31}


def test_the_same_step_again(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    in_ranks(tmp_path / "run", partial(saves_twice, tmp_path / "run"))
    assert [
        path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name[0] == "."
    ] == []
