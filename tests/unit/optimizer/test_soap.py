"""SOAP: its bases. Its steps are held against a recorded package, in `tests/reference`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optrun.optimizer import Soap
from optrun.optimizer.soap import eigenvectors, next_basis


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_basis_is_orthogonal_and_sorted_whatever_the_rank(rank: int) -> None:
    """And where little is known of it, it hangs on what is known, not on the last bits."""
    found = []
    for noise in (0.0, 1e-15):
        rows = drawn(7, rank) + noise * drawn(7, rank, seed=1)
        first = eigenvectors(rows @ rows.T)
        more = torch.cat([rows, 0.1 * drawn(7, 1, seed=2)], dim=1)
        second, order = next_basis(more @ more.T, first)
        for basis in (first, second):
            torch.testing.assert_close(
                basis.T @ basis, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-13
            )
        values = (first.T @ rows @ rows.T @ first).diagonal()
        assert (values.diff() <= 1e-13).all()
        assert sorted(order.tolist()) == list(range(7))
        assert torch.linalg.matrix_rank(second[:, : min(rank + 1, 7)].T @ more) == min(rank + 1, 7)
        found.append((first, second))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            (one.T @ other).abs(), torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-9
        )


def test_a_matrix_that_float32_cannot_take_is_taken_in_float64() -> None:
    """The first gradient of an embedding: few rows, of many sizes.

    LAPACK gives up on it here, in float32.
    """
    random = torch.Generator().manual_seed(0)
    rows = torch.zeros(512, 64)
    seen = torch.randint(512, (200,), generator=random)
    rows[seen] = (
        torch.randn(200, 64, generator=random) * 10 ** (-4 * torch.rand(1, generator=random)).item()
    )
    rows *= torch.rand(512, 1, generator=random) ** 6
    basis = eigenvectors(0.05 * rows @ rows.T)
    assert basis.dtype == torch.float32
    torch.testing.assert_close(basis.T @ basis, torch.eye(512), rtol=0, atol=1e-5)
    sizes = (rows.T @ basis).norm(dim=0)
    torch.testing.assert_close(sizes[:64], torch.linalg.svdvals(rows)[:64], rtol=0, atol=1e-4)


def trained(steps: int, noise: float = 0.0, **options: Any) -> tuple[Tensor, Soap]:
    weight = torch.nn.Parameter(drawn(6, 9))
    optimizer = Soap([("w", weight)], lr=0.05, **options)
    for step in range(steps):
        weight.grad = (
            drawn(6, 2, seed=step)
            @ drawn(2, 9, seed=100 + step)
            * (1 + noise * drawn(6, 9, seed=7))
        )
        optimizer.step()
    return weight.detach(), optimizer


def test_rounding_of_the_gradients_leads_nowhere_else() -> None:
    """Gradients of rank 2: of a 9 x 9 preconditioner, two vectors are known at first."""
    straight, _ = trained(6, precondition_frequency=2)
    rounded, _ = trained(6, noise=1e-15, precondition_frequency=2)
    torch.testing.assert_close(rounded, straight, rtol=0, atol=1e-6)


def test_the_first_gradient_makes_the_bases_and_moves_nothing() -> None:
    weight, optimizer = trained(1)
    assert torch.equal(weight, drawn(6, 9))
    (state,) = optimizer.state.values()
    assert [tuple(basis.shape) for basis in state["bases"].values()] == [(6, 6), (9, 9)]
    assert not state["exp_avg"].any()


def test_long_dimensions_and_vectors_are_left_as_they_are() -> None:
    for options, kept in (
        ({"max_precondition_dim": 6}, ["0"]),
        ({"max_precondition_dim": 0}, []),
        ({}, ["0", "1"]),
    ):
        _, optimizer = trained(1, **options)
        (state,) = optimizer.state.values()
        assert list(state.get("bases", {})) == kept
    for vectors in (False, True):
        bias = torch.nn.Parameter(torch.ones(3))
        optimizer = Soap([("bias", bias)], precondition_1d=vectors)
        bias.grad = torch.ones(3)
        optimizer.step()
        assert ("bases" in optimizer.state[bias]) == vectors
