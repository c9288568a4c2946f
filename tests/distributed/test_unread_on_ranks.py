"""On two ranks, too, a step whose numbers are read late is the step that waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from optrun.distributed.world import World
from optrun.training.loop import Loop
from optrun.training.step import TrainStep
from tests.distributed.ranked_runs import Start, start_on
from tests.running import TINY_GPT, records, summary, write_text

STEPS = 6
POLICIES = {"stop": [], "skip": [], "rollback": ["checkpoint.save_steps=2"]}


@contextmanager
def late_or_waiting(run: Path, world: World) -> Iterator[None]:
    """Inside, the steps of a run in a folder `waits-...` wait; those of another must not."""
    if run.name.startswith("waits"):
        with patch.object(TrainStep, "reason_to_wait", lambda step: "the test says so"):
            yield
        return
    late = []
    take_step = Loop._step

    def noted(loop: Loop) -> None:
        take_step(loop)
        late.append(loop._pending is not None)

    with patch.object(Loop, "_step", noted):
        try:
            yield
        finally:
            assert any(late), f"rank {world.rank} of {run.name} waited for every step"


def content(run: Path) -> dict[str, Any]:
    """Lines, status, and the bytes of every tensor file, by its path in the run."""
    files = sorted(run.rglob("*.safetensors"))
    return {
        "lines": records(run, before=True),
        "status": [summary(run)[key] for key in ("status", "exit_code", "global_step")],
        "files": {str(path.relative_to(run)): path.read_bytes() for path in files},
    }


@pytest.mark.parametrize(
    ("strategy", "precision", "examples"),
    [
        ("ddp", "fp32", 16),
        ("ddp", "fp16", 8),
        pytest.param("fsdp", "fp16", 16, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp in float16, not accumulated", "fsdp in float16"],
)
def test_a_bad_step_ends_as_one_that_waits(
    strategy: str, precision: str, examples: int, tmp_path: Path
) -> None:
    """The loss of the last rank is NaN at the third step, which nobody asks for."""
    words = [
        *TINY_GPT,
        "data=files",
        f"data.train={write_text(tmp_path)}",
        f"distributed={strategy}",
        f"training.precision={precision}",
        f"training.max_steps={STEPS}",
        "training.per_device_train_batch_size=4",
        f"training.global_batch_size={examples}",
        "training.logging_steps=5",
        "training.eval_steps=5",
        "scheduler=constant",
    ]
    words = list({word.split("=")[0]: word for word in words}.values())
    starts = []
    for policy, more in POLICIES.items():
        for kind in ("late", "waits"):
            run = tmp_path / f"{kind}-{policy}"
            asked = [*words, *more, f"training.on_nonfinite={policy}"]
            starts.append(Start(run, asked, poisoned=2, within=late_or_waiting))
    start_on(2, starts, tmp_path / "meet")
    for policy in POLICIES:
        late = content(tmp_path / f"late-{policy}")
        assert late == content(tmp_path / f"waits-{policy}")
        assert late["status"][1] == (3 if policy == "stop" else 0)
