"""What a step costs beyond the model: optrun's loop, transformers.Trainer and a bare loop on one tiny model.

    python benchmarks/loop.py [--steps 400] [--repeats 5]

All train the same GPT-2 of two layers on the same blocks of text with torch's AdamW, clipping and a linear schedule, on
one thread. The bare loop is what a person writes by hand: DataLoader, forward, backward, `clip_grad_norm_`, step,
schedule, `loss.item()`. optrun and Trainer log every 10 steps, and every step; neither evaluates nor saves. CPU
milliseconds a step, so that other programs disturb less; the loops take turns, and of each the median over the repeats
is told with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

BATCH, LENGTH = 4, 16
MODEL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 320, "n_positions": 64}
WARM_UP = 50
"""Steps at the begin that are not counted."""


class Clock:
    """CPU seconds between the steps of a loop."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def tick(self) -> None:
        """A step is done."""
        self.ticks.append(time.process_time())

    def milliseconds(self) -> float:
        """A step's share: log lines included, the begin left out, and blocks of ten so that a pause does not count."""
        ticks = self.ticks[WARM_UP::10]
        return statistics.median(b - a for a, b in itertools.pairwise(ticks)) * 100


def blocks(steps: int) -> list[dict[str, torch.Tensor]]:
    """Token blocks, as many as the steps take."""
    tokens = torch.randint(0, MODEL["vocab_size"], (steps * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def model() -> torch.nn.Module:
    """The same for Trainer and the bare loop; optrun builds its own of the same shapes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**MODEL, use_cache=False))


def bare(steps: int, _: int) -> float:
    """Train by hand."""
    trained, clock = model().train(), Clock()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for batch in torch.utils.data.DataLoader(blocks(steps), batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        loss = trained(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss.item()
        clock.tick()
    return clock.milliseconds()


def trainer(steps: int, logging_steps: int) -> float:
    """Train with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Ticking(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, logging_steps=logging_steps,
            learning_rate=1e-3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            optim="adamw_torch_fused",
        )  # fmt: skip
        Trainer(model(), arguments, train_dataset=blocks(steps), callbacks=[Ticking()]).train()
    return clock.milliseconds()


def optrun(steps: int, logging_steps: int) -> float:
    """Train with optrun."""
    import optrun as package
    from optrun.training.loop import Loop

    clock, step = Clock(), Loop._step

    def ticking(self: Loop) -> None:
        step(self)
        clock.tick()

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Loop, "_step", ticking):
        text = Path(folder, "text.txt")
        text.write_text("".join(f"the {number}th line of a text, {number * number}\n" for number in range(4000)))
        package.run(
            [
                "optimizer=adamw", "scheduler=linear", "checkpoint=none", "data=files", f"data.train={text}",
                "data.eval_fraction=0", f"data.max_length={LENGTH}", f"training.max_steps={steps}",
                f"training.logging_steps={logging_steps}", f"training.per_device_train_batch_size={BATCH}",
                "task.sample_tokens=0", f"hydra.run.dir={folder}/run", f"model.vocab_size={MODEL['vocab_size']}",
                *(f"model.config.{key}={MODEL[key]}" for key in ("n_embd", "n_layer", "n_head")),
            ]
        )  # fmt: skip
    return clock.milliseconds()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-trainer", action="store_true", help="for a quick look")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loops: dict[str, tuple[Callable[[int, int], float], int]] = {"bare": (bare, 0)}
    for name, loop in [("optrun", optrun), *([] if given.without_trainer else [("Trainer", trainer)])]:
        loops |= {f"{name}, a line every {every} steps": (loop, every) for every in (10, 1)}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(given.repeats):
        for name, (loop, every) in loops.items():
            found[name].append(loop(given.steps, every))
    print("| loop | ms a step | over bare, ms | smallest to largest |\n| --- | --- | --- | --- |")
    for name, values in found.items():
        over = [value - base for value, base in zip(values, found["bare"], strict=True)]
        spread = f"{min(over):.2f} to {max(over):.2f}"
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(over):.2f} | {spread} |")


if __name__ == "__main__":
    main()
