"""What `optrun explain` says is what the optimizer will do."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.optim import SGD

from optrun import explain as verb
from optrun.base.errors import ConfigError
from optrun.base.formatting import size
from optrun.config import store
from optrun.config.schema.run import RunConfig
from optrun.explain.build import explain
from optrun.explain.facts import Facts, groups_of
from optrun.explain.plot import area_plot
from optrun.explain.tables import render
from optrun.explain.waits import reason_to_wait
from optrun.training.callback import Callback


def _config(*words: str) -> RunConfig:
    hydra = store.open_hydra()
    return store.typed(store.without_hydra(store.compose(hydra, "config", list(words))))


@functools.cache
def _facts(*words: str) -> Facts:
    return explain(_config(*words))


def _shown(facts: Facts, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(facts, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_totals_are_sums_and_memory_is_float32() -> None:
    facts = _facts("optimizer=adamw")
    assert facts.parameters == sum(group.parameters for group in groups_of(facts))
    assert facts.weight_bytes == facts.gradient_bytes == 4 * facts.parameters
    assert facts.state_bytes == sum(tensor.state_bytes or 0 for tensor in facts.tensors)
    assert (
        8 * facts.parameters
        <= (facts.state_bytes or 0)
        <= 8 * facts.parameters + 8 * len(facts.tensors)
    )
    assert facts.notes == ["transformer.wte.weight is also lm_head.weight: tied, counted once."]


@pytest.mark.parametrize(
    ("words", "ranks", "shards"),
    [
        (("distributed=ddp", "training.nproc_per_node=4"), 4, 1),
        (("distributed=fsdp", "training.nproc_per_node=4"), 4, 4),
        (("distributed=fsdp", "training.nproc_per_node=1"), 1, 1),
        (
            (
                "distributed=fsdp",
                "training.nproc_per_node=8",
                "distributed.data_parallel_replicate_degree=2",
            ),
            8,
            4,
        ),
        (
            (
                "distributed=fsdp",
                "training.nproc_per_node=8",
                "distributed.data_parallel_replicate_degree=4",
                "distributed.data_parallel_shard_degree=2",
            ),
            8,
            2,
        ),
    ],
)
def test_memory_of_a_rank_follows_from_the_configuration(
    words: tuple[str, ...], ranks: int, shards: int
) -> None:
    facts = _facts("optimizer=lamb", *words)
    held = facts.rank_memory
    assert held is not None
    assert (held.ranks, held.shards) == (ranks, shards)
    most = sum(
        4 * -(-tensor.shape[0] // shards) * tensor.parameters // tensor.shape[0]
        for tensor in facts.tensors
    )
    assert held.weight_bytes == held.gradient_bytes == most
    assert held.state_bytes == 2 * most
    assert held.weight_bytes * shards >= facts.weight_bytes
    assert facts.as_dict()["rank_memory"]["ranks"] == ranks
    said = "\n".join(_shown(facts, 80))
    for fact in (f"{words[0].split('=')[1]}: {ranks} rank", f"{size(held.weight_bytes)} per rank"):
        assert fact in said
    assert "per rank" not in "\n".join(_shown(_facts("optimizer=lamb"), 80))


def test_layers_peak_by_their_scale() -> None:
    model = "model.config.n_layer=4"
    facts = _facts(
        model,
        "param_groups=layerwise",
        "param_groups.decay_rate=0.5",
        "lr=0.16",
        "training.max_steps=7",
    )
    peaks = {tensor.layer: tensor.lr_peak for tensor in facts.tensors}
    assert peaks == pytest.approx(
        {
            "head": 0.16,
            "layer_03": 0.08,
            "layer_02": 0.04,
            "layer_01": 0.02,
            "layer_00": 0.01,
            "embeddings": 0.005,
        }
    )
    assert (facts.steps, facts.steps_from) == (7, "max_steps")
    assert len(facts.curve.steps) == 7


def test_the_optimizers_own_exemptions_and_ratios_count() -> None:
    lamb = _facts("optimizer=lamb", "optimizer.exclude_from_weight_decay=[wpe]")
    by_name = {tensor.name: tensor for tensor in lamb.tensors}
    assert by_name["transformer.wpe.weight"].weight_decay == 0
    assert by_name["transformer.wpe.weight"].adapted is False
    assert by_name["transformer.wte.weight"].adapted is True
    assert by_name["transformer.h.0.ln_1.weight"].adapted is False
    wdl = _facts("optimizer=adamwdl", "lr=1.0")
    assert {tensor.adapted for tensor in wdl.tensors} == {None}
    assert {tensor.lr_peak for tensor in wdl.tensors} == {1.0}


def test_muon_says_who_steps_what() -> None:
    facts = _facts("optimizer=muon")
    steppers = {tensor.name: tensor.optimizer for tensor in facts.tensors}
    assert steppers["transformer.h.0.mlp.c_fc.weight"] == "muon"
    assert steppers["transformer.wte.weight"] == steppers["transformer.ln_f.weight"] == "adamw"


def test_rules_and_frozen_parameters() -> None:
    facts = _facts(
        "param_groups.rules=[{pattern: wpe, lr: 0.5}, {pattern: ln_f, freeze: true}]",
        "training.max_steps=10",
    )
    of = {tensor.name: tensor for tensor in facts.tensors}
    absolute = of["transformer.wpe.weight"]
    assert (absolute.lr_peak, absolute.lr_scale) == (0.5, None)
    assert absolute.rule == "rules[0] wpe"
    assert facts.frozen == ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert facts.frozen_parameters + facts.parameters == _facts().parameters
    text = "\n".join(_shown(facts, 100))
    assert "[0] wpe: lr 0.5" in text
    assert "frozen: transformer.ln_f.weight, transformer.ln_f.bias" in text


def test_length_of_the_run(tmp_path: Path) -> None:
    assert _facts().steps_from == "assumed"
    table = tmp_path / "train.csv"
    table.write_text(
        "text,label\n" + "".join(f"row {number},{number % 2}\n" for number in range(40))
    )
    words = (
        "task=sequence_classification",
        "model=bert_tiny",
        "data=files",
        f"data.train={table}",
        f"data.eval={table}",
        "training.per_device_train_batch_size=8",
        "training.num_train_epochs=3",
        "scheduler.warmup_ratio=0.2",
    )
    facts = _facts(*words)
    assert (facts.steps, facts.steps_from, facts.warmup_steps) == (15, "data", 3)
    assert _facts(*words, "data.max_train_examples=16").steps == 6


LISTED = ",".join(["0.5"] * 299 + ["2.0"])


@pytest.mark.parametrize(
    ("words", "steps", "peak"),
    [
        (
            (
                "scheduler=inverse_sqrt",
                "scheduler.num_warmup_steps=10",
                "training.max_steps=100000",
            ),
            100_000,
            1.0,
        ),
        (
            ("scheduler=noam", "scheduler.num_warmup_steps=7", "training.max_steps=10000000"),
            10_000_000,
            1.0,
        ),
        (
            ("scheduler=piecewise", "scheduler.values=[1,3,1]", "scheduler.boundaries=[7001,7003]"),
            14_006,
            3.0,
        ),
        (
            ("scheduler=piecewise", f"scheduler.values=[{LISTED}]", "scheduler.boundaries=null"),
            300,
            2.0,
        ),
        (("scheduler=cosine", "scheduler.num_warmup_steps=2000"), 4000, 1.0),
        (
            ("scheduler=multistep", "scheduler.warmup_ratio=0.1", "scheduler.milestones=[50]"),
            490,
            1.0,
        ),
        (
            ("scheduler=multistep", "scheduler.warmup_ratio=0.07", "scheduler.milestones=[7,900]"),
            85,
            1.0,
        ),
        (("scheduler=linear", "scheduler.num_warmup_steps=10", "training.max_steps=6"), 6, 0.5),
    ],
)
def test_the_peak_is_the_highest_of_all_steps(
    words: tuple[str, ...], steps: int, peak: float
) -> None:
    """However short the climb, and over a run that is long enough for the steps that are named."""
    facts = _facts(*words, "lr=1.0")
    assert facts.steps == steps
    assert {tensor.lr_peak for tensor in facts.tensors} == {peak}
    curve = facts.curve
    assert curve.peak == max(curve.multipliers) == peak
    assert len(curve.steps) < 520


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scheduler.warmup_ratio=0.1",), "length follows from the data, warm-up 10%"),
        (
            ("scheduler.num_warmup_steps=2000",),
            "from the data, warm-up 2,000 steps; drawn for 4,000 steps",
        ),
        (
            ("scheduler=multistep", "scheduler.warmup_ratio=0.1", "scheduler.milestones=[50]"),
            "from the data, warm-up 10%; drawn for 490 steps",
        ),
        (
            ("scheduler.num_warmup_steps=20", "training.max_steps=80"),
            "over 80 steps, 20 of them warm-up",
        ),
    ],
)
def test_what_was_given_in_steps_is_told_in_steps(words: tuple[str, ...], said: str) -> None:
    text = "\n".join(_shown(_facts(*words), 140))
    assert said in text
    assert ("step 0" in text) == ("steps" in said)


def test_a_list_shorter_than_the_run_is_refused_where_its_length_is_known() -> None:
    with pytest.raises(ConfigError, match="2 values for a run of 3 steps"):
        _facts(
            "scheduler=piecewise",
            "scheduler.values=[1,1]",
            "scheduler.boundaries=null",
            "training.max_steps=3",
        )


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize(
    "words",
    [
        (),
        (
            "optimizer=lamb",
            "param_groups=layerwise",
            "training.max_steps=500",
            "scheduler.num_warmup_steps=50",
        ),
        (
            "optimizer=muon",
            "param_groups=layerwise",
            "param_groups.rules=[{pattern: wpe, lr_scale: 3}]",
        ),
    ],
    ids=["default", "lamb", "muon"],
)
def test_it_fits_and_leaves_nothing_out(words: tuple[str, ...], width: int) -> None:
    facts = _facts(*words)
    lines = _shown(facts, width)
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "…" not in text
    roles = [group.first.role for group in groups_of(facts)]
    assert all(
        sum(f" {role} " in line for line in lines) >= roles.count(role) for role in set(roles)
    )
    assert "learning rate" in text


def test_for_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    verb.run(_config("param_groups=layerwise", "training.max_steps=5"), as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == 5
    assert sum(group["parameters"] for group in said["groups"]) == said["parameters"]
    assert {name for group in said["groups"] for name in group["names"]} == {
        t["name"] for t in said["tensors"]
    }
    assert "transformer.h.0.ln_1.weight" in {t["name"] for t in said["tensors"]}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "param_groups.rules=[{pattern: clasifier, lr_scale: 2}]",
            r"rules\[0\].pattern=clasifier: matches no parameter",
        ),
        ("scheduler.min_lr=3.0", "scheduler.min_lr=3.0: expected at most the peak"),
        ("model.config.n_layr=3", "n_layr"),
    ],
)
def test_what_training_refuses_is_refused(word: str, message: str) -> None:
    plus = "+" if word.startswith("model.config") else ""
    with pytest.raises(ConfigError, match=message):
        _facts(f"{plus}{word}")


def test_the_plot_is_a_picture_of_its_curve() -> None:
    lines = area_plot(
        [0, 1, 2, 3],
        [1.0, 1.0, 0.0, 0.5],
        width=26,
        height=4,
        top=1.0,
        left_label="a",
        right_label="b",
    )
    plain = [line.plain for line in lines]
    assert {len(line) for line in plain} == {26}
    assert plain[0].startswith("  1 │█████") or plain[0].lstrip().startswith("1 │█████")
    assert plain[3].startswith("0 │█████")
    assert plain[3].endswith("   █")
    assert plain[1].endswith(" ")
    assert plain[5].split() == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), None),
        (("training.precision=fp16",), None),
        (("distributed=ddp", "training.nproc_per_node=2"), None),
        (("training.device=cuda", "optimizer=adamw"), None),
        (("training.device=cuda", "optimizer=lamb"), "optimizer=lamb: only torch's fused Adam"),
        (("training.device=cuda", "optimizer=adamw", "optimizer.foreach=true"), "optimizer=adamw"),
    ],
)
def test_why_a_step_waits_for_its_loss(words: tuple[str, ...], reason: str | None) -> None:
    facts = _facts(*words)
    text = " ".join(_shown(facts, 200))
    if reason is None:
        assert facts.waits is None
        assert "each step for its loss" not in text
    else:
        assert f"each step for its loss; {reason}" in text


@pytest.mark.parametrize(("accepts_late_results", "waits"), [(False, True), (True, False)])
def test_a_callback_that_hears_late_makes_no_step_wait(
    accepts_late_results: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(Callback):
        def on_step(self, training: object, result: object) -> None:
            del training, result

    Mine.accepts_late_results = accepts_late_results
    row = SimpleNamespace(load=lambda: Mine)
    config = _config("optimizer=adamw")
    monkeypatch.setattr("optrun.explain.waits.registry.choices", lambda kind: {"mine": row})
    monkeypatch.setattr(config, "callbacks", {"mine": None})
    reason = reason_to_wait(config, SGD([torch.zeros(1)]))
    assert (reason == "callbacks.mine: its on_step receives the loss of each step") is waits
