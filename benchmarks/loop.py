"""What a step costs beyond the model.

Optrun's loop, transformers.Trainer, accelerate and a bare loop, in one run.

    python benchmarks/loop.py [--steps 400] [--repeats 5] [--only REGEX] [--profile]

All train the same GPT-2 of two layers on the same blocks of text with torch's fused AdamW, clipping
and a linear schedule, on one thread. The bare loop is what a person writes by hand: DataLoader,
forward, backward,
`clip_grad_norm_`, step, schedule, `loss.item()`; that of accelerate is the same through
`Accelerator.prepare`. optrun and Trainer log every 10 steps, and every step; nobody evaluates or
saves. CPU time, so that other programs disturb less. The loops take turns, and what each needs is
set against the bare loop of the same turn: the table has the median of the turns and the half of
them that lies in the middle. `--profile` shows where a step of optrun's spends its time.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib.util
import io
import itertools
import pstats
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

BATCH, LENGTH = 4, 16
MODEL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 320, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # as in optrun's gpt_tiny
WARM_UP = 50
"""Steps at the begin that are not counted."""


class Clock:
    """CPU seconds between the steps of a loop.

    Args:
        steps: Of the loop.
        profile: Runs over the steps that count; None: none does.
    """

    def __init__(self, steps: int, profile: cProfile.Profile | None = None) -> None:
        self.ticks: list[float] = []
        self.steps = steps
        self.profile = profile

    def tick(self) -> None:
        """A step is done."""
        self.ticks.append(time.process_time())
        if self.profile is not None and len(self.ticks) == WARM_UP:
            self.profile.enable()
        if self.profile is not None and len(self.ticks) == self.steps:
            self.profile.disable()

    def milliseconds(self) -> float:
        """A step's share.

        Log lines included, the begin left out, and blocks of ten so that a pause does not count.
        """
        ticks = self.ticks[WARM_UP::10]
        return statistics.median(b - a for a, b in itertools.pairwise(ticks)) * 100


def blocks(steps: int) -> list[dict[str, torch.Tensor]]:
    """Token blocks, as many as the steps take."""
    tokens = torch.randint(
        0, MODEL["vocab_size"], (steps * BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    return [{"input_ids": row, "labels": row} for row in tokens]


def model() -> torch.nn.Module:
    """The same for everyone but optrun, which builds its own of the same shapes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**MODEL, **NO_DROPOUT, use_cache=False))


def parts(steps: int) -> tuple[Any, ...]:
    """Model, optimizer, batches and schedule of a loop written by hand."""
    trained = model().train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    batches = torch.utils.data.DataLoader(blocks(steps), batch_size=BATCH, shuffle=True)
    return trained, optimizer, batches, schedule


def bare(steps: int, _: int) -> float:
    """Train by hand."""
    clock = Clock(steps)
    trained, optimizer, batches, schedule = parts(steps)
    for batch in batches:
        optimizer.zero_grad()
        loss = trained(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss.item()
        clock.tick()
    return clock.milliseconds()


def accelerated(steps: int, _: int) -> float:
    """Train by hand through accelerate."""
    from accelerate import Accelerator

    accelerator, clock = Accelerator(cpu=True), Clock(steps)
    trained, optimizer, batches, schedule = accelerator.prepare(*parts(steps))
    for batch in batches:
        with accelerator.accumulate(trained):
            optimizer.zero_grad()
            loss = trained(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            loss.item()
        clock.tick()
    return clock.milliseconds()


def trainer(steps: int, logging_steps: int) -> float:
    """Train with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(steps)

    class Ticking(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=logging_steps,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            optim="adamw_torch_fused",
        )
        Trainer(model(), arguments, train_dataset=blocks(steps), callbacks=[Ticking()]).train()
    return clock.milliseconds()


def optrun(steps: int, logging_steps: int, profile: cProfile.Profile | None = None) -> float:
    """Train with optrun."""
    import optrun as package
    from optrun.training.loop import Loop

    clock, step = Clock(steps, profile), Loop._step

    def ticking(self: Loop) -> None:
        step(self)
        clock.tick()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Loop, "_step", ticking),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        text = Path(folder, "text.txt")
        text.write_text(
            "".join(f"the {number}th line of a text, {number * number}\n" for number in range(4000))
        )
        package.run(
            [
                "optimizer=adamw",
                "param_groups=single",
                "scheduler=linear",
                "checkpoint=none",
                "data=files",
                f"data.train={text}",
                "data.eval_fraction=0",
                f"data.max_length={LENGTH}",
                f"training.max_steps={steps}",
                f"training.logging_steps={logging_steps}",
                f"training.per_device_train_batch_size={BATCH}",
                "task.sample_tokens=0",
                f"hydra.run.dir={folder}/run",
                f"model.vocab_size={MODEL['vocab_size']}",
                *(f"model.config.{key}={MODEL[key]}" for key in ("n_embd", "n_layer", "n_head")),
            ]
        )
    return clock.milliseconds()


def contenders(only: str) -> dict[str, tuple[Callable[[int, int], float], int]]:
    """Name of a loop -> the loop, and steps between its lines; the bare one first."""
    made: dict[str, tuple[Callable[[int, int], float], int]] = {}
    if importlib.util.find_spec("accelerate") is not None:
        made["accelerate, by hand"] = (accelerated, 0)
    for name, loop in (("optrun", optrun), ("transformers.Trainer", trainer)):
        made |= {
            f"{name}, a line every 10 steps": (loop, 10),
            f"{name}, a line every step": (loop, 1),
        }
    return {"a bare loop": (bare, 0)} | {
        name: each for name, each in made.items() if re.search(only, name)
    }


def cells(values: Sequence[float]) -> str:
    """Median and middle half, as two cells of a table."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return (
        f"{statistics.median(ordered):.2f} | {ordered[quarter]:.2f} to {ordered[-1 - quarter]:.2f}"
    )


def measure(steps: int, repeats: int, only: str) -> str:
    """Let the loops take turns; a table."""
    found: dict[str, list[float]] = {name: [] for name in contenders(only)}
    for _ in range(repeats):
        for name, (loop, every) in contenders(only).items():
            found[name].append(loop(steps, every))
    bases = found.pop("a bare loop")
    rows = [
        (
            f"1.00 is {statistics.median(bases):.1f} CPU ms, a step of the bare loop; {repeats}"
            f" turns of {steps} steps."
        ),
        "",
        "| a step of | CPU time over the bare loop | middle half | ms more | middle half |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        ratios = cells([value / base for value, base in zip(values, bases, strict=True)])
        rows.append(
            f"| {name} | {ratios} | {cells([a - b for a, b in zip(values, bases, strict=True)])} |"
        )
    return "\n".join(rows)


def profiled(steps: int) -> str:
    """Where the steps of optrun's loop spend their CPU time, with a line each.

    Optrun's functions, then all.
    """
    profile, out = cProfile.Profile(time.process_time), io.StringIO()
    optrun(steps, 1, profile)
    stats = pstats.Stats(profile, stream=out)
    stats.sort_stats("cumulative").print_stats("optrun/", 60)
    stats.sort_stats("time").print_stats(40)
    return out.getvalue()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="loops whose name has this in it, besides the bare one"
    )
    parser.add_argument(
        "--profile", action="store_true", help="of optrun's loop, instead of the table"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        profiled(given.steps) if given.profile else measure(given.steps, given.repeats, given.only)
    )


if __name__ == "__main__":
    main()
