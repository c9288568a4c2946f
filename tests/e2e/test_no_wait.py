"""Between two lines of metrics a step reads no number of the device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optrun.config import store
from optrun.task import base, sequence_classification
from optrun.training.loop import Loop
from optrun.training.step import TrainStep
from tests.e2e.prediction_runs import WORDS, write_rows
from tests.e2e.test_agreement import words_of
from tests.e2e.test_embedding import ROWS as TEXT_PAIRS
from tests.e2e.test_embedding import RUN as EMBEDDING
from tests.e2e.test_preference import SMALL as PREFERENCE
from tests.e2e.test_preference import write_pairs
from tests.running import optrun, records, state, tensors

TASKS = [*WORDS, "sft", "preference", "embedding"]
ENCODED = sorted(set(WORDS) - {"image_classification", "causal_lm"})
"""Tasks of encoders that pad rows of unequal length."""
OPTIMIZERS = sorted(set(store.GROUPS["optimizer"]) - {"pytorch_optimizer"})
OPTIMIZER_WORDS = {"muon": ["param_groups=standard"], "sgd": ["optimizer.momentum=0.9"]}
ELSEWHERE = {"masking_utils.py", "_adafactor.py", "plan.py"}
HOST_STATE = ("step", "mu_product")
"""State that torch's optimizers keep on the host, where reading it waits for nothing."""


class Reads(TorchDispatchMode):
    """Counts the reads that would wait for a device.

    Two are not optrun's: transformers looks whether an attention mask masks anything, or without a
    mask whether a decoder's positions begin anew, and torch's Adafactor reads the norms of weights
    and updates. The plan of an optimizer compares addresses,
    which are on the host on every machine.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.is_counting = True
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self.is_host_state(args[0]):
            files = {Path(frame.f_code.co_filename).name for frame, _ in walk_stack(None)}
            self.count += self.is_counting and not files & ELSEWHERE
        return func(*args, **(kwargs or {}))

    def is_host_state(self, tensor: torch.Tensor) -> bool:
        states = self.optimizer.state.values()
        return any(state.get(name) is tensor for state in states for name in HOST_STATE)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The reads of each step whose numbers nobody asks for, after the first two.

    `tolist` dispatches nothing on a CPU, so that its calls on floating-point tensors count, too.
    """
    counts: list[int] = []
    take_step, exchange, tolist = Loop._step, TrainStep.exchange, torch.Tensor.tolist

    def counted(self: Loop) -> None:
        number = self.state.global_step + (self._pending is not None) + 1
        if number < 3 or self._must_read_result_of(number):
            take_step(self)
            return
        with Reads(self.setup.train_step.optimizer) as reads, monkeypatch.context() as patch:

            def counted_tolist(tensor: torch.Tensor) -> Any:
                reads.count += tensor.is_floating_point()
                return tolist(tensor)

            def uncounted_exchange(step: TrainStep, *batches: Any) -> Any:
                reads.is_counting = False  # it looks at batches before they are moved
                facts = exchange(step, *batches)
                reads.is_counting = True
                return facts

            patch.setattr(torch.Tensor, "tolist", counted_tolist)
            patch.setattr(TrainStep, "exchange", uncounted_exchange)
            take_step(self)
        counts.append(reads.count)

    monkeypatch.setattr(Loop, "_step", counted)
    return counts


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    monkeypatch.chdir(tmp_path)


def task_words(task: str) -> list[str]:
    """Words of a run of seven steps; its data lie in the current folder."""
    if task == "preference":
        write_pairs(Path())
        return [*PREFERENCE, "training.max_steps=7"]
    if task == "embedding":
        write_rows(Path("train.jsonl"), TEXT_PAIRS)
        return [word.replace("max_steps=6", "max_steps=7") for word in EMBEDDING]
    return words_of(task, 7)


def single_rows(task: str, steps: int) -> list[str]:
    """Words of a run whose batches have one row, so that nothing is padded."""
    key = "training.per_device_train_batch_size="
    return [*(word for word in words_of(task, steps) if not word.startswith(key)), f"{key}1"]


def sparse(words: list[str]) -> list[str]:
    """Seven steps with one line and one evaluation, both at the end."""
    keys = ("training.logging_steps", "training.eval_steps", "checkpoint.")
    kept = [word for word in words if not word.startswith(keys)]
    return [*kept, "training.logging_steps=7", "training.eval_steps=7", "checkpoint=none"]


@pytest.mark.parametrize("task", TASKS)
def test_no_task_is_waited_for(task: str, counts: list[int]) -> None:
    assert optrun(*sparse(task_words(task))) == 0
    assert counts == [0, 0, 0, 0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_is_waited_for(optimizer: str, counts: list[int]) -> None:
    words = [
        *sparse(words_of("causal_lm", 7)),
        f"optimizer={optimizer}",
        *OPTIMIZER_WORDS.get(optimizer, []),
        "training.gradient_accumulation_steps=2",
    ]
    assert optrun(*[word for word in words if not word.startswith("lr=")]) == 0
    assert counts == [0, 0, 0, 0]


@pytest.mark.parametrize("task", ENCODED)
def test_no_mask_is_read_if_nothing_is_padded(
    task: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ELSEWHERE", ELSEWHERE - {"masking_utils.py"})
    assert optrun(*sparse(single_rows(task, 7))) == 0
    assert counts == [0, 0, 0, 0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("task", ENCODED)
def test_a_mask_that_masks_nothing_changes_no_bit(
    task: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*single_rows(task, 3), f"model.attn_implementation={attention}"]
    assert optrun(*words) == 0
    Path("run").rename("lean")
    for module in (base, sequence_classification):
        monkeypatch.setattr(module, "model_inputs", base.pad_inputs)
    assert optrun(*words) == 0
    assert records(Path("lean")) == records(Path("run"))
    assert tensors(Path("lean"), 3) == tensors(Path("run"), 3)
    digests = {state(Path(run), 3)["train"]["batches_digest"] for run in ("lean", "run")}
    assert len(digests) == 2, "both runs had a mask, or both had none"


def test_a_component_that_reads_is_counted(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fetch = Loop._fetch

    def fetch(self: Loop) -> Any:
        batches = plain_fetch(self)
        next(iter(self.setup.model.parameters())).sum().item()
        return batches

    monkeypatch.setattr(Loop, "_fetch", fetch)
    assert optrun(*sparse(words_of("causal_lm", 7))) == 0
    assert counts == [1, 1, 1, 1]
