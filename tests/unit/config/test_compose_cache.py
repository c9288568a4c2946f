"""The tests' own copies of compositions are what Hydra composes, and nobody else's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from optrun.config import store
from optrun.config.hydra_internals import get_omega_conf_dumper


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


def same(node: Any, copied: Any) -> None:
    """Hold a copied node, and those below it, against the one it is of.

    Fields, types, flags, and the way up.
    """
    assert type(node) is type(copied)
    assert node is not copied
    assert vars(node._metadata) == vars(copied._metadata)
    assert node._metadata.flags is not copied._metadata.flags
    assert vars(node).keys() == vars(copied).keys()
    content, below = node._value(), copied._value()
    if not isinstance(content, dict | list):
        assert content == below
        return
    assert content is not below
    assert list(content) == list(below) if isinstance(content, dict) else len(content) == len(below)
    for key in content if isinstance(content, dict) else range(len(content)):
        same(content[key], below[key])
        assert below[key]._get_parent() is copied


@pytest.mark.parametrize(
    "words", [["optimizer=lamb"], ["data=mixture", "data.mixture={a: {train: [a.txt, b.txt]}}"]]
)
def test_a_copied_tree_and_its_text_are_those_of_omegaconf(words: list[str]) -> None:
    cfg = store.compose(store.open_hydra(), "config", [*words, "run_name='a: \u00fc # b'"])
    copied = copy.deepcopy(cfg)
    same(cfg, copied)
    assert copied == cfg
    python = type(
        "Python", (yaml.Dumper,), {"yaml_representers": get_omega_conf_dumper().yaml_representers}
    )
    plain = OmegaConf.to_container(cfg, enum_to_str=True)
    assert OmegaConf.to_yaml(cfg) == yaml.dump(
        plain, allow_unicode=True, sort_keys=False, Dumper=python
    )


def test_a_folder_of_ones_own_is_read_anew(tmp_path: Path) -> None:
    recipe = tmp_path / "optimizer" / "mine.yaml"
    recipe.parent.mkdir()
    for eps in (1e-3, 1e-4):
        recipe.write_text(f"defaults: [lamb, _self_]\neps: {eps}\n")
        assert (
            store.compose(
                store.open_hydra(str(tmp_path)), "config", ["optimizer=mine"]
            ).optimizer.eps
            == eps
        )
