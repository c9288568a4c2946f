"""What code of others gives where a number is expected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from optrun.base.errors import OptrunError
from optrun.task.evaluation import require_number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("good", "'good'"),
        ("0.5", "'0.5'"),
        (None, "None"),
        ({"a": 1}, "{'a': 1}"),
        (np.ones((6, 1)), "shape (6, 1)"),
    ],
)
def test_a_metric_that_gives_no_number(value: object, shown: str) -> None:
    with pytest.raises(OptrunError) as refused:
        require_number(value, "task.metrics: mine")
    for fact in ("task.metrics: mine gave", shown, "expected one number"):
        assert fact in str(refused.value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_what_is_a_number(value: object) -> None:
    assert require_number(value, "") == 0.5
    assert math.isnan(require_number(math.nan, ""))
