"""The same run on 1, 2 and 4 ranks is the same run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.distributed.ranked_runs import Start, batches, differences, start_on
from tests.running import TINY_BERT, TINY_GPT, write_labelled, write_text

METRICS = ("train/loss", "train/grad_norm", "eval/loss")


@dataclass(frozen=True)
class Case:
    """A run, small; an epoch of it ends in the middle of a step's micro-batches."""

    overrides: list[str]
    tolerance: float = 1e-6
    double: bool = False
    kinds: list[str] = field(default_factory=lambda: ["ddp", "fsdp"])


COMMON = [
    "training.max_steps=7",
    "training.per_device_train_batch_size=4",
    "training.global_batch_size=16",
    "training.logging_steps=1",
    "training.eval_steps=3",
    "checkpoint.keep_last=1",
    "data.eval_fraction=0.2",
]
SENTENCES = [*TINY_BERT, "task=sequence_classification", "data=files", "model.config.hidden_dropout_prob=0.1"]
CASES = {
    "adamw": Case([*TINY_GPT, "data=files"]),
    "layerwise-lamb": Case([*SENTENCES, "optimizer=lamb", "param_groups=layerwise", "lr=1e-2"]),
    "adamwdl": Case([*SENTENCES, "optimizer=adamwdl", "task.metrics=[f1]"]),
    "muon": Case([*TINY_GPT, "data=files", "optimizer=muon"]),
    "double": Case([*SENTENCES, "optimizer=lamb", "param_groups=layerwise", "lr=1e-2"], 1e-12, double=True),
}


def start_of(name: str, case: Case, folder: Path, kind: str, data: Path) -> Start:
    """A start of a case in a folder of its own."""
    text = "data=files" in case.overrides and "task=sequence_classification" not in case.overrides
    train = write_text(data, 220) if text else write_labelled(data, 68)
    distributed = {"hsdp": ["distributed=fsdp", "distributed.data_parallel_replicate_degree=2"]}
    words = [*COMMON, *case.overrides, f"data.train={train}", *distributed.get(kind, [f"distributed={kind}"])]
    return Start(folder / f"{name}-{kind}", words, double=case.double)


def check(folder: Path, ranks: int, kinds: list[str]) -> None:
    """Every case alone, and on so many ranks in each of these ways."""
    starts = [start_of(name, case, folder, kind, folder) for name, case in CASES.items() for kind in kinds]
    start_on(ranks, starts, folder / "meet")
    start_on(1, [start_of(name, case, folder, "none", folder) for name, case in CASES.items()], folder)
    for name, case in CASES.items():
        alone = folder / f"{name}-none"
        for kind in kinds:
            found = differences(alone, folder / f"{name}-{kind}", METRICS)
            assert max(found.values()) <= case.tolerance, (name, kind, found)
            assert batches(alone) == batches(folder / f"{name}-{kind}")


def test_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    check(tmp_path, 2, ["ddp", "fsdp"])


@pytest.mark.slow
def test_four_ranks_do_what_one_does(tmp_path: Path) -> None:
    check(tmp_path, 4, ["ddp", "fsdp", "hsdp"])
