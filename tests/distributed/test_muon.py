"""Muon on sharded matrices: torch's own steps on whole ones, bit for bit, in two exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter

from optrun.optimizer import torch_named
from optrun.optimizer.whole_matrices import on_whole
from tests.ranks import run_ranks

SHAPES = ((16, 24), (24, 16), (5, 7), (3, 40), (33, 8), (1, 9))
"""Wide and tall, uneven, and fewer rows than ranks."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def matrices(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]


def stepped(
    cls: Any, params: Sequence[Parameter], layout: Any = None, **options: Any
) -> tuple[Any, int]:
    """The optimizer after three steps, and the collectives of the last."""
    groups = [
        {"params": [param], "lr": 0.1 / (1 + at), "weight_decay": 0.1 * at}
        for at, param in enumerate(params)
    ]
    optimizer, count = cls(groups, **options), 0
    for step in range(3):
        for at, (param, grad) in enumerate(
            zip(params, matrices(params[0].dtype, 1 + step), strict=True)
        ):
            whole = (
                grad
                if layout is None
                else distribute_tensor(grad, layout[0], layout[1], src_data_rank=None)
            )
            param.grad = None if at == 2 and step == 1 else whole
        with CommDebugMode() as communication:
            optimizer.step()
        count = communication.get_total_counts()
    return optimizer, count


def equals_torch(mesh: Any, placements: tuple[Placement, ...], collectives: int | None) -> None:
    for dtype in DTYPES:
        for options in (
            {},
            {"nesterov": False},
            {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        ):
            if dtype == torch.bfloat16 and "nesterov" in options:
                continue  # where torch normalises the momentum itself
            plain = [Parameter(value) for value in matrices(dtype)]
            theirs, _ = stepped(torch.optim.Muon, plain, **options)
            pieces = [
                Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))
                for value in matrices(dtype)
            ]
            ours, count = stepped(torch_named.Muon, pieces, (mesh, placements), **options)
            for wanted, found in zip(plain, pieces, strict=True):
                assert isinstance(found.data, DTensor)
                near = (
                    2**-6 if dtype == torch.bfloat16 else 0.0
                )  # there a sum rounds as its kernel walks over memory
                torch.testing.assert_close(
                    found.data.full_tensor(), wanted.data, rtol=near, atol=near
                )
                momentum = ours.state[found]["momentum_buffer"]
                assert momentum.placements == placements
                assert torch.equal(momentum.full_tensor(), theirs.state[wanted]["momentum_buffer"])
            if collectives is not None:
                assert count == collectives


def on_two(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    equals_torch(mesh, (Shard(0),), 2)
    equals_torch(mesh, (Shard(1),), 2)
    equals_torch(mesh, (Replicate(),), 0)
    with mock.patch.object(torch_named, "MUON_BUCKET", 300):  # 16 x 12 and 12 x 16; the rest
        equals_torch(mesh, (Shard(0),), 4)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    equals_torch(alone, (Replicate(), Shard(0)), 0)


def on_four(_rank: int) -> None:
    equals_torch(init_device_mesh("cpu", (4,)), (Shard(0),), 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    equals_torch(mesh, (Replicate(), Shard(0)), 2)
    equals_torch(mesh, (Shard(0), Replicate()), 2)
    equals_torch(mesh, (Shard(0), Shard(1)), None)
    equals_torch(mesh, (Shard(1), Shard(1)), None)


def fewer_matrices_than_ranks(_rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(12.0).reshape(6, 2)
    piece = distribute_tensor(whole, mesh, (Shard(0),), src_data_rank=None)
    calls = []

    def turned(index: int, given: torch.Tensor) -> torch.Tensor:
        calls.append(index)
        assert torch.equal(given, whole)
        return given.flip(0)

    (found,) = on_whole(turned, [piece.to_local()], [piece])
    back = DTensor.from_local(found, mesh, (Shard(0),), shape=whole.shape, stride=whole.stride())
    assert torch.equal(back.full_tensor(), whole.flip(0))
    counts = [torch.zeros(1) for _ in range(4)]
    torch.distributed.all_gather(counts, torch.tensor([float(len(calls))]))
    assert sum(count.item() for count in counts) == 1, "one rank does the work"


def test_two_ranks_step_as_torch_steps_whole_matrices(tmp_path: Path) -> None:
    run_ranks(tmp_path, on_two)


@pytest.mark.slow
def test_four_ranks_and_two_dimensions_of_the_mesh(tmp_path: Path) -> None:
    run_ranks(tmp_path, on_four, ranks=4)


@pytest.mark.slow
def test_a_rank_without_a_matrix_of_its_own(tmp_path: Path) -> None:
    run_ranks(tmp_path, fewer_matrices_than_ranks, ranks=4)


def test_the_momentum_of_16_bits_stays_a_momentum() -> None:
    """torch 2.13 orthogonalises in place what is bfloat16 already.

    Without nesterov the momentum itself.
    """
    param = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = torch_named.Muon([param], nesterov=False, momentum=0.5)
    param.grad = torch.eye(4, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(
        optimizer.state[param]["momentum_buffer"], 0.5 * torch.eye(4, dtype=torch.bfloat16)
    )
