"""An optimizer step keeps its examples, however many ranks share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.compose import compose_request
from optrun.config.request import CommandLine, Request
from optrun.data.loader import EpochPlan
from optrun.runner.resume.config_diff import effect_of_change, table
from optrun.runner.resume.data_position import plan_values, shift_data_position
from optrun.runner.resume.global_batch import (
    ACCUMULATION,
    GLOBAL,
    MICRO,
    decide_batch_sizes,
    describe_derived_micro_batch,
)
from optrun.training.state import TrainState


def request(
    *words: str, typed: tuple[str, ...] = (), recipe: str = "config", folder: Path | None = None
) -> Request:
    """A start with these words, of which the run knows those in `typed` as its command line."""
    named = None if folder is None else str(folder)
    line = CommandLine(overrides=words, config_name=recipe)
    return replace(compose_request(store.open_hydra(named), line), overrides=typed)


def checkpoint(micro: int, count: int, *words: str) -> CheckpointMetadata:
    """Of a run with these words, whose steps were so many micro-batches of this size."""
    plan = {"batch_size": micro, "accumulation": count}
    return CheckpointMetadata(global_step=2, plan=plan, config=dict(request(*words).values))


@pytest.mark.parametrize(
    ("micro", "count", "ranks", "found"),
    [
        (4, 2, 1, (4, 2)),  # 2 -> 1
        (16, 1, 2, (8, 2)),  # 1 -> 2
        (4, 2, 4, (2, 4)),  # 2 -> 4
        (4, 4, 2, (4, 4)),
        (6, 4, 3, (4, 6)),  # 4 -> 3: 24 examples
        (7, 2, 2, (7, 2)),
    ],
)
def test_a_step_keeps_its_examples(
    micro: int, count: int, ranks: int, found: tuple[int, int]
) -> None:
    words = [f"{MICRO}={micro}"]
    settled = decide_batch_sizes(request(*words), checkpoint(micro, count, *words), ranks)
    assert (settled.micro_batch_size, settled.micro_batches) == found
    training = settled.request.config.training
    assert training.gradient_accumulation_steps * ranks == settled.micro_batches
    assert (
        training.per_device_train_batch_size
        == settled.request.values["training"]["per_device_train_batch_size"]
    )
    assert settled.examples == (micro * count, micro * count)
    assert set(settled.derived) == {MICRO, ACCUMULATION}
    # The next start, on as many ranks as at first, finds its way back.
    again = replace(checkpoint(*found), config=settled.request.values)
    back = decide_batch_sizes(settled.request, again, 1)
    assert back.micro_batch_size * back.micro_batches == micro * count


def test_what_cannot_be_shared_is_refused_with_what_can() -> None:
    words = [f"{MICRO}=4"]
    with pytest.raises(ConfigError) as error:
        decide_batch_sizes(request(*words), checkpoint(4, 4, *words), 3)
    for fact in (
        f"{GLOBAL}=16",
        "3 ranks",
        "1, 2, 4, 8 or 16 ranks",
        f"{GLOBAL}=15",
        f"{GLOBAL}=18",
    ):
        assert fact in str(error.value)
    for number in (15, 18):  # what is advised works
        asked = request(f"{GLOBAL}={number}", typed=(f"{GLOBAL}={number}",))
        settled = decide_batch_sizes(asked, checkpoint(4, 4, *words), 3)
        assert settled.micro_batch_size * settled.micro_batches == number
        assert settled.micro_batch_size <= 4
    exact = request(*words, typed=(f"{MICRO}=4",))
    with pytest.raises(ConfigError, match=f"{MICRO}=4"):
        decide_batch_sizes(exact, checkpoint(4, 2, *words), 4)


@pytest.mark.parametrize(
    ("changed", "typed", "examples"),
    [
        ([f"{MICRO}=8"], [f"{MICRO}=8"], 8),
        ([f"{ACCUMULATION}=4"], [f"{ACCUMULATION}=4"], 16),
        ([f"{GLOBAL}=12"], [f"{GLOBAL}=12"], 12),
    ],
)
def test_what_the_command_line_says_wins(
    changed: list[str], typed: list[str], examples: int
) -> None:
    words = [f"{MICRO}=4"]
    asked = {word.partition("=")[0]: word for word in [*words, *changed]}
    settled = decide_batch_sizes(
        request(*asked.values(), typed=tuple(typed)), checkpoint(4, 2, *words), 1
    )
    assert settled.micro_batch_size * settled.micro_batches == examples
    assert not settled.derived
    assert settled.examples == (8, examples)


@pytest.mark.parametrize(
    ("typed", "ranks", "found"),
    [
        ([f"{ACCUMULATION}=1"], 1, (4, 4)),  # 1: it follows from the step
        ([f"{ACCUMULATION}=2"], 2, (4, 4)),
        ([f"{ACCUMULATION}=2"], 4, (2, 8)),
        ([f"{MICRO}=4"], 1, (4, 4)),
        ([f"{MICRO}=4", f"{ACCUMULATION}=2"], 2, (4, 4)),
    ],
)
def test_a_value_said_again_asks_for_no_other_batch(
    typed: list[str], ranks: int, found: tuple[int, int]
) -> None:
    """And holds: what nobody said follows from it."""
    words = dict.fromkeys([f"{MICRO}=4", *typed])
    settled = decide_batch_sizes(
        request(*words, typed=tuple(typed)), checkpoint(4, 4, *words), ranks
    )
    assert (settled.micro_batch_size, settled.micro_batches) == found
    assert settled.examples == (16, 16)


def test_an_accumulation_said_again_that_other_ranks_cannot_keep_is_refused() -> None:
    words = [f"{MICRO}=4", f"{ACCUMULATION}=2"]
    asked = request(*words, typed=(f"{ACCUMULATION}=2",))
    with pytest.raises(ConfigError, match=rf"{ACCUMULATION}=2.* 2, 4 or 8 ranks"):
        decide_batch_sizes(asked, checkpoint(4, 4, *words), 1)


def test_a_branch_takes_the_steps_of_its_trunk() -> None:
    """Its command line repeats the values of the trunk: they are no changes."""
    words = [f"{MICRO}=4", f"{ACCUMULATION}=2"]
    settled = decide_batch_sizes(
        request(*words, typed=tuple(words)), checkpoint(4, 4, *words), 1, branches=True
    )
    assert (settled.micro_batch_size, settled.micro_batches) == (4, 4)


@pytest.mark.parametrize(
    ("words", "ranks", "found"),
    [
        ([f"{GLOBAL}=16"], 2, (8, 2)),
        ([f"{GLOBAL}=16"], 1, (16, 1)),
        ([f"{GLOBAL}=48"], 2, (12, 4)),
        ([f"{GLOBAL}=64", f"{ACCUMULATION}=4"], 2, (8, 8)),
        ([f"{GLOBAL}=64", f"{MICRO}=16"], 2, (16, 4)),
        ([], 2, (16, 2)),
    ],
)
def test_a_size_that_nobody_gave_is_an_upper_bound(
    words: list[str], ranks: int, found: tuple[int, int]
) -> None:
    asked = request(*words)
    settled = decide_batch_sizes(asked, None, ranks)
    assert (settled.micro_batch_size, settled.micro_batches) == found
    assert settled.request.config.training.per_device_train_batch_size == found[0]
    told = describe_derived_micro_batch(asked, settled, ranks)
    assert (told is not None) == (found[0] != 16)
    assert told is None or f"{MICRO}={found[0]}" in told


def test_a_size_that_somebody_gave_is_exact(tmp_path: Path) -> None:
    """On the command line or in a recipe, also where it is the default's number."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\ntraining: {per_device_train_batch_size: 16}\n"
    )
    by_recipe = request(f"{GLOBAL}=16", recipe="mine", folder=tmp_path)
    for asked in (request(f"{GLOBAL}=16", f"{MICRO}=16"), by_recipe):
        with pytest.raises(
            ConfigError, match=f"{GLOBAL}=16: expected a multiple of {MICRO}=16 times 2 ranks"
        ):
            decide_batch_sizes(asked, None, 2)
    with pytest.raises(ConfigError, match=rf"{GLOBAL}=9: expected a multiple of 2 ranks"):
        decide_batch_sizes(request(f"{GLOBAL}=9"), None, 2)


