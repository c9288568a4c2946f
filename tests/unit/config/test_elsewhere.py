"""Every name of `TrainingArguments` and of hydra-optuna-sweeper is answered with its name here, or a reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import transformers
from omegaconf import DictConfig

from optrun.base.errors import ConfigError
from optrun.cli import export, predict
from optrun.config import foreign_names as elsewhere
from optrun.config import keys, store
from optrun.config.groups import GROUPS
from optrun.config.schema.run import RunConfig
from tests.running import optrun

FIELDS = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
TABLES = elsewhere.KNOWN
# The configuration dataclasses of hydra-optuna-sweeper 1.2, below hydra.sweeper.
PLUGIN = (
    "direction",
    "storage",
    "study_name",
    "n_trials",
    "n_jobs",
    "max_failure_rate",
    "params",
    "search_space",
    "custom_search_space",
    "sampler.seed",
    "sampler._target_",
    "sampler.n_startup_trials",
    "sampler.n_ei_candidates",
    "sampler.multivariate",
    "sampler.consider_prior",
    "sampler.sigma0",
    "sampler.population_size",
    "sampler.qmc_type",
)
RANKS = (
    "average_tokens_across_devices",
    "ddp_backend",
    "ddp_timeout",
    "deepspeed",
    "devices",
    "eval_use_gather_object",
    "fsdp",
    "fsdp_config",
    "global_batch_size",
    "local_rank",
    "nnodes",
    "nproc_per_node",
    "num_machines",
    "num_nodes",
    "num_processes",
    "parallelism_config",
    "strategy",
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
    assert set(FIELDS) - set(elsewhere.KNOWN) == set()


def test_every_counterpart_exists(there: set[str]) -> None:
    """Each word of one, where it takes several: `distributed=NAME training.nproc_per_node=N`."""
    answers = {
        name: found.split() for name, found in TABLES.items() if not found.startswith("not offered")
    }
    named = {(name, word.partition("=")[0]) for name, words in answers.items() for word in words}
    assert {(name, key) for name, key in named if key not in there} == set()


def test_every_choice_in_a_counterpart_exists() -> None:
    said = " ".join(TABLES.values())
    named = re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=(\w+)", said)
    assert {("adapter", "lora"), ("distributed", "fsdp"), ("optimizer", "NAME")} <= set(named)
    for group, choice in named:
        assert choice == "NAME" or choice in GROUPS[group]


def test_a_reason_names_nothing_that_is_not_there(there: set[str]) -> None:
    """Keys in the sentences are keys, too."""
    reasons = " ".join(found for found in TABLES.values() if found.startswith("not offered"))
    groups = "|".join(GROUPS)
    named = set(re.findall(rf"(?<!/)\b(?:(?:{groups})\.[a-z_]+|hydra\.[a-z_.]*[a-z_])\b", reasons))
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


@pytest.mark.parametrize("name", RANKS)
def test_several_ranks_are_no_longer_to_come(name: str) -> None:
    said = keys.as_key(f"--{name}")
    assert said
    assert "one process trains" not in said


@pytest.mark.parametrize("key", ["distributed.context_parallel_degree", "cp_size"])
def test_sequences_that_no_rank_holds_whole(key: str, composed: DictConfig) -> None:
    """The page that is named says what torch lacks."""
    said = str(keys.unknown_key(composed, key))
    for fact in (key, "Not offered", "training.chunked_loss=true"):
        assert fact in said
    page, heading = re.findall(r"(docs/\w+\.md)#([\w-]+)", said)[0]
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    assert f"\n## {heading.replace('-', ' ').capitalize()}\n" in text


def test_nothing_is_promised() -> None:
    """A sentence that says "yet" goes stale unseen: what comes later changes another file."""
    assert [
        name
        for name, found in {**TABLES, **elsewhere.OPTIMIZERS}.items()
        if "not offered yet" in found
    ] == []


def test_verbs_and_their_keys_in_a_reason_exist() -> None:
    reasons = " ".join(found for found in TABLES.values() if found.startswith("not offered"))
    assert set(re.findall(r"optrun ([a-z]+) RUN_DIR", reasons)) == {"evaluate", "export", "predict"}
    for verb, words in (
        (export, ("push_to_hub=NAME", "private=true")),
        (predict, ("data.eval=FILE", "out=FILE")),
    ):
        for word in words:
            assert word in reasons
            assert word in verb.parser().format_help(), "the verb takes it"


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (["fsdp=full_shard"], ["fsdp: no such key", "called distributed=fsdp."]),
        (["num_processes=2"], ["called distributed=NAME training.nproc_per_node=N."]),
        (["--nproc_per_node", "2"], ["written training.nproc_per_node=VALUE"]),
        (["trainer.num_nodes=2"], ["called distributed=NAME distributed.nnodes=N."]),
        (["global_batch_size=64"], ["called training.global_batch_size."]),
        (["--do_predict"], ["Not offered: optrun predict RUN_DIR data.eval=FILE out=FILE"]),
        (
            ["hub_model_id=me/it"],
            ["optrun export RUN_DIR DEST push_to_hub=NAME [private=true] does"],
        ),
        (["packing=true"], ["called task.packing."]),
        (
            ["training.assistant_only_loss=true"],
            ["called task=sft task.assistant_only_loss=VALUE."],
        ),
        (["--completion_only_loss=true"], ["written task=sft task.completion_only_loss=VALUE."]),
        (["r=8"], ["called adapter=lora adapter.r=VALUE."]),
        (["lora.target_modules=[q_proj]"], ["called adapter=lora adapter.target_modules=VALUE."]),
        (["--lora-alpha", "16"], ["written adapter=lora adapter.lora_alpha=VALUE."]),
        (
            ["data=mixture", "data.sources={a: {train: a.jsonl}}"],
            ["data.sources: no such key", "called data.mixture."],
        ),
        (["training.learning_rate=1e-3"], ["training.learning_rate", "called lr"]),
        (["--deepspeed", "x.json"], ["--deepspeed: no such option", "Not offered"]),
        (
            ["explain", "--per-device-train-batch-size", "8"],
            ["written training.per_device_train_batch_size=VALUE"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize", "lr=1,2"],
            ["called checkpoint.mode"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "hydra.sweeper.study_name=x", "lr=1,2"],
            ["Not offered", "hydra.sweep.dir"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=tpe", "lr=1,2"],
            ["written hydra.sweeper.sampler=NAME"],
        ),
        (
            ["-m", "hydra.sweeper.n_trials=3", "lr=1,2"],
            ["hydra.sweeper.n_trials", "belongs to hydra/sweeper=optuna"],
        ),
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
