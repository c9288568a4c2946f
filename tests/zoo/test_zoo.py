"""Grouping over the architectures of transformers.

A sample always, all of them with few blocks as a long proof.

Which side of the blocks a parameter lies on is held against the order in which modules are called,
noted by hooks.
"""

from __future__ import annotations

import os

import pytest
from torch import nn

from tests.zoo.zoo import SAMPLE, build, build_small, examine, model_types, part_of

PARTS = 2
"""Of all architectures, so that two processes share the longest proof of all."""
EVERY_BLOCK = bool(os.environ.get("OPTRUN_EVERY_BLOCK"))
FEW = 2, 4
"""Blocks of each tower, where a model builds and runs with as many.

Two, or as many kinds of blocks as most have.
"""
WHOLE = ("bert", "convnextv2", "gpt2", "qwen3", "t5", "whisper")
"""Types of the sample with all their blocks, of which most have more than ten."""
DEEP = (
    *(
        "bailing_hybrid",
        "gemma3n_text",
        "hrm_text",
        "jamba",
        "kimi_linear",
        "nemo_speechlm",
        "neomme",
        "prophetnet",
    ),
    *("xlstm", "zamba", "zamba2"),
)
"""Types that build, or run, with all of their blocks alone."""


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample(model_type: str) -> None:
    model = build(model_type, None if model_type in WHOLE else max(FEW))
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
    for model_type in part_of(model_types(), part, PARTS):
        model = (
            build(model_type)
            if EVERY_BLOCK or model_type in DEEP
            else build_small(model_type, *FEW)
        )
        if isinstance(model, str):
            continue
        built += 1
        try:
            row = examine(model_type, model, fills_row=False)
            refused += bool(row.message)
            ran += bool(row.used)
        except AssertionError as error:
            wrong.append(f"{model_type}: {error}")
    assert not wrong, "\n".join(wrong)
    assert built > 400 / PARTS
    assert refused <= 10 / PARTS
    assert ran > 400 / PARTS
