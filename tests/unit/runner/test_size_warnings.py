"""What is allowed, and rarely meant, is told with the keys and what to take instead."""

from __future__ import annotations

import pytest
import torch

from optrun.runner import size_warnings as module
from tests.running import composed

CPU = torch.device("cpu")


def test_lengths_that_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memory", lambda _: 8 * 2**30)
    (note,) = module.size_warnings(
        composed("data.max_length=100000", "training.chunked_loss=false"), CPU
    )
    for fact in ("data.max_length=100000", "training.per_device_train_batch_size=16", "24.4 GiB"):
        assert fact in note
    assert module.size_warnings(composed(), CPU) == []
    assert (
        module.size_warnings(composed("data.max_length=100000"), CPU) == []
    )  # whose logits are never there as a whole
    assert (
        module.size_warnings(
            composed(
                "data.max_length=100000",
                "training.per_device_train_batch_size=1",
                "training.chunked_loss=false",
            ),
            CPU,
        )
        == []
    )


def test_float16_without_a_gpu() -> None:
    (note,) = module.size_warnings(composed("training.precision=fp16"), CPU)
    assert "training.precision=fp16 on a CPU" in note
    assert module.size_warnings(composed("training.precision=bf16"), CPU) == []
