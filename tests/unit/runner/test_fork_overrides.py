"""The configuration of a trunk as overrides: composed again it is the same.

Other choices bring their own values.
"""

from __future__ import annotations

import pytest

from optrun.base.errors import ConfigError
from optrun.config import saved, store
from optrun.config.hydra_internals import Hydra
from optrun.config.overrides import parse_checked
from optrun.runner.forks.overrides import (
    as_overrides,
    merge_trunk_overrides,
    refuse_other_data_position,
)


def composed(hydra: Hydra, *tokens: str) -> dict:
    whole = parse_checked(hydra, "config", list(tokens), sweep=False)
    return saved.plain(store.without_hydra(store.compose(hydra, "config", whole)))


TRUNKS = {
    "default": [],
    "lr": ["lr=3e-4", "optimizer=lamb", "optimizer.betas=[0.8,0.95]"],
    "dialect": [
        "optimizer=lamb",
        "optimizer.dialect=timm",
        "optimizer.weight_decay=0.3",
        "lr=1e-2",
    ],
    "rules": [
        "param_groups=layerwise",
        "param_groups.rules=[{pattern: 'wte|bias$', lr_scale: 0.1}]",
    ],
    "schedule": ["scheduler=multistep", "scheduler.milestones=[3,7]", "training.max_steps=9"],
    "sets": [
        "data=files",
        "data.train=a.txt",
        "data.eval={dev: 'b c.txt', hard: it.txt}",
        "clip=none",
    ],
    "architecture": [
        "model=from_config",
        "model.model_type=llama",
        "+model.config.hidden_size=64",
        "training.eval_steps=null",
    ],
    "removed": ["model=gpt_tiny", "~model.config.n_head"],
    "ranks": [
        "distributed=ddp",
        "training.nproc_per_node=2",
        "training.num_train_epochs=2.5",
        "seed=7",
    ],
    "text": ["task.prompt='it\\'s = a, [b] {c} $ @'", "run_name=oak"],
}

FAST = ("dialect", "sets")


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(TRUNKS[name], id=name, marks=[] if name in FAST else pytest.mark.slow)
        for name in TRUNKS
    ],
)
def test_composed_again_it_is_the_same(tokens: list[str]) -> None:
    hydra = store.open_hydra()
    values = composed(hydra, *tokens)
    again = composed(
        hydra, *merge_trunk_overrides(as_overrides(hydra, values, "trunk"), values, [])
    )
    assert {**again, "run_name": None} == {**values, "run_name": None}
    refuse_other_data_position(values, again, "trunk")


@pytest.mark.slow
def test_another_choice_brings_its_own_values() -> None:
    hydra = store.open_hydra()
    values = composed(
        hydra, "lr=3e-4", "optimizer.weight_decay=0.3", "training.max_steps=9", "distributed=ddp"
    )
    trunk = as_overrides(hydra, values, "trunk")

    def branch(*typed: str) -> dict:
        return composed(hydra, *merge_trunk_overrides(trunk, values, list(typed)))

    assert branch("optimizer=lamb")["lr"] == 2e-2
    assert branch("optimizer=lamb", "lr=1e-5")["lr"] == 1e-5
    same = branch("optimizer=adamw", "optimizer.eps=1e-6")
    assert (same["lr"], same["optimizer"]["weight_decay"], same["optimizer"]["eps"]) == (
        3e-4,
        0.3,
        1e-6,
    )
    longer = branch("training.num_train_epochs=3")["training"]
    assert (longer["max_steps"], longer["num_train_epochs"]) == (None, 3)
    assert branch("distributed=none")["training"]["nproc_per_node"] == "auto"
    with pytest.raises(ConfigError, match=r"seed=1 \(the trunk: 0\)"):
        refuse_other_data_position(values, branch("seed=1"), "trunk")
