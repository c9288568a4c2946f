"""Memory that does not suffice, and memory that is copied from a device.

Told by what, and not before it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.runner.snapshot import Copier
from optrun.task.evaluation import TokenMetrics
from optrun.training.step import TrainStep
from tests.faults.runs import Go, Straight


def _of_this_processor() -> RuntimeError:
    """torch has no class for it."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        _of_this_processor(),
    ],
    ids=["python", "cuda", "processor"],
)
def test_out_of_memory_names_step_and_shapes(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    original, calls = TrainStep.compute_gradients, [0]

    def call(self: TrainStep, batches: list[Any], *where: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise error
        return original(self, batches, *where)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", call)
        code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 1
    assert "step 3: out of memory with micro-batches of input_ids (4, 16)" in said
    assert "training.gradient_accumulation_steps" in said
    assert latest_complete(RunDir("run"))[0] == RunDir("run").checkpoint(2)


def test_out_of_memory_in_an_evaluation_names_its_batch_size(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a run and by the verb."""

    original = TokenMetrics.update

    def update(self: TokenMetrics, outputs: Any, batch: Any) -> None:
        if Path("run/metrics.jsonl").exists():  # not before the first step
            torch.empty(10**15)
        original(self, outputs, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TokenMetrics, "update", update)
        for words in ([*straight.words, "hydra.run.dir=run"], ["evaluate", str(straight.path)]):
            code, said = go(*words)
            assert code == 1
            assert "evaluation: out of memory with batches of input_ids (" in said
            assert "Give a smaller training.per_device_eval_batch_size" in said
    assert latest_complete(RunDir("run"))[0] == RunDir("run").checkpoint(3), (
        "what was done is saved"
    )
    assert go("resume=run")[0] == 0
    straight.same(Path("run"))


class _OnDevice:
    """As much of a tensor on a device as a copy asks for."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        self.tensor, self.device = tensor, torch.device(device)
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def detach(self) -> torch.Tensor:
        return self.tensor


def test_a_copy_waits_for_the_devices_it_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second device may still be at it when the checksum is taken of what is half
    there.
    """
    waited = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    places = {"a": "cuda:1", "b": "cuda:1", "c": "cuda:2"}
    given: Any = {name: _OnDevice(torch.ones(2), place) for name, place in places.items()}
    copies = Copier()({**given, "d": torch.ones(2)})
    assert [copy.tolist() for copy in copies.values()] == [[1.0, 1.0]] * 4
    assert sorted(map(str, waited)) == ["cuda:1", "cuda:2"]
