"""Clips.

Against torch, with sparse gradients, opt-outs, groups, and the global norm computed once.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.clip import SCHEMAS
from optrun.optimizer.clip import build_clip
from optrun.optimizer.clip import gradients as clip_gradients


def _params(*grads: Tensor | None) -> list[torch.nn.Parameter]:
    params = []
    for grad in grads:
        shape = (1,) if grad is None else tuple(grad.shape)
        dtype = torch.float32 if grad is None else grad.dtype
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = None if grad is None else grad.clone()
        params.append(param)
    return params


def _grads(params: list[torch.nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _sgd(params: list[torch.nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD([(f"p{index}", param) for index, param in enumerate(params)])


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_global_norm_is_torchs(scale: float) -> None:
    grads = [scale * torch.randn(shape) for shape in ((3, 4), (5,), ())]
    ours, theirs = _params(*grads, None), _params(*grads, None)
    norm = build_clip("global_norm")(_sgd(ours))
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(norm, expected)
    assert norm.shape == ()
    for mine, other in zip(_grads(ours), _grads(theirs), strict=True):
        torch.testing.assert_close(mine, other)


def test_none_measures_and_touches_nothing() -> None:
    params = _params(torch.tensor([3.0]), torch.tensor([4.0]))
    assert build_clip("none")(_sgd(params)) == 5.0
    assert _grads(params) == [torch.tensor([3.0]), torch.tensor([4.0])]
    assert build_clip("none")(_sgd(_params(None))) == 0.0


def test_norm_takes_each_tensor_alone() -> None:
    params = _params(torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4]), torch.zeros(2))
    assert build_clip("norm", max_norm=1.0, eps=0.0)(_sgd(params)) == pytest.approx(25.25**0.5)
    for grad, expected in zip(_grads(params), ([0.6, 0.8], [0.3, 0.4], [0.0, 0.0]), strict=True):
        torch.testing.assert_close(grad, torch.tensor(expected))


@pytest.mark.parametrize("name", ["global_norm", "norm"])
def test_value_then_norm(name: str) -> None:
    params = _params(torch.tensor([3.0, -4.0, 0.5]))
    norm = build_clip(name, max_norm=1.0, eps=0.0, max_value=2.0, min_value=-1.0)(_sgd(params))
    assert norm == pytest.approx(25.25**0.5)  # before anything was changed
    clamped = torch.tensor([2.0, -1.0, 0.5])
    torch.testing.assert_close(_grads(params)[0], clamped / clamped.norm())


def test_sparse_gradients_count_repeated_rows_as_their_sum() -> None:
    table = torch.nn.Parameter(torch.zeros(4, 2))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]),
        torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]]),
        (4, 2),
        check_invariants=True,
    )
    norm = build_clip("global_norm", max_norm=1.0, eps=0.0).clip_params([table])
    assert norm == 5.0
    assert table.grad.is_sparse
    torch.testing.assert_close(
        table.grad.to_dense()[[1, 3]], torch.tensor([[0.6, 0.0], [0.0, 0.8]])
    )
    build_clip("value", max_value=0.5).clip_params([table])
    torch.testing.assert_close(
        table.grad.to_dense()[[1, 3]], torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    )
    with pytest.raises(ValueError, match="a sparse gradient cannot be clipped"):
        build_clip("value", max_value=0.5, min_value=0.1).clip_params([table])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    params = _params(torch.full((1000,), 300.0, dtype=dtype), torch.ones(3))
    norm = build_clip("global_norm")(_sgd(params))
    assert norm.dtype is torch.float32
    assert norm == pytest.approx(
        (1000 * 300.0**2 + 3) ** 0.5, rel=1e-6
    )  # its square is beyond float16
    assert params[0].grad is not None
    assert params[0].grad.dtype is dtype


@pytest.mark.parametrize("name", ["global_norm", "norm"])
def test_norms_are_computed_once(name: str) -> None:
    params = _params(*(torch.randn(3) for _ in range(4)))
    with mock.patch.object(
        clip_gradients.torch, "_foreach_norm", wraps=torch._foreach_norm
    ) as norm:
        build_clip(name)(_sgd(params))
    assert norm.call_count == 1


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 5),
    max_norm=st.floats(1e-3, 1e3),
    name=st.sampled_from(["global_norm", "norm"]),
)
def test_nothing_is_longer_afterwards_and_directions_stay(
    seed: int, count: int, max_norm: float, name: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(count)]
    params = _params(*grads)
    build_clip(name, max_norm=max_norm, eps=0.0)(_sgd(params))
    for before, after in zip(grads, _grads(params), strict=True):
        ratio = after / before
        assert torch.allclose(ratio, ratio[0].expand(3))
        assert 0 < ratio[0] <= 1
        assert after.norm() <= max_norm * (1 + 1e-12)
    if name == "global_norm":
        assert torch.cat(_grads(params)).norm() <= max_norm * (1 + 1e-12)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("global", {}, "clip=global: no such choice. Did you mean global_norm"),
    (
        "global_norm",
        {"max_norm": 0.0},
        "clip.max_norm=0.0: expected a number above 0; to leave gradients alone: clip=",
    ),
    ("global_norm", {"max_norm": -1.0}, "clip.max_norm=-1.0"),
    ("norm", {"eps": -1.0}, "clip.eps=-1.0: expected a number of 0 or more"),
    ("norm", {"min_value": 0.1}, "clip.min_value=0.1: expected null where clip.max_value is null"),
    (
        "value",
        {"max_value": -1.0},
        "clip.max_value=-1.0: expected a number above 0 where clip.min_value is null",
    ),
    (
        "value",
        {"max_value": 1.0, "min_value": 2.0},
        "clip.min_value=2.0: expected at most clip.max_value=1.0",
    ),
    ("value", {"max_norm": 1.0}, "clip.max_norm: clip=value has no such key"),
    ("none", {"max_norm": 1.0}, "clip.max_norm: clip=none has no such key"),
]


@pytest.mark.parametrize(
    ("name", "options", "message"), REFUSED, ids=[f"{r[0]}-{n}" for n, r in enumerate(REFUSED)]
)
def test_refusals(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choice("clip", SCHEMAS, name, options)
