"""The tests' own copies of compositions are what Hydra composes, and nobody else's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from optrun.config import store


def test_a_copy_is_what_was_composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["optimizer=lamb", "lr=3e-3", "hydra.job.num=7"]
    first = store.compose(store.open_hydra(), "config", words)
    kept = copy.deepcopy(first)
    first.lr = 1.0
    monkeypatch.chdir(tmp_path)
    second = store.compose(store.open_hydra(), "config", words)
    assert second.hydra.runtime.cwd == str(Path.cwd())
    assert OmegaConf.get_type(second) is OmegaConf.get_type(kept)
    assert OmegaConf.is_struct(second)
    second.hydra.runtime.cwd = kept.hydra.runtime.cwd
    assert OmegaConf.to_yaml(second) == OmegaConf.to_yaml(kept)
    assert store.compose(store.open_hydra(), "config", ["optimizer=lamb"]).lr != 3e-3


def test_a_folder_of_ones_own_is_read_anew(tmp_path: Path) -> None:
    recipe = tmp_path / "optimizer" / "mine.yaml"
    recipe.parent.mkdir()
    for eps in (1e-3, 1e-4):
        recipe.write_text(f"defaults: [lamb, _self_]\neps: {eps}\n")
        assert store.compose(store.open_hydra(str(tmp_path)), "config", ["optimizer=mine"]).optimizer.eps == eps
