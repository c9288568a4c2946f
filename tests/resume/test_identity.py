"""What is left out of the identity of a job, or called harmless, changes no bit of its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.artifacts.provenance import config_digest, result_deciding_values
from optrun.artifacts.run_dir import RunDir
from optrun.base.plain import flat
from optrun.config.saved import read_config
from optrun.runner.resume.config_diff import effect_of_change
from tests.running import TINY_GPT, optrun, summary, write_text

CHANGES = {
    "what is recorded and where it runs": [
        "run_name=other",
        "matters=0.5",
        "tracking=tensorboard",
        "training.logging_steps=3",
        "training.max_seconds=9999",
        "training.dataloader_num_workers=1",
        "training.dataloader_timeout=99",
        "training.device=cpu",
        "training.chunked_loss=false",
        "distributed.timeout_seconds=99",
    ],
    "what is kept": [
        "checkpoint.save_steps=2",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=0",
        "checkpoint.on_storage_error=stop",
        "checkpoint.on_other_optimizer=reset",
        "checkpoint.allow_nonfinite=true",
    ],
    "the metric": ["checkpoint.metric=eval/loss"],
    "nothing is kept": ["checkpoint=none"],
}
"""Changes that are tried together: one that changed a bit would show among the others."""
ELSEWHERE = {
    "resume": "no key of a run that begins",
    "lr_from": "lr itself counts",
    "checkpoint.enabled": "checkpoint=none",
    "checkpoint.name": "checkpoint=none",
    "tracking.name": "tracking=tensorboard",
    "training.nproc_per_node": "no key of one process",
    "distributed.name": "the same numbers but for rounding, as tests/distributed compares",
    "branch_from": "counts where a run branches",
    "branch_schedule": "counts where a run branches",
    "optimizer.default_lr": "makes lr, which counts",
    "model.default_lr_factor": "makes lr, which counts",
    "adapter.default_lr_factor": "makes lr, which counts",
}


def trained(folder: Path, name: str, *words: str) -> RunDir:
    """A run with dropout that early stopping ends, of every key that may end it."""
    run = RunDir(folder / name)
    base = [
        *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
        "data=files",
        f"data.train={write_text(folder, 60)}",
        "training.per_device_train_batch_size=4",
        "training.max_steps=8",
        "training.eval_steps=1",
        "training.logging_steps=1",
        "training.early_stopping_patience=3",
        "lr=1e-3",
        "checkpoint.save_steps=1",
    ]
    keys = {word.partition("=")[0] for word in words}
    if "checkpoint=none" in words:
        keys.add("checkpoint.save_steps")
    kept = [word for word in base if word.partition("=")[0] not in keys]
    assert optrun(*kept, *words, f"hydra.run.dir={run.path}") == 0
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(tmp_path_factory.mktemp("base"), "base")


def result(run: RunDir) -> tuple[int, bytes]:
    return summary(run.path)["global_step"], (run.model / "model.safetensors").read_bytes()


def test_every_key_that_is_left_out_is_tried(base: RunDir) -> None:
    values = read_config(base.config)
    left_out = flat(values).keys() - flat(result_deciding_values(values)).keys()
    changed = [word.partition("=")[0] for words in CHANGES.values() for word in words]
    tried = {*changed, "checkpoint.mode", *ELSEWHERE}
    assert left_out <= tried, sorted(left_out - tried)
    harmless = {key for key in flat(values) if effect_of_change(key) == "harmless"}
    assert harmless <= tried, sorted(harmless - tried)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_one_identity_is_one_result(base: RunDir, tmp_path: Path, changes: list[str]) -> None:
    assert result(trained(tmp_path, "other", *changes)) == result(base)


def test_what_decides_when_early_stopping_ends_counts(base: RunDir, tmp_path: Path) -> None:
    run = trained(tmp_path, "other", "checkpoint.mode=max")
    values = with_data_of(base, read_config(run.config))
    assert config_digest(values) != config_digest(read_config(base.config))
    assert result(run)[0] < result(base)[0]


def with_data_of(base: RunDir, values: dict[str, object]) -> dict[str, object]:
    """The rows lie in another folder, and are the same."""
    return {**values, "data": read_config(base.config)["data"]}


def with_keys(values: dict[str, object], group: str, **keys: object) -> dict[str, object]:
    chosen = values[group]
    assert isinstance(chosen, dict)
    return {**values, group: {**chosen, **keys}}


def test_what_a_rollback_goes_back_to_counts(base: RunDir) -> None:
    values = read_config(base.config)
    often = with_keys(values, "checkpoint", save_steps=7)
    assert config_digest(values) == config_digest(often)
    pair = [with_keys(each, "training", on_nonfinite="rollback") for each in (values, often)]
    assert config_digest(pair[0]) != config_digest(pair[1])


def test_what_ranks_compute_in_counts(base: RunDir) -> None:
    values = read_config(base.config)
    plain = with_keys(values, "distributed", name="fsdp", param_dtype=None)
    half = with_keys(values, "distributed", name="fsdp", param_dtype="bfloat16")
    assert config_digest(plain) != config_digest(half)
