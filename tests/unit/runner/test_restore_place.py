"""Where a run goes on: which data, which words, which classes; and what a change means."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import CheckpointError, ConfigError
from optrun.data.loader import EpochPlan
from optrun.runner import checkpoint_space as space
from optrun.runner.resume import restore as loading
from optrun.runner.resume.config_diff import (
    changes_since,
    may_change_data,
    refuse_change_without_effect,
    table,
)
from optrun.runner.resume.data_position import (
    class_names,
    plan_values,
    refuse_other_data,
    refuse_other_tokenizer,
    shift_data_position,
    vocabulary_digest,
    warn_of_other_eval_rows,
)
from optrun.runner.snapshot import Copier
from optrun.training.state import TrainState


def saved(**other: Any) -> CheckpointMetadata:
    """What a checkpoint says of its data."""
    of_data: dict[str, Any] = {
        "plan": {"fingerprint": "rows-held"},
        "tokenizer": "words",
        "model_config": {"id2label": {"0": "no", "1": "yes"}},
    }
    return CheckpointMetadata(global_step=0, **(of_data | other))


class Tokenizer:
    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def test_a_vocabulary_is_its_words_and_their_numbers() -> None:
    one = vocabulary_digest(Tokenizer("a", "b"))
    assert len(one) == 16
    assert one == vocabulary_digest(Tokenizer("a", "b"))
    assert (
        len({one, vocabulary_digest(Tokenizer("b", "a")), vocabulary_digest(Tokenizer("a"))}) == 3
    )
    assert vocabulary_digest(None) == vocabulary_digest(object()) == ""


def test_classes_are_ordered_by_number() -> None:
    """Not by the text of the number: JSON makes texts of them."""
    assert class_names(
        {"id2label": {str(number): f"c{number}" for number in reversed(range(12))}}
    ) == [f"c{number}" for number in range(12)]
    assert class_names({}) == class_names({"id2label": None}) == []


def test_the_same_data_and_other_data() -> None:
    refuse_other_data(saved(), saved(), {})
    refuse_other_data(saved(model_config={}), saved(), {})  # weights without classes
    other = saved(plan={"fingerprint": "others-held"})
    with pytest.raises(
        ConfigError, match=r"rows then, others.*|fingerprint rows-held then, others-held now"
    ):
        refuse_other_data(saved(), other, {"lr": (1, 2)})
    with pytest.raises(ConfigError, match="seed decides here which examples are kept"):
        refuse_other_data(saved(), other, {"seed": (1, 2)})
    refuse_other_data(saved(), other, {"data.train": ("a", "b")})
    with pytest.raises(
        ConfigError, match=r"^data.train, seed: with this change the tokenizer is another one"
    ):
        refuse_other_data(
            saved(), saved(tokenizer="x"), {"data.train": (1, 2), "lr": (1, 2), "seed": (1, 2)}
        )
    with pytest.raises(
        ConfigError,
        match=r"^the data: with this change the classes are yes, no, .*predict no, yes",
    ):
        refuse_other_data(saved(), saved(model_config={"id2label": {"0": "yes", "1": "no"}}), {})
    many = {"id2label": {str(number): f"c{number}" for number in range(13)}}
    with pytest.raises(ConfigError, match=r"c10, c11 and 1 more, but"):
        refuse_other_data(saved(), saved(model_config=many), {})
    twelve = {"id2label": {str(number): f"c{number}" for number in range(12)}}
    with pytest.raises(ConfigError, match=r"c10, c11, but"):
        refuse_other_data(saved(), saved(model_config=twelve), {})


def test_an_evaluation_needs_the_words_and_the_rows_of_the_run() -> None:
    words = Tokenizer("a")
    refuse_other_tokenizer(saved(tokenizer=vocabulary_digest(words)), words)
    with pytest.raises(ConfigError, match="the tokenizer is another one"):
        refuse_other_tokenizer(saved(), words)
    held = SimpleNamespace(fingerprint=lambda: "0123456789abcdef" * 2)
    assert (
        warn_of_other_eval_rows(saved(plan={"fingerprint": "rows-0123456789abcdef"}), held) is None
    )
    assert "not those that were held out" in str(warn_of_other_eval_rows(saved(), held))


def test_a_plan_is_what_decides_which_examples_come() -> None:
    plan = EpochPlan(50, 4, 2, 7)
    values = {
        "examples": 50,
        "batch_size": 4,
        "accumulation": 2,
        "seed": 7,
        "grouped": False,
        "fingerprint": "a-b",
    }
    values["ordering"] = "permutation"
    assert plan_values(plan, "a-b") == values
    assert plan_values(EpochPlan(50, 4, 2, 7, np.arange(50)), "a-b")["grouped"]
    for other in (EpochPlan(50, 8, 2, 7), EpochPlan(50, 4, 1, 7)):
        state = TrainState(
            global_step=9, passed_steps=1
        )  # the fourth step of the second epoch is next
        sentence = str(shift_data_position(values, state, other, "a-b"))
        assert state.position * other.batch_size * other.accumulation >= 50
        assert state.position == state.global_step + state.passed_steps + state.data_shift
        assert "24 of 50 examples of epoch 2 were seen" in sentence
    state = TrainState(global_step=9, passed_steps=1)
    assert "26 examples of epoch 2 are left out" in str(
        shift_data_position(values, state, EpochPlan(50, 4, 2, 8), "a-b")
    )
    assert state.position == 14
    state = TrainState(global_step=7)  # at the start of an epoch: nothing of it is left out
    assert "new epoch; 0 examples of epoch 2 are left out" in str(
        shift_data_position(values, state, EpochPlan(50, 4, 2, 8), "a-b")
    )
    state = TrainState(
        global_step=6
    )  # 48 of 50 were seen, and the last new step would begin before them
    assert "same order, 2 are left out of this epoch" in str(
        shift_data_position(values, state, EpochPlan(50, 20, 1, 7), "a-b")
    )
    assert state.position == 3


def test_a_run_in_an_older_order_of_windows_goes_on_with_a_new_epoch_and_says_so() -> None:
    def arranged(name: str) -> EpochPlan:
        return EpochPlan(50, 4, 2, 7, arrangement=SimpleNamespace(name=name))  # type: ignore[arg-type]

    state = TrainState(global_step=9, passed_steps=1)
    before = plan_values(arranged("windows of 9"), "a-b")
    assert shift_data_position(before, state, arranged("windows of 9"), "a-b") is None
    told = str(shift_data_position(before, state, arranged("4 far windows of 9"), "a-b"))
    for fact in (
        "windows of 9 then, 4 far windows of 9 now",
        "a new epoch; 26 examples of epoch 2 are left out",
    ):
        assert fact in told
    assert state.position == 14


def test_what_changed_is_told_and_idle_changes_are_refused(tmp_path: Path) -> None:
    changes = {"lr": (0.1, None), "training.logging_steps": (10, 20)}
    lines = table(changes).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["lr", "0.1", "->", "null", *["changes", "the", "weights", "from", "here", "on"]],
        ["training.logging_steps", "10", "->", "20", *["changes", "no", "number"]],
    ]
    assert len({line.index("->") for line in lines[1:]}) == 1
    assert table({}) == ""
    assert may_change_data({"lr": (1, 2), "task.x": (1, 2)})
    assert not may_change_data({"lr": (1, 2), "training.data": (1, 2)})
    refuse_change_without_effect({"training.logging_steps": (10, 20)}, 5)
    with pytest.raises(
        ConfigError,
        match=r"^lr=null \(was 0.1\): all 5 steps are done.*max_steps=N above 5",
    ):
        refuse_change_without_effect(changes, 5)
    (tmp_path / "rows.txt").touch()
    before = {"data": {"train": "rows.txt"}, "lr": 0.1}
    since = CheckpointMetadata(global_step=0, config=before)
    whole = {"data": {"train": str(tmp_path / "rows.txt")}, "lr": 0.1}
    assert changes_since(since, whole, tmp_path) == {}
    assert list(changes_since(since, whole, tmp_path / "elsewhere")) == ["data.train"]
    assert list(changes_since(since, {**before, "lr": 0.2}, tmp_path)) == ["lr"]


def test_who_is_blamed_for_a_state_that_does_not_fit() -> None:
    changes = {"model.width": (8, 16), "lr": (1, 2)}
    blamed = loading._unfit_error("too wide.", changes, ("model.", "task."))
    assert isinstance(blamed, ConfigError)
    assert str(blamed) == "model.width=16: too wide."
    many = {f"model.k{number}": (0, number) for number in range(5)}
    several = str(loading._unfit_error("too wide.", many, ("model.",)))
    assert several == "model.k0=0, model.k1=1, model.k2=2 and 2 more: too wide."
    assert isinstance(
        loading._unfit_error("too wide.", {"lr": (1, 2)}, ("model.",)), CheckpointError
    )
    newer = CheckpointMetadata(global_step=0, train={"zeal": 1})
    with pytest.raises(CheckpointError, match=r"state\.json: .*zeal"):
        loading.train_state(newer)


def test_what_a_schedule_saw_of_another_metric_is_forgotten() -> None:
    seen = {"mode": "min", "best": 1.0, "num_bad": 2, "reductions": 1}
    state = {"name": "plateau", "metric": "eval/loss", "plateau": seen}
    saved = {**state, "last_lr": [0.1]}

    def restored(now: dict) -> tuple[list[str], dict]:
        scheduler = Mock(state_dict=lambda: now, get_last_lr=lambda: [0.1])
        train_step: Any = SimpleNamespace(scheduler=scheduler)
        notes = loading.restore_schedule(saved, train_step)
        return notes, scheduler.load_state_dict.call_args.args[0]

    assert restored(state) == ([], saved)
    said, kept = restored({**state, "metric": "eval/f1"})
    assert "watches eval/f1 from here on: what it saw of eval/loss is forgotten" in said[0]
    assert kept["plateau"] == {**seen, "best": None, "num_bad": 0}
    assert restored({**state, "plateau": {**seen, "mode": "max"}})[0]


def test_another_environment_is_named() -> None:
    cpu = torch.device("cpu")
    now = loading.environment(cpu)
    assert now["device"] == "cpu"
    same = CheckpointMetadata(global_step=0, environment=now)
    assert loading.warn_of_other_environment(same, now) is None
    assert loading.warn_of_other_environment(CheckpointMetadata(global_step=0), now) is None
    other = CheckpointMetadata(global_step=0, environment={**now, "torch": "1.0"})
    assert f"torch 1.0 then, {now['torch']} now:" in str(
        loading.warn_of_other_environment(other, now)
    )
    elsewhere = loading.environment(cpu, kernel="fused")
    assert "optimizer kernel torch then, fused now:" in str(
        loading.warn_of_other_environment(same, elsewhere)
    )
    assert (
        loading.warn_of_other_environment(
            CheckpointMetadata(global_step=0, environment={"ranks": 1}), elsewhere
        )
        is None
    )


def test_room_is_counted_for_what_is_kept_and_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    saving: Any = SimpleNamespace(keep_last=2, keep_best=1)
    there: list[Path] = []
    monkeypatch.setattr(space, "checkpoint_folders", lambda _: there)
    monkeypatch.setattr(
        space.shutil, "disk_usage", lambda _: SimpleNamespace(free=4000 + space.MARGIN)
    )
    assert (
        space.space_warning(run, saving, 1000) is None
    )  # three and the one that is written before one goes
    assert "4 checkpoints of about" in str(space.space_warning(run, saving, 1001))
    there += [tmp_path] * 9
    assert space.space_warning(run, saving, 4000) is None  # one at least
    assert "1 checkpoints" in str(space.space_warning(run, saving, 4001))


def test_copies_are_made_into_the_same_memory_until_the_shape_changes() -> None:
    copier, source = Copier(), torch.ones(3)
    first = copier({"w": source})["w"]
    source.fill_(2.0)
    assert first.tolist() == [1.0] * 3
    assert copier({"w": source})["w"] is first
    assert copier({"w": torch.ones(4)})["w"].shape == (4,)
    assert copier({"w": torch.ones(4, dtype=torch.float64)})["w"].dtype is torch.float64


def test_what_lies_on_the_cpu_is_not_copied_if_nothing_changes_meanwhile() -> None:
    copier, source = Copier(), torch.ones(3)
    copier({"w": source})
    assert copier({"w": source}, in_place=True)["w"].data_ptr() == source.data_ptr()
    assert not copier._buffers
