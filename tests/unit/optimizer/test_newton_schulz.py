"""Newton-Schulz iterations without arithmetic for bfloat16 are torch's.

But for the order of sums.
"""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from optrun.optimizer import newton_schulz

NUMBERS = (3.4445, -4.7750, 2.0315), 5, 1e-7


def without_rounding(update: torch.Tensor) -> torch.Tensor:
    (a, b, c), steps, _ = NUMBERS
    x = update.double().T if update.size(0) > update.size(1) else update.double()
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.size(0) > update.size(1) else x


@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64), (1, 4096), (80, 52)])
def test_as_near_to_the_truth_as_torch(shape: tuple[int, int]) -> None:
    update = torch.randn(shape).bfloat16()
    kept = update.clone()
    ours, theirs = (
        newton_schulz.by_float32(update, *NUMBERS),
        _zeropower_via_newtonschulz(update.clone(), *NUMBERS),
    )
    assert torch.equal(update, kept)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    truth = without_rounding(update)
    error, of_torch = ((found.double() - truth).norm() / truth.norm() for found in (ours, theirs))
    assert error < max(1.1 * of_torch, 2**-8)
    assert (
        ours.double() - theirs.double()
    ).norm() < 2 * of_torch * truth.norm() + 2**-8 * truth.norm()


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not newton_schulz.by_float32(torch.zeros(64, 64, dtype=torch.bfloat16), *NUMBERS).any()


@pytest.mark.parametrize(
    ("capability", "rows", "own"), [("AVX2", 64, True), ("AVX2", 16, False), ("AVX512", 64, False)]
)
def test_where_it_is_used(
    capability: str, rows: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small matrices, and where the CPU has the arithmetic, the step is torch's bit for bit."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    update = torch.randn(rows, 64).bfloat16()
    found = newton_schulz.orthogonalize(update.clone(), *NUMBERS)
    wanted = newton_schulz.by_float32 if own else _zeropower_via_newtonschulz
    assert torch.equal(found, wanted(update.clone(), *NUMBERS))
