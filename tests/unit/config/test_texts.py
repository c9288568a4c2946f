"""A key that takes a text takes what was typed, and the name of a group is no key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from omegaconf.errors import InterpolationResolutionError

from optrun.base.errors import ConfigError
from optrun.config import literal, overrides, store
from optrun.config.compose import compose_line, compose_request
from optrun.config.compose_errors import interpolation_error
from optrun.config.groups import GROUPS
from optrun.config.request import CommandLine
from optrun.config.schema.run import RunConfig
from optrun.config.types import expected_type

TYPED = ["1_0", "1234567e8", "1e400", "1e5", "007", "-3", ".5", "true", "False", "nan", "10"]


def text_keys() -> list[str]:
    """Keys of any choice that take a text or a list of texts."""
    keys = [
        f"{group}.{name}"
        for group, schemas in GROUPS.items()
        for schema in schemas.values()
        for name, hint in get_type_hints(schema).items()
        if name in schema.__dataclass_fields__ and literal._is_text(hint)
    ]
    top = [name for name, hint in get_type_hints(RunConfig).items() if literal._is_text(hint)]
    places = ["hydra.run.dir", "hydra.sweep.dir", "data.train", "data.eval", "model.path"]
    return [key for key in dict.fromkeys([*keys, *top, *places]) if literal.takes_text(key)]


def test_every_text_key_takes_what_was_typed() -> None:
    keys = text_keys()
    assert {"data.text_column", "data.revision", "run_name", "tracking.project"} <= set(keys)
    assert len(keys) > 30
    for key in keys:
        for text in TYPED:
            override = overrides.parse([f"{key}={text}"])[0]
            assert str(override.value()) == text, key
            listed = overrides.parse([f"{key}=[a,{text}]"])[0]
            assert list(map(str, listed.value())) == ["a", text], key


def test_several_texts_of_a_sweep() -> None:
    _, token = overrides.parse_checked(
        store.open_hydra(), "config", ["data=files", "data.text_column=1_0,b,1e5"], sweep=True
    )
    (override,) = overrides.parse([token])
    assert overrides.values_of(override) == ["'1_0'", "b", "'1e5'"]


def test_numbers_stay_numbers() -> None:
    config = compose_request(
        store.open_hydra(), CommandLine(overrides=["lr=1e-3", "seed=1_0", "run_name=null"])
    ).config
    assert (config.lr, config.seed, config.run_name) == (1e-3, 10, None)


def test_the_program_sees_the_text() -> None:
    line = CommandLine(
        overrides=[
            *("data=files", "data.text_column=1_0", "data.label_column=-3"),
            *("hydra.run.dir=1e5", "run_name=1e400"),
        ]
    )
    _, cfg = compose_line(store.open_hydra(), line)
    assert (cfg.data.text_column, cfg.data.label_column) == ("1_0", "-3")
    assert (cfg.hydra.run.dir, cfg.run_name) == ("1e5", "1e400")


@pytest.mark.parametrize(
    ("token", "advice"),
    [
        ("optimizer.name=lamb", "Did you mean optimizer=lamb?"),
        ("optimizer.name=Lamb", "Did you mean optimizer=lamb?"),
        ("++optimizer.name=sophia", "Did you mean optimizer=soap?"),
        ("model.name=gpt2-large", "Did you mean model=pretrained model.path=gpt2-large?"),
        ("task.name=ner", "Did you mean task=token_classification?"),
    ],
)
def test_a_name_is_no_key(token: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides.parse_checked(store.open_hydra(), "config", [token], sweep=False)
    assert token in str(refused.value)
    assert advice in str(refused.value)


def test_the_name_of_every_group_is_refused() -> None:
    hydra = store.open_hydra()
    for group in GROUPS:
        with pytest.raises(ConfigError, match="is no key"):
            overrides.parse_checked(hydra, "config", [f"{group}.name=mine"], sweep=False)


def test_what_hydra_alone_knows() -> None:
    with pytest.raises(ConfigError, match="Hydra knows its value only after this check"):
        compose_request(
            store.open_hydra(), CommandLine(overrides=["run_name=${hydra:runtime.cwd}"])
        )


def test_without_assertions_hydra_reads_no_function(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optrun", "-m", "seed=range(0,2)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "PYTHONOPTIMIZE" in done.stderr


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("optimizer: {name: sophia}", 2, "- override optimizer: NAME"),
        ("run_name: 1_0", 2, "Quote it: '1_0'"),
        ("tracking:\n  name: mine", 3, "- override tracking: NAME"),
        ("data:\n  max_length: 16\nrun_name: 1e5", 4, "Quote it: '1e5'"),
    ],
)
def test_the_same_in_a_recipe(text: str, line: int, advice: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [config, _self_]\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        store.compose(store.open_hydra(str(tmp_path)), "mine", [])
    assert f"mine.yaml, line {line}: " in str(refused.value)
    assert advice in str(refused.value)


def test_plain_numbers_and_quoted_texts_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nrun_name: 10\n")
    assert store.compose(store.open_hydra(str(tmp_path)), "mine", []).run_name == "10"
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nrun_name: '1_0'\n")
    assert store.compose(store.open_hydra(str(tmp_path)), "mine", []).run_name == "1_0"


def test_the_refusal_of_a_resolver_is_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        compose_request(store.open_hydra(), CommandLine(overrides=["lr=${times:fast,2}"]))
    assert str(refused.value) == (
        "lr=${times:fast,2}: the resolver times takes two numbers, ${times:A,B}, and got fast and"
        " 2."
    )


def test_a_resolver_with_too_many_values_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        compose_request(store.open_hydra(), CommandLine(overrides=["lr=${dialect:1,2}"]))
    assert str(refused.value) == (
        "lr=${dialect:1,2}: the resolver dialect takes one value: ${dialect:DEFAULT}."
    )


def test_a_refusal_with_a_cause_of_its_own_is_shown() -> None:
    refusal = ConfigError("lr=fast: expected a number above 0.")
    refusal.__cause__ = ValueError("could not convert string to float: 'fast'")
    error = InterpolationResolutionError("ConfigError raised while resolving interpolation")
    error.__cause__ = refusal
    assert str(interpolation_error(None, error)) == str(refusal)


def test_an_error_without_text_gets_its_class_as_the_expected_type() -> None:
    assert expected_type(ValueError("")) == "another type (ValueError)"
