"""The same run on 1, 2 and 4 ranks is the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optrun.artifacts.run_dir import RunDir
from tests.distributed.promised import promised
from tests.distributed.ranked_runs import Start, batches, differences, rows, start_on
from tests.optimizer_cases import CASES as OPTIMIZERS
from tests.running import TINY_BERT, TINY_GPT, sentence, summary, write_labelled, write_text

LOSSES = ("train/loss", "eval/loss")


@dataclass(frozen=True)
class Case:
    """A run, small; an epoch of it ends in the middle of a step's micro-batches."""

    overrides: list[str]
    tolerance: float = 1e-6
    """Of losses, relative.

    Norms of gradients, which sum over all parameters, are held to a hundred times of it.
    """
    double: bool = False


COMMON = [
    "training.max_steps=7",
    "training.per_device_train_batch_size=4",
    "training.global_batch_size=16",
    "training.logging_steps=1",
    "training.eval_steps=3",
    "checkpoint.keep_last=1",
    "data.eval_fraction=0.2",
]
FLOAT32 = promised("optimizer=", "held to")
SENTENCES = [
    *TINY_BERT,
    "task=sequence_classification",
    "data=files",
    "model.config.hidden_dropout_prob=0.1",
]
BASE = [
    "parametrization.base.n_embd=16",
    "parametrization.base.n_head=1",
    "parametrization.base.n_layer=1",
]
CASES = {
    "adamw": Case([*TINY_GPT, "data=files"]),
    "chunked": Case([*TINY_GPT, "data=files", "training.chunked_loss=true"]),
    "layerwise-lamb": Case([*SENTENCES, "optimizer=lamb", "param_groups=layerwise", "lr=1e-2"]),
    "lora": Case(
        [*SENTENCES, "adapter=lora", "adapter.lora_dropout=0.1", "adapter.loraplus_lr_ratio=4"]
    ),
    "adamwdl": Case([*SENTENCES, "optimizer=adamwdl", "task.metrics=[f1]"]),
    "mup": Case(
        [*TINY_GPT, "data=files", "optimizer=lamb", "lr=1e-2", "parametrization=mup", *BASE]
    ),
    "muon": Case([*TINY_GPT, "data=files", "optimizer=muon"], FLOAT32["muon"]),
    "muon-double": Case([*TINY_GPT, "data=files", "optimizer=muon"], 1e-12, double=True),
    "embedding": Case(
        [*TINY_BERT, "task=embedding", "data=files", "model.config.hidden_dropout_prob=0.1"]
    ),
    "soap-double": Case([*SENTENCES, "optimizer=soap"], 1e-4, double=True),
    "double": Case(
        [*SENTENCES, "optimizer=lamb", "param_groups=layerwise", "lr=1e-2"], 1e-12, double=True
    ),
}


def start_of(name: str, case: Case, folder: Path, kind: str, data: Path) -> Start:
    """A start of a case in a folder of its own."""
    text = "data=files" in case.overrides and "task=sequence_classification" not in case.overrides
    train = write_text(data, 220) if text else write_labelled(data, 68)
    if "task=embedding" in case.overrides:
        rows = ({"anchor": sentence(n), "positive": sentence(n + 70)} for n in range(68))
        train = data / "pairs.jsonl"
        train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    distributed = {"hsdp": ["distributed=fsdp", "distributed.data_parallel_replicate_degree=2"]}
    words = [
        *COMMON,
        *case.overrides,
        f"data.train={train}",
        *distributed.get(kind, [f"distributed={kind}"]),
    ]
    return Start(folder / f"{name}-{kind}", words, double=case.double)


def check(folder: Path, ranks: int, kinds: list[str], names: list[str]) -> None:
    """Each of these cases alone, and on so many ranks in each of these ways."""
    cases = {name: CASES[name] for name in names}
    starts = [
        start_of(name, case, folder, kind, folder) for name, case in cases.items() for kind in kinds
    ]
    start_on(ranks, starts, folder / "meet")
    start_on(
        1, [start_of(name, case, folder, "none", folder) for name, case in cases.items()], folder
    )
    for name, case in cases.items():
        alone = folder / f"{name}-none"
        for kind in kinds:
            found = differences(alone, folder / f"{name}-{kind}", (*LOSSES, "train/grad_norm"))
            assert max(found[loss] for loss in LOSSES) <= case.tolerance, (name, kind, found)
            assert found["train/grad_norm"] <= 100 * case.tolerance, (name, kind, found)
            assert batches(alone) == batches(folder / f"{name}-{kind}")


