"""Each answer of the table of foreign names leads to something that is there."""

from __future__ import annotations

import dataclasses
import re

import pytest

from optrun.cli import export, predict
from optrun.config import foreign_names, keys, store
from optrun.config.groups import GROUPS
from optrun.config.schema.run import RunConfig

TABLE = foreign_names.table()
ANSWERS = {
    **TABLE["keys"],
    **TABLE["optimizer_options"],
    **{
        f"{group}={name}": answer
        for group, names in TABLE["choices"].items()
        for name, answer in names.items()
    },
}
WORDS = {name: answer for name, answer in ANSWERS.items() if not answer.startswith("not offered: ")}
REASONS = [answer for name, answer in ANSWERS.items() if name not in WORDS]


@pytest.fixture(scope="module")
def known_keys() -> set[str]:
    """Dotted keys of any choice, Hydra's among them."""
    composed = store.compose(store.open_hydra(), "config", ["hydra/sweeper=optuna"])
    names = {*keys.all_keys(composed), *(field.name for field in dataclasses.fields(RunConfig))}
    return names.union(*(keys.keys_of(group) for group in GROUPS))


def test_every_key_in_an_answer_exists(known_keys: set[str]) -> None:
    named = {word.partition("=")[0] for answer in WORDS.values() for word in answer.split()}
    assert named - known_keys == set()


def test_every_choice_in_an_answer_exists() -> None:
    text = " ".join(ANSWERS.values())
    named = re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=(\w+)", text)
    assert {("adapter", "lora"), ("distributed", "fsdp"), ("optimizer", "NAME")} <= set(named)
    assert [
        (group, choice)
        for group, choice in named
        if choice not in GROUPS[group] and choice != "NAME"
    ] == []


def test_every_key_in_a_reason_exists(known_keys: set[str]) -> None:
    pattern = rf"(?<!/)\b(?:(?:{'|'.join(GROUPS)})\.[a-z_]+|hydra\.[a-z_.]*[a-z_])\b"
    named = set(re.findall(pattern, " ".join(REASONS)))
    assert "hydra.sweep.dir" in named
    assert {name for name in named if not name.startswith("model.config.")} - known_keys == set()


def test_verbs_in_a_reason_take_their_words() -> None:
    text = " ".join(REASONS)
    assert set(re.findall(r"optrun ([a-z]+) RUN_DIR", text)) == {"evaluate", "export", "predict"}
    assert "push_to_hub=NAME" in export.parser().format_help()
    assert "out=FILE" in predict.parser().format_help()


def test_each_name_is_answered_wherever_it_is_typed() -> None:
    """`learning_rate=1e-3`, `trainer.learning_rate=1e-3`, `--learning-rate 1e-3`."""
    composed = store.compose(store.open_hydra(), "config", [])
    for name in TABLE["keys"]:
        if "." in name:
            continue
        assert keys.translate_option(f"--{name.replace('_', '-')}").strip()
        for key in (name, f"trainer.{name}"):
            message = str(keys.unknown_key(composed, key))
            assert "Here it is called " in message or "Not offered" in message
