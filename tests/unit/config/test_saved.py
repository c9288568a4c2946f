"""A saved configuration taken up again, with changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from optrun.base.errors import ConfigError
from optrun.config import saved, store
from optrun.config.overrides import parse_checked
from optrun.config.yaml_files import unreadable


def composed(*words: str) -> dict:
    return saved.plain(
        store.without_hydra(store.compose(store.open_hydra(), "config", list(words)))
    )


def test_no_change_is_no_difference() -> None:
    values = composed("optimizer=lamb", "lr=2e-3")
    again = saved.plain(saved.changed(store.open_hydra(), saved.with_schemas(values, "here"), []))
    assert saved.differences(values, again) == {}


def test_values_and_choices_change() -> None:
    values = composed("optimizer=lamb", "lr=2e-3")
    words = ["lr=1e-3", "scheduler=constant", "model.config.n_layer=3", "optimizer=lamb"]
    after = saved.plain(
        saved.changed(store.open_hydra(), saved.with_schemas(values, "here"), words)
    )
    found = saved.differences(values, after)
    assert found["lr"] == (2e-3, 1e-3)
    assert found["scheduler.name"] == ("cosine", "constant")
    assert found["model.config.n_layer"] == (2, 3)
    assert not [key for key in found if key.startswith("optimizer.")], (
        "the same choice keeps the values it was given"
    )


def test_an_element_of_a_list_is_changed_by_its_number(tmp_path: Path) -> None:
    """On a fresh line and on one that goes on; a number that the list does not have is no key."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nparam_groups: {rules: [{pattern: bias, weight_decay: 0.0}]}\n"
    )
    hydra, words = store.open_hydra(str(tmp_path)), ["param_groups.rules.0.weight_decay=0.5"]
    fresh = store.compose(hydra, "mine", parse_checked(hydra, "mine", words, sweep=False))
    assert fresh.param_groups.rules == [{"pattern": "bias", "weight_decay": 0.5}]
    before = saved.plain(store.without_hydra(store.compose(hydra, "mine", [])))
    after = saved.changed(hydra, saved.with_schemas(before, "here"), words)
    assert after.param_groups.rules == fresh.param_groups.rules
    with pytest.raises(ConfigError, match="no such key"):
        parse_checked(hydra, "mine", ["param_groups.rules.1.weight_decay=0.5"], sweep=False)


@pytest.mark.parametrize(
    "word",
    [
        "model.config={n_layer: 1}",
        "data.eval={held: a.txt}",
        "data.eval={}",
        "param_groups.rules=[]",
    ],
)
def test_a_mapping_is_laid_over_the_saved_one_as_on_a_fresh_line(word: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, override data: files, _self_]\n"
        "data: {train: a.txt, eval: {near: b.txt}}\nmodel: {config: {n_head: 2}}\n"
    )
    hydra = store.open_hydra(str(tmp_path))
    before = saved.plain(store.without_hydra(store.compose(hydra, "mine", [])))
    after = saved.plain(saved.changed(hydra, saved.with_schemas(before, "here"), [word]))
    overrides = parse_checked(hydra, "mine", [word], sweep=False)
    fresh = store.without_hydra(store.compose(hydra, "mine", overrides))
    assert after == saved.plain(fresh)


def test_a_warmup_in_steps_takes_the_place_of_the_usual_share() -> None:
    """As on a fresh line: the share was written down by optrun, not by the user."""
    values = composed()
    assert values["scheduler"]["warmup_ratio"] == 0.05
    after = saved.changed(
        store.open_hydra(), saved.with_schemas(values, "here"), ["scheduler.num_warmup_steps=7"]
    )
    assert (after.scheduler.num_warmup_steps, after.scheduler.warmup_ratio) == (7, None)


@pytest.mark.parametrize(
    ("word", "piece"),
    [
        ("lr=abc", "a number"),
        ("optimizer=lam", "lamb"),
        ("optimizer.foo=1", "no such key"),
        ("lr=1,2", "sweep"),
    ],
)
def test_wrong_words_are_refused(word: str, piece: str) -> None:
    tree = saved.with_schemas(composed(), "here")
    with pytest.raises(ConfigError, match=piece):
        saved.changed(store.open_hydra(), tree, [word])


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        saved.read_config(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="no valid YAML"):
        saved.read_config(path)
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        saved.read_config(path)
    with pytest.raises(ConfigError, match="group"):
        saved.with_schemas({"lr": 1.0}, "here")
    values = composed()
    values["optimizer"]["surprise"] = 1
    with pytest.raises(ConfigError, match="surprise"):
        saved.with_schemas(values, "here")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ValueError(), "a.yaml: ValueError."),
        (yaml.MarkedYAMLError(context="in a mapping"), "no valid YAML: in a mapping."),
    ],
)
def test_an_error_without_text_names_its_kind(error: Exception, problem: str) -> None:
    assert problem in str(unreadable(Path("a.yaml"), error))