def test_the_page_promises_something_of_every_optimizer() -> None:
    assert (
        set(FLOAT32)
        == set(promised("optimizer=", "`ddp`"))
        == {optimizer.name for optimizer in OPTIMIZERS}
    )


def test_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    check(tmp_path, 2, ["ddp", "fsdp"], ["layerwise-lamb"])


@pytest.mark.slow
def test_an_adapter_on_two_ranks(tmp_path: Path) -> None:
    """Factors, and a head that trains whole.

    Under FSDP the frozen base is divided, too.
    """
    check(tmp_path, 2, ["ddp", "fsdp"], ["lora"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "mup"])
def test_a_divided_model_goes_on_on_another_number_of_ranks(tmp_path: Path, name: str) -> None:
    """On two, then four, then one.

    The run of one process that was never stopped, and the same model exported.
    """
    alone = start_of("alone", CASES[name], tmp_path, "none", tmp_path)
    parted = start_of("parted", CASES[name], tmp_path, "fsdp", tmp_path)
    start_on(1, [alone], tmp_path)
    start_on(2, [replace(parted, stop_at=3)], tmp_path / "two")
    start_on(4, [replace(parted, stop_at=5)], tmp_path / "four")
    start_on(1, [parted], tmp_path)
    found = differences(alone.run, parted.run, LOSSES)
    assert max(found.values()) <= 1e-6
    assert batches(alone.run) == batches(parted.run)
    ours, theirs = (
        load_file(start.run / "model" / "model.safetensors") for start in (alone, parted)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kinds", "names"),
    [
        (
            2,
            ["ddp", "fsdp"],
            [name for name in CASES if name not in ("lora", "soap-double")],
        ),
        (4, ["fsdp", "hsdp"], ["layerwise-lamb", "muon", "double"]),
    ],
)
def test_ranks_do_what_one_does(
    tmp_path: Path, ranks: int, kinds: list[str], names: list[str]
) -> None:
    check(tmp_path, ranks, kinds, names)


@pytest.mark.slow
def test_bases_of_soap_are_the_same_where_rounding_is_small(tmp_path: Path) -> None:
    check(tmp_path, 2, ["ddp"], ["soap-double"])


@pytest.mark.slow
def test_every_optimizer_keeps_what_the_page_promises(tmp_path: Path) -> None:
    """In float32, under `ddp`, on texts and on sentences.

    Where losses are held to 1e-6, accuracy is the same.

    SOAP makes steps of rounding on sentences, of a size that differs between processors: there it
    is held in float64.
    """
    models = {"text": [*TINY_GPT, "data=files"], "sentences": SENTENCES}
    names = [
        (f"{name}-{model}", name)
        for name in FLOAT32
        for model in models
        if (name, model) != ("soap", "sentences")
    ]
    starts = {
        kind: [
            start_of(
                run,
                Case([*models[run.split("-")[1]], f"optimizer={name}"]),
                tmp_path,
                kind,
                tmp_path,
            )
            for run, name in names
        ]
        for kind in ("ddp", "none")
    }
    start_on(2, starts["ddp"], tmp_path / "meet")
    start_on(1, starts["none"], tmp_path)
    far = {}
    for run, name in names:
        metrics = (*LOSSES, "eval/accuracy") if run.endswith("sentences") else LOSSES
        found = differences(tmp_path / f"{run}-none", tmp_path / f"{run}-ddp", metrics)
        accuracy = found.pop("eval/accuracy", 0.0)
        if max(found.values()) > FLOAT32[name] or (accuracy and FLOAT32[name] <= 1e-6):
            far[run] = (found, accuracy)
    assert not far


@pytest.mark.slow
def test_a_nan_on_one_rank_is_the_verdict_of_all(tmp_path: Path) -> None:
    """Rolled back, skipped or stopped as in one process, and the runs go on alike."""
    policies = {
        "rollback": ["training.on_nonfinite=rollback", "checkpoint.save_steps=2"],
        "skip": ["training.on_nonfinite=skip"],
        "stop": [],
    }

    def starts(kind: str) -> list[Start]:
        plain = start_of("nan", CASES["adamw"], tmp_path, kind, tmp_path).overrides
        return [
            Start(tmp_path / f"{name}-{kind}", [*plain, *more], poisoned=3)
            for name, more in policies.items()
        ]

    start_on(2, starts("fsdp"), tmp_path / "meet")
    start_on(1, starts("none"), tmp_path)
    for name, counter in (("rollback", "train/rollbacks"), ("skip", "train/skipped_steps")):
        alone, together = tmp_path / f"{name}-none", tmp_path / f"{name}-fsdp"
        assert max(differences(alone, together, LOSSES).values()) <= 1e-6
        assert [rows(run)[7][counter] for run in (alone, together)] == [1, 1]
    for kind in ("none", "fsdp"):
        ended = summary(tmp_path / f"stop-{kind}")
        assert (ended["status"], ended["exit_code"], ended["global_step"]) == ("failed", 3, 3)


