"""One short run that was never disturbed, and copies of it as a crash would have left them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from optrun.artifacts.run_dir import RunDir
from tests.running import TINY_BERT, TINY_GPT, records, state, tensors, write_labelled, write_text

STEPS = 6
Go = Callable[..., tuple[int, str]]
"""Run optrun; exit code and everything that was said."""


def words(corpus: Path) -> list[str]:
    """A causal LM with dropout, logged and saved at every step, evaluated at every third."""
    return [
        *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
        "data=files",
        f"data.train={corpus}",
        "training.per_device_train_batch_size=4",
        "training.logging_steps=1",
        "training.eval_steps=3",
        f"training.max_steps={STEPS}",
        "checkpoint.save_steps=1",
        "checkpoint.keep_last=9",
    ]


_GPT = [word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT]
_BERT = [
    *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
    "data.max_length=16",
]
TASKS: dict[str, Callable[[Path], list[str]]] = {
    "causal_lm": lambda folder: [*_GPT, f"data.train={write_text(folder, 60)}"],
    "masked_lm": lambda folder: [*_BERT, "task=masked_lm", f"data.train={write_text(folder, 60)}"],
    "classification": lambda folder: [
        *_BERT,
        "task=sequence_classification",
        f"data.train={write_labelled(folder, 40)}",
    ],
}
EXAMPLES = 18
"""Of an epoch: four micro-batches of 4 and one of 2."""


def task_words(folder: Path, task: str, steps: int) -> list[str]:
    """A small run of a task, with dropout, saved and logged at every step."""
    return [
        "data=files",
        *TASKS[task](folder),
        f"data.max_train_examples={EXAMPLES}",
        "training.per_device_train_batch_size=4",
        "training.logging_steps=1",
        "training.eval_steps=4",
        f"training.max_steps={steps}",
        "checkpoint.save_steps=1",
        "checkpoint.keep_last=99",
    ]


def words_with(words: list[str], *changed: str) -> list[str]:
    """A command line with some values changed or added."""
    keys = tuple(f"{word.split('=')[0]}=" for word in changed)
    return [*(word for word in words if not word.startswith(keys)), *changed]


def cut(path: str | Path, place: str | Path, step: int) -> RunDir:
    """A copy as if killed right after the checkpoint of a step.

    Later metrics lines are there, checkpoints not.
    """
    run = RunDir(shutil.copytree(path, place))
    assert step == 0 or run.checkpoint(step).is_dir()
    for later in sorted(run.checkpoints.glob("step-*")):
        if later.name > run.checkpoint(step).name:
            shutil.rmtree(later)
    shutil.rmtree(run.model)
    run.best.unlink(missing_ok=True)  # of a run without evaluation there is none
    run.last.unlink()
    values = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**values, "status": "running"}))
    return run


class Straight:
    """The undisturbed run.

    Args:
        folder: Where it lies, with its corpus.
        given: Its command line, saving at every step; None: that of `words`.
        steps: How many it has.
    """

    def __init__(self, folder: Path, given: list[str] | None = None, steps: int = STEPS) -> None:
        self.words = words(write_text(folder, 100)) if given is None else given
        self.path = folder / "straight"
        self.steps = steps

    def words_with(self, *changed: str) -> list[str]:
        """Its command line, as `words_with`."""
        return words_with(self.words, *changed)

    def cut(self, place: Path, step: int) -> RunDir:
        """As `cut`."""
        return cut(self.path, place, step)

    def same(self, run: RunDir | Path) -> None:
        """Whether a run ended as this one did, to the last bit and line."""
        path = run.path if isinstance(run, RunDir) else run
        assert records(path) == records(self.path)
        assert tensors(path, self.steps) == tensors(self.path, self.steps)
        assert state(path, self.steps) == state(self.path, self.steps)
