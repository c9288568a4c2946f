"""Two ranks clip what one process clips.

The norm is that of all pieces, whatever is replicated or sharded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from optrun.optimizer.clip import build_clip
from tests.ranks import run_ranks

SHAPES = ((6, 3), (5,), (1,), (4, 2))


def _gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _clipped_alone(name: str, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for param, grad in zip(params, _gradients(), strict=True):
        param.grad = grad
    norm = build_clip(name, **options).clip_params(params)
    return norm, [param.grad for param in params if param.grad is not None]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("global_norm", {"max_norm": 0.5}),
    ("global_norm", {"max_norm": 0.5, "max_value": 0.7}),
    ("norm", {"max_norm": 0.5}),
    ("value", {"max_value": 0.3}),
]


def _on_a_rank(rank: int) -> None:
    for sizes, placements in (
        ((2,), [Shard(0)]),
        ((2,), [Replicate()]),
        ((1, 2), [Replicate(), Shard(0)]),
        ((2, 1), [Replicate(), Shard(0)]),
        ((2, 1), [Shard(0), Shard(0)]),
    ):
        mesh = init_device_mesh("cpu", sizes)
        for name, options in CASES:
            params = []
            for grad in _gradients():
                param = torch.nn.Parameter(
                    distribute_tensor(torch.zeros_like(grad), mesh, placements)
                )
                param.grad = distribute_tensor(grad, mesh, placements)
                params.append(param)
            plain = torch.nn.Parameter(torch.zeros(1))  # one that nobody shards, without a gradient
            norm = build_clip(name, **options).clip_params([*params, plain])
            wanted, alone = _clipped_alone(name, options)
            torch.testing.assert_close(norm, wanted)
            for param, expected in zip(params, alone, strict=True):
                assert param.grad is not None
                torch.testing.assert_close(param.grad.full_tensor(), expected)
    mesh = init_device_mesh("cpu", (2,))
    half = torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    piece = torch.tensor([3.0, 0.0]) if rank == 0 else torch.tensor([0.0, 4.0])
    half.grad = torch.distributed.tensor.DTensor.from_local(piece, mesh, [Partial()])
    norm = build_clip("global_norm", max_norm=1.0, eps=0.0).clip_params([half])
    assert norm == 5.0
    torch.testing.assert_close(half.grad.full_tensor(), torch.tensor([0.6, 0.8]))


def test_two_ranks_clip_as_one(tmp_path: Path) -> None:
    run_ranks(tmp_path, _on_a_rank)