@pytest.mark.slow
def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Stopped on 2, gone on with on 1, stopped again, and ended on 2.

    The losses of one undisturbed process.
    """
    case, run = CASES["layerwise-lamb"], tmp_path / "moved"
    undisturbed = start_of("whole", case, tmp_path, "none", tmp_path)
    start_on(1, [undisturbed], tmp_path)
    sharded = start_of("x", case, tmp_path, "fsdp", tmp_path).overrides
    start_on(2, [Start(run, sharded, stop_at=2)], tmp_path / "first")
    assert RunDir(run).checkpoint(2).joinpath("model").is_dir()
    start_on(1, [Start(run, [*sharded, "distributed=none"], stop_at=4)], tmp_path)
    assert RunDir(run).checkpoint(4).joinpath("model.safetensors").is_file()
    start_on(2, [Start(run, sharded)], tmp_path / "second")
    found = differences(undisturbed.run, run, LOSSES)
    assert max(found.values()) <= case.tolerance, found
    assert batches(undisturbed.run) == batches(run)


def without_a_global_batch(folder: Path, *more: str) -> list[str]:
    """Overrides of a run whose batch follows from its ranks."""
    own = [
        word for word in (*COMMON, *TINY_GPT) if "batch_size" not in word and "pdrop" not in word
    ]
    dropout = [f"model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")]
    return [*own, *dropout, "data=files", f"data.train={write_text(folder, 220)}", *more]


def test_the_batch_is_the_runs(tmp_path: Path) -> None:
    """Stopped on 2 ranks and gone on with on 1.

    The step is over as many examples, and the run is the same.
    """
    run, whole = tmp_path / "moved", tmp_path / "whole"
    size = "training.per_device_train_batch_size=4"
    words = without_a_global_batch(tmp_path, size, "training.max_steps=5")
    start_on(1, [Start(whole, [*words, "training.gradient_accumulation_steps=2"])], tmp_path)
    start_on(2, [Start(run, [*words, "distributed=ddp"], stop_at=2)], tmp_path / "meet")
    start_on(1, [Start(run, words)], tmp_path)
    found = differences(whole, run, LOSSES)
    assert max(found.values()) <= 1e-6, found
    assert batches(whole) == batches(run)
    resumed = summary(run)["resumes"][-1]
    assert resumed["changes"]["training.gradient_accumulation_steps"] == [1, 2]
    assert "8 examples a step, as before" in resumed["notes"][0]
    assert "gradient_accumulation_steps: 2" in (run / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_micro_batches_are_divided_where_there_are_more_ranks(tmp_path: Path) -> None:
    """From 2 to 4, to 1 and back to 2 ranks: a step has the same examples throughout."""
    run, whole = tmp_path / "moved", tmp_path / "whole"
    words = without_a_global_batch(tmp_path)
    start_on(1, [Start(whole, [*words, "training.gradient_accumulation_steps=2"])], tmp_path)
    for ranks, kind, stop in ((2, "ddp", 2), (4, "fsdp", 4), (1, "none", 5), (2, "fsdp", None)):
        start_on(
            ranks,
            [Start(run, [*words, f"distributed={kind}"], stop_at=stop)],
            tmp_path / f"meet-{stop}",
        )
    found = differences(whole, run, LOSSES)
    assert max(found.values()) <= 1e-6, found
    samples = [summary(folder)["metrics"]["last"]["eval/loss"] for folder in (whole, run)]
    assert samples[0] == pytest.approx(samples[1], rel=1e-6)


def test_a_run_on_two_ranks_resumed_is_the_run_undisturbed(tmp_path: Path) -> None:
    """Bit for bit, at the same number of ranks."""
    case = CASES["adamwdl"]
    starts = []
    for kind in ("ddp", "fsdp"):
        whole = start_of("whole", case, tmp_path, kind, tmp_path)
        cut = Start(tmp_path / f"cut-{kind}", whole.overrides)
        starts += [whole, Start(cut.run, cut.overrides, stop_at=4), cut]
    start_on(2, starts, tmp_path / "meet")
    for kind in ("ddp", "fsdp"):
        found = differences(
            tmp_path / f"whole-{kind}", tmp_path / f"cut-{kind}", (*LOSSES, "train/grad_norm")
        )
        assert set(found.values()) == {0.0}, (kind, found)
