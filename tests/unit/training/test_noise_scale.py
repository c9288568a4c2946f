"""The noise scale is that of McCandlish et al. 2018, wherever the micro-batches of a step run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from optrun.training.noise_scale import NoiseScale, averaged, estimate, noise_scale
from tests.ranks import run_ranks
from tests.running import TINY_GPT, optrun, records, write_text


def test_noise_and_signal_are_estimated_without_bias() -> None:
    """Gradients of examples with a known mean and variance, in micro-batches of unequal size."""
    random = torch.Generator().manual_seed(0)
    mean, sizes = torch.full((50,), 0.1), (2, 3, 7)
    found = []
    for _ in range(4000):
        parts = [mean + torch.randn(size, 50, generator=random) for size in sizes]
        squares = [float(part.mean(0).square().sum()) for part in parts]
        found.append(estimate(squares, sizes, float(torch.cat(parts).mean(0).square().sum())))
    noise, signal = torch.tensor(found).mean(0).tolist()
    assert noise == pytest.approx(50, rel=0.02)
    assert signal == pytest.approx(0.5, rel=0.15)
    averages: list[float] = []
    for each in found:
        assert each is not None
        averages = averaged(averages, each)
    assert noise_scale(averages)["perf/noise_scale"] == pytest.approx(100, rel=0.5)
    assert noise_scale([1.0, -0.1]) == noise_scale([]) == {}
    assert estimate([1.0], [4], 1.0) is None


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def rows(number: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def alone(number: int) -> float:
    """The squared gradient norm of one micro-batch by itself."""
    other = model()
    other(rows(number)).square().mean().backward()
    return float(
        sum(param.grad.square().sum() for param in other.parameters() if param.grad is not None)
    )


def test_each_micro_batch_is_measured_by_itself() -> None:
    network = model()
    measured = NoiseScale(network.parameters())
    for number, factor in ((1, 0.25), (2, 3.0)):
        (network(rows(number)).square().mean() * factor).backward()
        assert float(measured.take(factor)) == pytest.approx(alone(number), rel=1e-5)


def test_sparse_gradients_count() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    measured = NoiseScale(table.parameters())
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert float(measured.take(1.0)) == pytest.approx(3 * (2**2 + 1))


def of_a_rank(rank: int) -> None:
    network = DistributedDataParallel(model())
    measured = NoiseScale(network.module.parameters())
    network(rows(rank)).square().mean().backward()
    assert float(measured.take(1.0)) == pytest.approx(alone(rank), rel=1e-5)


@pytest.mark.slow
def test_a_rank_is_measured_before_its_gradient_is_averaged(tmp_path: Path) -> None:
    run_ranks(tmp_path, of_a_rank)


def test_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two micro-batches measure it; it changes no other number.

    One micro-batch and fsdp are refused.
    """
    monkeypatch.chdir(tmp_path)
    words = [
        *TINY_GPT,
        "data=files",
        f"data.train={write_text(tmp_path)}",
        "training.max_steps=4",
        "checkpoint=none",
    ]
    words += [
        "training.logging_steps=2",
        "training.per_device_train_batch_size=4",
        "data.max_eval_examples=4",
    ]
    two, on = "training.gradient_accumulation_steps=2", "training.noise_scale=true"
    assert (
        optrun(*words, two, on, "hydra.run.dir=on") == optrun(*words, two, "hydra.run.dir=off") == 0
    )
    lines = map(json.loads, Path("on/metrics.jsonl").read_text().splitlines())
    assert any(line.get("perf/noise_scale", 0) > 0 for line in lines)
    assert "noise_scale" not in Path("off/metrics.jsonl").read_text()
    assert records(Path("on")) == records(Path("off"))
    assert optrun(*words, on) == optrun(*words, two, on, "distributed=fsdp") == 2
    said = capsys.readouterr().err
    for fact in ("one micro-batch", "training.gradient_accumulation_steps=2", "distributed=fsdp"):
        assert fact in said
