"""Every name of `TrainingArguments` and of hydra-optuna-sweeper is answered with its name here, or a reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import transformers
from omegaconf import DictConfig

from optrun.config import foreign_names as elsewhere
from optrun.config import keys, store
from optrun.config.groups import GROUPS
from optrun.config.schema.run import RunConfig
from optrun.errors import ConfigError
from tests.running import optrun

FIELDS = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
TABLES = {**elsewhere.SWEEPER, **elsewhere.HABITS, **elsewhere.TRAINING_ARGUMENTS}
# The configuration dataclasses of hydra-optuna-sweeper 1.2, below hydra.sweeper.
PLUGIN = (
    "direction", "storage", "study_name", "n_trials", "n_jobs", "max_failure_rate", "params", "search_space",
    "custom_search_space", "sampler.seed", "sampler._target_", "sampler.n_startup_trials", "sampler.n_ei_candidates",
    "sampler.multivariate", "sampler.consider_prior", "sampler.sigma0", "sampler.population_size", "sampler.qmc_type",
)  # fmt: skip
YET = (
    "label_smoothing_factor",
    "global_batch_size",
    "nproc_per_node",
)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    return store.compose(store.open_hydra(), "config", ["hydra/sweeper=optuna"])


@pytest.fixture(scope="module")
def there(composed: DictConfig) -> set[str]:
    """Dotted keys under any choice, Hydra's among them."""
    found = {*keys.all_keys(composed), *(field.name for field in dataclasses.fields(RunConfig))}
    return found.union(*(keys.keys_of(group) for group in GROUPS))


def test_every_field_of_the_installed_version_is_in_the_table() -> None:
    assert set(FIELDS) - set(elsewhere.TRAINING_ARGUMENTS) == set()


def test_every_counterpart_exists(there: set[str]) -> None:
    named = {name: found.partition("=")[0] for name, found in TABLES.items() if not found.startswith("not offered")}
    assert {name: key for name, key in named.items() if key not in there} == {}


def test_a_reason_names_nothing_that_is_not_there(there: set[str]) -> None:
    """Keys in the sentences are keys, too."""
    reasons = " ".join(found for found in TABLES.values() if found.startswith("not offered"))
    groups = "|".join(GROUPS)
    named = set(re.findall(rf"\b(?:(?:{groups})\.[a-z_]+|hydra\.[a-z_.]*[a-z_])\b", reasons))
    assert named > {"training.logging_steps", "hydra.sweep.dir"}
    assert named - there == set()


@pytest.mark.parametrize("name", FIELDS)
def test_wherever_it_is_typed(name: str, composed: DictConfig) -> None:
    """`learning_rate=1e-3`, `training.learning_rate=1e-3`, `--learning_rate 1e-3`."""
    assert keys.as_key(f"--{name}=1").strip()
    assert keys.as_key(f"--{name.replace('_', '-')}").strip()
    known = keys.all_keys(composed)
    for key in (name, f"training.{name}", f"trainer.{name}"):
        if key in known:
            continue
        said = str(keys.unknown_key(composed, key))
        assert said.startswith(f"{key}: no such key. ")
        assert "Here it is called " in said or "Not offered" in said


@pytest.mark.parametrize("name", PLUGIN)
def test_habits_of_the_optuna_sweeper(name: str, composed: DictConfig) -> None:
    key, known = f"hydra.sweeper.{name}", keys.all_keys(composed)
    if key not in known:
        said = str(keys.unknown_hydra_key(known, key))
        assert "Here it is called " in said or "Not offered" in said


@pytest.mark.parametrize("name", YET)
def test_what_is_to_come_is_said_to_be_missing(name: str) -> None:
    assert keys.as_key(f"--{name}").startswith(" Not offered yet: ")


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["fsdp=full_shard"], ["fsdp: no such key", "Not offered yet"]),
        (["training.learning_rate=1e-3"], ["training.learning_rate", "called lr"]),
        (["--deepspeed", "x.json"], ["--deepspeed: no such option", "Not offered"]),
        (["explain", "--per-device-train-batch-size", "8"], ["written training.per_device_train_batch_size=VALUE"]),
        (["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize", "lr=1,2"], ["called checkpoint.mode"]),
        (["-m", "hydra/sweeper=optuna", "hydra.sweeper.study_name=x", "lr=1,2"], ["Not offered", "hydra.sweep.dir"]),
        (["-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=tpe", "lr=1,2"], ["written hydra.sweeper.sampler=NAME"]),
        (["-m", "hydra.sweeper.n_trials=3", "lr=1,2"], ["hydra.sweeper.n_trials", "belongs to hydra/sweeper=optuna"]),
        (["trainer.max_epochs=3"], ["trainer.max_epochs", "called training.num_train_epochs"]),
        (["--eps", "1"], ["written clip.eps=VALUE or optimizer.eps=VALUE"]),
        (["--training.max_steps", "1"], ["written training.max_steps=VALUE"]),
        (["optimizer.decay_rate=0.9"], ["optimizer.decay_rate", "param_groups.decay_rate"]),
    ],
    ids=lambda case: " ".join(case),
)
def test_answered(
    words: list[str],
    pieces: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert optrun(*words) == ConfigError.exit_code
    message = capsys.readouterr().err.splitlines()[0]
    for piece in pieces:
        assert piece in message
