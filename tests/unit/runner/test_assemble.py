"""What is built before the first step.

How long, with which groups, judged by what, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.compose import compose_request
from optrun.config.request import CommandLine
from optrun.runner.assemble import Assembled, _valid_groups, assemble, length_key
from optrun.runner.prepare import prepare
from optrun.training.callback import StopRequest
from tests.running import TINY_BERT, TINY_GPT, write_labelled, write_text

Built = Callable[..., Assembled]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Assemble a run of 400 short lines of text from its first step."""
    text = write_text(tmp_path)

    def make(*words: str, base: list[str] | None = None) -> Assembled:
        files = ["data=files", f"data.train={text}", "training.per_device_train_batch_size=4"]
        line = CommandLine(
            overrides=[
                *(TINY_GPT if base is None else base),
                *(files if base is None else []),
                *words,
            ]
        )
        request = compose_request(store.open_hydra(), line)
        return assemble(request, prepare(request.config), torch.device("cpu"))

    return make


def test_epochs_and_steps_say_how_long_it_is(built: Built) -> None:
    whole = built("training.num_train_epochs=2.5")
    plan = whole.setup.plan
    assert plan.examples == len(whole.setup.task.train)
    assert plan.steps_per_epoch == -(-plan.examples // 4)
    assert (
        whole.setup.total_steps == whole.constants.total_steps == -(-5 * plan.steps_per_epoch // 2)
    )
    assert length_key(built("training.max_steps=7").request.config) == "training.max_steps=7"
    steps = built("training.max_steps=7", "training.gradient_accumulation_steps=2")
    assert steps.setup.total_steps == 7
    assert steps.setup.plan.steps_per_epoch == -(-plan.steps_per_epoch // 2)


def test_a_run_that_begins_stands_before_its_first_step(built: Built) -> None:
    run = built("training.max_steps=3", "optimizer=lamb", "lr=2e-3")
    assert run.setup.state.is_before_first_step
    assert not run.is_done
    assert run.start.changes == {}
    assert run.start.stop is run.start.fork is None
    state = run.setup.state
    state.global_step = 3
    assert run.is_done
    state.unfinished = True  # its evaluation and its line are missing
    assert not run.is_done
    state.global_step, state.unfinished = 2, False
    run.start.stop = StopRequest("callbacks.mine", "enough", 2)
    assert run.is_done


def test_every_parameter_that_is_trained_is_in_one_group(built: Built) -> None:
    run = built(
        "optimizer=adamw",
        "param_groups=layerwise",
        "param_groups.decay_rate=0.5",
        "scheduler=constant",
    )
    groups = run.setup.train_step.optimizer.param_groups
    grouped = [id(param) for group in groups for param in group["params"]]
    trained = {id(param) for param in run.setup.model.parameters() if param.requires_grad}
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == trained
    assert len({group["lr"] for group in groups}) > 2
    assert {group["weight_decay"] for group in groups} > {0.0}


@pytest.mark.parametrize(
    ("words", "metric", "mode"),
    [
        ([], "eval/loss", "min"),
        (["checkpoint.metric=perplexity"], "eval/perplexity", "min"),
        (["checkpoint.metric=eval/loss", "checkpoint.mode=max"], "eval/loss", "max"),
    ],
)
def test_a_metric_ranks_the_checkpoints(
    built: Built, words: list[str], metric: str, mode: str
) -> None:
    run = built("training.max_steps=1", *words)
    assert (run.setup.ranking.metric, run.setup.ranking.mode) == (metric, mode)
    assert run.setup.state.ranked_by == f"{metric} {mode}"
    assert list(run.setup.eval_loaders) == [""]


def test_the_first_of_several_sets_ranks_unless_one_is_named(built: Built, tmp_path: Path) -> None:
    rows = [write_labelled(tmp_path, name=f"{name}.csv") for name in ("train", "dev", "odd")]
    words = [
        *(
            "task=sequence_classification",
            "data=files",
            f"data.train={rows[0]}",
            "training.max_steps=1",
        ),
        f"data.eval={{dev:{rows[1]},odd:{rows[2]}}}",
    ]
    run = built(*words, base=TINY_BERT)
    assert list(run.setup.eval_loaders) == ["dev", "odd"]
    assert run.setup.ranking.metric == f"eval/dev/{run.setup.task.main_metric}"  # type: ignore[attr-defined]
    assert (
        built(*words, "checkpoint.metric=eval/odd/loss", base=TINY_BERT).setup.ranking.metric
        == "eval/odd/loss"
    )


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["checkpoint.metric=perplexty"], ["checkpoint.metric", "perplexty", "eval/perplexity"]),
        (["checkpoint.metric=f1"], ["checkpoint.metric", "task=causal_lm", "eval/loss"]),
        (
            ["scheduler=plateau", "scheduler.metric=eval/f1"],
            ["scheduler.metric=eval/f1", "eval/loss"],
        ),
        (
            ["data.eval_fraction=0", "checkpoint.metric=loss"],
            ["checkpoint.metric=loss", "data.eval_fraction=0"],
        ),
        (
            ["data.eval_fraction=0", "training.early_stopping_patience=2"],
            ["training.early_stopping_patience=2"],
        ),
        (
            ["data.eval_fraction=0", "scheduler=plateau"],
            ["scheduler.metric=eval/loss", "a scheduler other than plateau"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(
    built: Built, words: list[str], facts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        built("training.max_steps=1", *words)
    for fact in facts:
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ({}, 0),
        ({"groups": "none"}, 0),
        ({"groups": [{"layer": "head", "layer_id": 3, "lr_ratio": 1, "role": "matrix"}]}, 1),
        ({"groups": [{"layer": None}, {}]}, 2),
        ({"groups": [{"layer": 3}]}, 0),
        ({"groups": [{"layer": "head"}, 7]}, 0),
        ({"groups": [{"lr_ratio": "large"}]}, 0),
    ],
)
def test_damaged_groups_of_a_checkpoint_are_not_used(saved: Any, kept: int) -> None:
    """Loading the optimizer names what is wrong with them."""
    assert len(_valid_groups(saved)) == kept
