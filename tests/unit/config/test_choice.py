"""A configuration from Python is held to the types and ranges that the command line is held to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema import clip, param_groups, scheduler

GROUPS = {
    "clip": clip.SCHEMAS,
    "param_groups": param_groups.SCHEMAS,
    "scheduler": scheduler.SCHEMAS,
}


@pytest.mark.parametrize(
    ("group", "name", "options", "said"),
    [
        (
            "param_groups",
            "layerwise",
            {"decay_rate": "a"},
            "param_groups.decay_rate='a': expected a number, got str",
        ),
        ("param_groups", "layerwise", {"decay_rate": [0.9]}, "expected a number, got list"),
        (
            "param_groups",
            "layerwise",
            {"n_layers": 2.5},
            "param_groups.n_layers=2.5: expected a whole number",
        ),
        ("param_groups", "standard", {"decay_embeddings": "perhaps"}, "expected true or false"),
        ("param_groups", "standard", {"rules": 3}, "expected a list"),
        ("scheduler", "cosine", {"num_warmup_steps": "many"}, "scheduler.num_warmup_steps='many'"),
        ("clip", "global_norm", {"max_norm": None}, "expected a value, not null"),
    ],
)
def test_wrong_types_are_named(group: str, name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as refusal:
        choice(group, GROUPS[group], name, options)
    assert said in str(refusal.value)


def test_a_range_is_a_value_error() -> None:
    with pytest.raises(ConfigError, match=r"param_groups\.decay_rate=-1"):
        choice("param_groups", param_groups.SCHEMAS, "layerwise", {"decay_rate": -1})


def test_numbers_of_any_kind_pass() -> None:
    made = choice(
        "param_groups",
        param_groups.SCHEMAS,
        "layerwise",
        {"decay_rate": np.float64(0.5), "n_layers": 3},
    )
    assert (made.decay_rate, made.n_layers) == (0.5, 3)
    made = choice("param_groups", param_groups.SCHEMAS, "layerwise", {"decay_rate": "0.5"})
    assert made.decay_rate == 0.5
