"""States divided among ranks, without training, for tests of sharded checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from optrun.artifacts.checkpoint import Snapshot, make_checkpoints_dir, save_checkpoint
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import tensor_digest
from tests.ranks import run_ranks

PLAIN = ("mask", "weight/step", "groups/0/step")
"""Not divided, as counters and buffers are not."""


def whole_state(step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Model and optimizer, another one at every step.

    Odd shapes, one element, none, several dtypes, no dimension.
    """
    generator = torch.Generator().manual_seed(step)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight, bias = randn(7, 5), randn(3).bfloat16()
    model = {
        "weight": weight,
        "bias": bias,
        "one": randn(1),
        "deep": randn(6, 2, 3).double(),
        "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False]),
    }
    optimizer = {
        "weight/exp_avg": randn(7, 5),
        "weight/step": torch.tensor(float(step)),
        "bias/exp_avg": randn(3),
        "bias/master": bias.float(),
        "deep/exp_avg_sq_row": randn(6, 2),
        "one/exp_avg": randn(1),
        "none/exp_avg": torch.empty(0, 4),
        "groups/0/step": torch.tensor(step),
    }
    return model, optimizer


def meshes(ranks: int) -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    """Ways to lay a tensor out.

    Over all ranks, and where there are four in two groups that hold the same.
    """
    found: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "fsdp": (init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",)), [Shard(0)])
    }
    if ranks == 4:
        names = ("dp_replicate", "dp_shard")
        found["hsdp"] = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
            [Replicate(), Shard(0)],
        )
    return found


def divide(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh, placements: list[Placement]
) -> dict[str, Tensor]:
    return {
        name: tensor if name in PLAIN else distribute_tensor(tensor, mesh, placements)
        for name, tensor in tensors.items()
    }


def snapshot(
    step: int, mesh: DeviceMesh | None = None, placements: list[Placement] | None = None
) -> Snapshot:
    """A state, whole or divided over a mesh."""
    model, optimizer = whole_state(step)
    if mesh is not None and placements is not None:
        model, optimizer = divide(model, mesh, placements), divide(optimizer, mesh, placements)
    metadata = CheckpointMetadata(
        global_step=step, train={"tokens": 10 * step}, config_digest="0" * 16, trainable=["weight"]
    )
    return Snapshot(step, model, optimizer, metadata, finite=["weight", "bias", "deep"])


def group(seconds: float = 60) -> dist.ProcessGroup:
    """A group for saving, as `World` has one."""
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    assert made is not None
    return made


def fsdp_snapshot(step: int) -> Snapshot:
    """The state divided over all ranks there are."""
    return snapshot(step, *meshes(dist.get_world_size())["fsdp"])


def make_run(folder: Path) -> RunDir:
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder)
    make_checkpoints_dir(run)
    return run


class Saves:
    """What ranks do in `sharded_run`; a class, so that it can be sent to them."""

    def __init__(self, folder: Path, steps: tuple[int, ...], layout: str) -> None:
        self.folder, self.steps, self.layout = folder, steps, layout

    def __call__(self, rank: int) -> None:
        saving = group()
        mesh, placements = meshes(dist.get_world_size())[self.layout]
        for step in self.steps:
            save_checkpoint(RunDir(self.folder), snapshot(step, mesh, placements), saving=saving)


def sharded_run(
    folder: Path, steps: tuple[int, ...] = (), ranks: int = 2, layout: str = "fsdp"
) -> RunDir:
    """A run directory with checkpoints that several ranks wrote."""
    run = make_run(folder)
    in_ranks(folder, Saves(folder, steps, layout), ranks)
    return run


def in_ranks(folder: Path, check: Callable[[int], None], ranks: int = 2) -> None:
    """As `run_ranks`, which wants an empty folder for each call."""
    rendezvous = folder.with_name(f"{folder.name}-meeting-{len(list(folder.parent.iterdir()))}")
    rendezvous.mkdir()
    run_ranks(rendezvous, check, ranks)


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes; of divided tensors, what this rank should hold of it."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        held = found[name]
        assert (held.dtype, held.shape) == (tensor.dtype, tensor.shape), name
        if isinstance(held, DTensor):
            tensor = distribute_tensor(tensor, held.device_mesh, held.placements)
        assert tensor_digest(held) == tensor_digest(tensor), name


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