@pytest.mark.parametrize("lengths", [None, [3] * 50])
def test_the_place_in_the_data_is_the_same_one(lengths: Any) -> None:
    """However a step is divided; also where examples of like length share one."""
    before = plan_values(EpochPlan(50, 4, 4, 7, lengths), "a-b")
    state = TrainState(global_step=5)
    assert shift_data_position(before, state, EpochPlan(50, 2, 8, 7, lengths), "a-b") is None
    assert state.position == 5
    steps = [EpochPlan(50, micro, 16 // micro, 7).steps(5) for micro in (2, 4, 8)]
    for _ in range(6):
        seen = [[key for keys in next(plan) for key in keys] for plan in steps]
        assert seen[0] == seen[1] == seen[2]


def test_the_table_says_what_becomes_of_the_numbers() -> None:
    ranks = {"distributed.name": ("ddp", "none"), ACCUMULATION: (1, 2)}
    kept = table(ranks, derived={ACCUMULATION: "8 examples a step, as before"}, examples=(8, 8))
    assert "rounding" in kept
    assert "8 examples a step, as before" in kept
    other = table({"distributed.name": ("ddp", "none")}, examples=(8, 4))
    for fact in ("changes which examples come next", "8 a step then", "4 now"):
        assert fact in other
    assert (
        effect_of_change("distributed.param_dtype")
        == effect_of_change("distributed.reduce_dtype")
        == "mathematics"
    )
    assert effect_of_change("training.eval_steps") == "evaluation"
    assert (
        effect_of_change("distributed.name")
        == effect_of_change("training.per_device_eval_batch_size")
        == "rounding"
    )
