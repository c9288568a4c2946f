"""Messages between ranks in a step, counted by torch's profiler, as docs/distributed.md states
them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from optrun.distributed.shard import distribute
from optrun.distributed.world import World
from optrun.training.step import TrainStep
from tests.distributed.ranked_runs import SECONDS, Start, _no_pictures, _start, request
from tests.ranks import run_ranks
from tests.running import TINY_GPT, write_text

STEP = 3
"""Like every later one."""


def counted(folder: str, overrides: list[str], rank: int) -> None:
    """Run as one of the ranks; rank 0 writes what a step sends."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    collectives: Counter[str] = Counter()

    def profiled(method: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def call_profiled(self: TrainStep, *given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != STEP:
                return method(self, *given, **named)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                result = method(self, *given, **named)
            collectives.update(
                event.name.removeprefix("gloo:")
                for event in seen.events()
                if event.name.startswith("gloo:")
            )
            if rank == 0:
                Path(folder, "counts.json").write_text(json.dumps(collectives))
            return result

        return call_profiled

    with (
        patch.object(TrainStep, "compute_gradients", profiled(TrainStep.compute_gradients)),
        patch.object(TrainStep, "start_update", profiled(TrainStep.start_update)),
        patch.object(TrainStep, "read_result", profiled(TrainStep.read_result)),
        _no_pictures(),
    ):
        start = Start(Path(folder, "run"), overrides)
        _start(start, request(overrides), World.join("gloo", timedelta(seconds=SECONDS)))


class Late(nn.Module):
    """What is declared first is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.wide = (
            nn.Linear(301, 307),
            nn.Linear(301, 307),
            nn.Linear(307, 301),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.late(self.wide(self.early(x).relu())))


def second_step_is_the_first_of_a_new_start(rank: int) -> None:
    def gradients(forward: nn.Module, step: int) -> list[Tensor | None]:
        forward.zero_grad()
        x = torch.randn(5, 301, generator=torch.Generator().manual_seed(9 * step + rank))
        forward(x).square().mean().backward()
        return [param.grad for param in forward.parameters()]

    world, config = World(rank, 4), request(["distributed=ddp"]).config.distributed
    started = []
    for _ in range(2):
        torch.manual_seed(0)
        started.append(distribute(Late(), config, world, torch.device("cpu"), [])[0])
    gradients(started[0], 1)
    for one, other in zip(gradients(started[0], 2), gradients(started[1], 2), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_a_run_that_goes_on_sums_in_the_same_order(tmp_path: Path) -> None:
    """Of three addends and more the order counts.

    Torch's DDP may lay out its buckets anew after a step.
    """
    run_ranks(tmp_path, second_step_is_the_first_of_a_new_start, 4)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # One bucket, the map of parameters that some rank used; the losses.
        ("ddp", {"all_reduce": 2, "all_gather": 1}),
        # Two blocks and the rest: each gathered once forward, the blocks once more backward; the
        # losses. Gloo reduces three shards by all-reduce; the norm of the gradients.
        ("fsdp", {"all_gather": 3 + 2 + 1, "all_reduce": 3 + 1}),
    ],
)
def test_what_ranks_send_each_other_in_a_step(
    tmp_path: Path, kind: str, counts: dict[str, int]
) -> None:
    own = [
        "data=files",
        f"data.train={write_text(tmp_path, 60)}",
        "training.per_device_train_batch_size=2",
    ]
    own += [
        "training.device=cpu",
        f"training.max_steps={STEP}",
        "checkpoint=none",
        "training.eval_steps=1000",
    ]
    check: Callable[[int], None] = partial(
        counted, str(tmp_path), [*TINY_GPT, *own, f"distributed={kind}"]
    )
    run_ranks(tmp_path, check)
    assert json.loads((tmp_path / "counts.json").read_text()) == counts
