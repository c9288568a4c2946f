"""`optimizer.dialect`.

What is given comes first, the rest is the package's, and a run holds plain values.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.dialects import DIALECTS, dialect_options
from optrun.config.saved import changed, plain, with_schemas
from optrun.optimizer import Lamb, build_optimizer
from optrun.optimizer.build import options_of
from tests.optimizer_cases import toy
from tests.running import composed, optrun


@functools.cache
def chosen(choice: str) -> DictConfig:
    return store.without_hydra(store.compose(store.open_hydra(), "config", [f"optimizer={choice}"]))


@pytest.mark.parametrize(
    ("choice", "dialect"), [(c, d) for c, presets in DIALECTS.items() for d in presets]
)
def test_a_preset_is_what_the_class_is_built_with(choice: str, dialect: str) -> None:
    tree = chosen(choice).copy()
    tree.optimizer.dialect = dialect
    config = store.typed(tree).optimizer
    by_file = build_optimizer(config, [{"params": list(toy().items())}], lr=0.1)
    by_name = build_optimizer(choice, [{"params": list(toy().items())}], lr=0.1, dialect=dialect)
    assert by_file.defaults == by_name.defaults


def test_what_is_given_comes_first(tmp_path: Path) -> None:
    """On the command line and in a file of the user's, also where it is optrun's own default."""
    given = composed(
        "optimizer=lamb",
        "optimizer.dialect=deepspeed",
        "optimizer.eps=1e-6",
        "optimizer.max_trust=null",
    )
    options = options_of(given.optimizer)
    assert (options["eps"], options["max_trust"], options["min_trust"]) == (1e-6, None, 0.01)
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text(
        "defaults: [lamb, _self_]\nname: mine\ndialect: pytorch_optimizer\nmax_param_norm: 3.0\n"
    )
    own = store.typed(
        store.without_hydra(
            store.compose(store.open_hydra(str(tmp_path)), "config", ["optimizer=mine"])
        )
    )
    options = options_of(own.optimizer)
    assert (options["max_param_norm"], options["bias_correction"]) == (3.0, "lr_first")


def test_keras_adds_its_own_eps() -> None:
    assert (
        dialect_options("lamb", "keras")["eps"] == dialect_options("adamax", "keras")["eps"] == 1e-7
    )


def test_the_lists_of_the_model_garden_are_one() -> None:
    words = [
        "optimizer=lamb",
        "optimizer.dialect=tensorflow",
        "optimizer.exclude_from_weight_decay=[bias]",
    ]
    assert options_of(composed(*words).optimizer)["exclude_from_layer_adaptation"] == ["bias"]
    apart = composed(*words, "optimizer.exclude_from_layer_adaptation=[norm]").optimizer
    assert options_of(apart)["exclude_from_layer_adaptation"] == ["norm"]
    assert dialect_options("lamb", "tensorflow", exclude_from_weight_decay=["b"])[
        "exclude_from_layer_adaptation"
    ] == ["b"]


def test_a_saved_run_holds_values_and_keeps_its_dialect() -> None:
    hydra = store.open_hydra()
    words = ["optimizer=lamb", "optimizer.dialect=optax"]
    saved = with_schemas(plain(store.without_hydra(store.compose(hydra, "config", words))), "a run")
    assert saved.optimizer.step_count.value == "optimizer"
    same = changed(hydra, saved, ["optimizer.dialect=optax", "optimizer.eps=1e-4"])
    assert same.optimizer.eps == 1e-4
    with pytest.raises(
        ConfigError,
        match=r"timm: the run began with optimizer.dialect=optax and saved the value of",
    ):
        changed(hydra, saved, ["optimizer.dialect=timm"])
    other = changed(hydra, saved, ["optimizer=adamax", "optimizer.dialect=torch"])
    assert other.optimizer.eps_form.value == "gradient"


@pytest.mark.parametrize(
    ("choice", "dialect", "facts"),
    [
        ("lamb", "deepsped", ["optimizer.dialect=deepsped", "Did you mean deepspeed"]),
        ("adamw", "timm", ["adamw has no such dialect", "It belongs to optimizer=lamb"]),
        ("adamax", "zzz", ["expected", "keras"]),
    ],
)
def test_a_dialect_that_is_not_there(choice: str, dialect: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(f"optimizer={choice}", f"optimizer.dialect={dialect}")
    assert all(fact.lower() in str(refused.value).lower() for fact in facts)
    with pytest.raises(ConfigError, match="has no dialects"):
        dialect_options("sgd", "torch")


def test_a_keyword_of_a_package_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("--cfg", "job", "optimizer=lamb", "optimizer.epsilon=1e-8") == 2
    assert "Here it is called optimizer.eps." in capsys.readouterr().err
    with pytest.raises(TypeError, match=r"no option 'epsilon'.*called eps"):
        Lamb.from_config(toy().items(), {"epsilon": 3.0})
    for option in ("maximize", "capturable", "differentiable"):
        with pytest.raises(TypeError, match=f"Lamb has no option '{option}'. Not offered: "):
            Lamb(toy().items(), **{option: True})
    with pytest.raises(
        TypeError, match=r"lr=tensor\(0.1000\): expected a number of 0 or more.*lr\.item\(\)"
    ):
        Lamb(toy().items(), lr=torch.tensor(0.1))
