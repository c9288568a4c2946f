"""Grouping over the architectures of transformers: a sample always, all of them with few blocks as a long proof.

Which side of the blocks a parameter lies on is held against the order in which modules are called, noted by hooks.
"""

from __future__ import annotations

import os

import pytest
from torch import nn

from tests.zoo.zoo import SAMPLE, Row, build, examine, model_types

PARTS = 2
"""Of all architectures, so that two processes share the longest proof of all."""
DEPTHS = (None,) if os.environ.get("OPTRUN_EVERY_BLOCK") else (4, None)
"""Blocks of each tower that are tried in turn: all of them where a model neither builds nor runs with four."""


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample(model_type: str) -> None:
    model = build(model_type)
    assert isinstance(model, nn.Module), model
    row = examine(model_type, model)
    assert not row.message
    assert row.norms > 0
    assert row.towers
    assert row.used, row.not_run


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_architecture(part: int) -> None:
    wrong: list[str] = []
    built = refused = ran = 0
    for model_type in model_types()[part::PARTS]:
        try:
            row = _examined(model_type)
        except AssertionError as error:
            wrong.append(f"{model_type}: {error}")
            continue
        built += row is not None
        refused += row is not None and bool(row.message)
        ran += row is not None and bool(row.used)
    assert not wrong, "\n".join(wrong)
    assert built > 400 / PARTS
    assert refused <= 10 / PARTS
    assert ran > 400 / PARTS


def _examined(model_type: str) -> Row | None:
    row = None
    for depth in DEPTHS:
        model = build(model_type, depth)
        if not isinstance(model, str):
            row = examine(model_type, model)
            if row.used:
                break
    return row
