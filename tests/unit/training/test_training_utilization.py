"""Operations of a step, and the peak of a device."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from optrun.model.flops import step_flops
from optrun.training.progress import Throughput
from optrun.training.utilization import PEAKS, peak_flops


@pytest.mark.parametrize("batch", [1, 3])
def test_operations_are_those_of_the_products(batch: int) -> None:
    """12 n d^2 of a layer's four products, 2 n^2 d of attention, d V of the head.

    Twice, for multiply and add.
    """
    d, n, layers, vocabulary = 32, 16, 2, 100
    sizes = GPT2Config(n_embd=d, n_layer=layers, n_head=2, vocab_size=vocabulary, n_positions=n)
    model = GPT2LMHeadModel(sizes)
    model.train()
    before = torch.random.get_rng_state()
    ids = torch.zeros(batch, n, dtype=torch.long)
    forward = batch * (layers * 2 * (12 * n * d * d + 2 * n * n * d) + 2 * n * d * vocabulary)
    assert step_flops(model, {"input_ids": ids}) == 3 * forward
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert step_flops(model, {"input_ids": ids}) == 2 * forward, "no gradient of a weight"


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A10G", "fp32", 31.5e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA A1000", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(
    device: str, precision: str, expected: float | None
) -> None:
    assert peak_flops(device, precision) == expected


def test_no_name_hides_a_longer_one() -> None:
    names = [name for name, _ in PEAKS]
    assert all(peak_flops(name, "fp32") == peaks["fp32"] * 1e12 for name, peaks in PEAKS), names


def test_utilization_is_the_share_of_the_samples_at_the_peak() -> None:
    clock = iter([0.0, 2.0])
    counted = Throughput(lambda: next(clock), samples_at_peak=40.0)
    counted.add(tokens=100, samples=20)
    assert counted.rates()["perf/mfu"] == pytest.approx(0.25)
