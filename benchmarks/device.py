"""Speeds on a CUDA device: optimizer steps, and training steps beside a bare loop and Trainer.

    python benchmarks/device.py [--seconds 120]

`make gpu` runs it after the tests. The first table is one step of each optimizer over the 199
tensors of BERT-base, over the time of torch's fused AdamW in the same round. The second is a step
of GPT-2 with 124 million parameters on blocks of 1,024 tokens in bf16: a bare loop (fused AdamW,
batches in pinned memory, loss read every ten steps), transformers.Trainer, and optrun's loop.
Between them stands the loss over 128,256 words: all logits, optrun's chunks, torch's and liger's.
With `OPTRUN_GPU_DRY=1` both run on the CPU with small models, which shows that the program works
and says nothing of a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from chunked_loss import WAYS, loss
from optimizer_step import bert

from optrun.optimizer import (
    Adamax,
    AdamW,
    AdamWDL,
    AdEMAMix,
    Lamb,
    LazyAdam,
    Lion,
    Mars,
    ScheduleFreeAdamW,
)

DRY = os.environ.get("OPTRUN_GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
OPTIMIZERS = [AdamW, Lamb, AdamWDL, Adamax, LazyAdam, Lion, ScheduleFreeAdamW, AdEMAMix, Mars]
LR = 1e-9
"""So small that the weights, which all optimizers share, stay what they are."""


def seconds_of(work: Callable[[], object]) -> float:
    """Time one piece of work, the device's part included."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def optimizer_steps(rounds: int) -> None:
    """Print the step of each optimizer over that of fused AdamW, by turns."""
    params = bert(2, 1000, DEVICE) if DRY else bert(12, 30522, DEVICE)
    for param in params.values():
        param.grad = torch.randn_like(param) * 1e-3
    print(
        f"\n{sum(p.numel() for p in params.values()) / 1e6:.0f} M weights in {len(params)} tensors"
    )
    print("| optimizer | over torch's fused AdamW | extra memory, MiB |\n| --- | --- | --- |")
    for make in OPTIMIZERS:
        reference = torch.optim.AdamW(params.values(), lr=LR, fused=True)
        optimizer = make(params.items(), lr=LR)
        for _ in range(3):
            reference.step()
            optimizer.step()
        ratios = []
        memory = 0
        for _ in range(rounds):
            base = seconds_of(reference.step)
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
                memory = torch.cuda.memory_allocated()
            ratios.append(seconds_of(optimizer.step) / base)
        extra = torch.cuda.max_memory_allocated() - memory if DEVICE == "cuda" else 0
        print(
            f"| {make.__name__} | {statistics.median(ratios):.2f} | {extra / 2**20:.0f} |",
            flush=True,
        )


def head_losses(rounds: int) -> None:
    """Print time, memory and error of the gradient of each way to a loss over a vocabulary."""
    rows, width, vocabulary = (64, 32, 512) if DRY else (8192, 2048, 128256)
    dtype = torch.float32 if DRY else torch.bfloat16
    torch.manual_seed(0)
    states = torch.randn(rows, width, dtype=dtype, device=DEVICE).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=dtype, device=DEVICE).mul_(0.02)
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    print(f"\nA loss over {rows} x {width} x {vocabulary}, {dtype}, forward and backward")
    print("| loss | ms | memory, MiB | gradient's distance |\n| --- | --- | --- | --- |")
    reference: torch.Tensor | None = None
    for way in (*WAYS, "liger"):

        def work(way: str = way) -> None:
            states.grad = weight.grad = None
            if way != "liger":
                loss(way, states, weight, targets).backward()
                return
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            LigerFusedLinearCrossEntropyLoss()(weight, states, targets).backward()

        try:
            work()
        except (ImportError, AttributeError) as error:
            print(f"| {way} | left out: {error} | | |")
            continue
        states.grad = weight.grad = None
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        seconds = statistics.median(seconds_of(work) for _ in range(rounds))
        peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
        assert states.grad is not None
        gradient = states.grad.float()
        reference = gradient if reference is None else reference
        distance = float((gradient - reference).norm() / reference.norm())
        print(f"| {way} | {seconds * 1e3:.2f} | {peak / 2**20:,.0f} | {distance:.1e} |", flush=True)


def gpt2() -> Any:
    """Build GPT-2 without dropout; a small one in a dry run."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512} if DRY else {}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout))


def blocks(length: int, count: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (count, length), generator=generator)


def write_tokenizer(size: int, folder: str) -> None:
    """Write a tokenizer whose words are the numbers below `size`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", eos_token="0", pad_token="0"
    ).save_pretrained(folder)


def bare_loop(ids: torch.Tensor, batch: int, steps: int, *, compiled: bool) -> Iterator[float]:
    """Yield the time at which each step was launched, and at the end that of the last one done."""
    model = gpt2().to(DEVICE)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    host = ids.pin_memory() if DEVICE == "cuda" else ids
    for step in range(steps):
        start = step * batch % (len(ids) - batch + 1)
        moved = host[start : start + batch].to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = run(input_ids=moved, labels=moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            float(loss)
        yield time.perf_counter()


def trainer_loop(ids: torch.Tensor, batch: int, steps: int, *, compiled: bool) -> Iterator[float]:
    """Train with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    rows = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            bf16=True,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            torch_compile=compiled,
            optim="adamw_torch_fused",
            use_cpu=DEVICE == "cpu",
            disable_tqdm=True,
        )
        Trainer(model=gpt2(), args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    yield from ends


def optrun_loop(
    ids: torch.Tensor, batch: int, steps: int, *, compiled: bool, optimizer: str = "adamw"
) -> Iterator[float]:
    """Train with optrun, on the same blocks as a token file."""
    import numpy as np

    import optrun
    from optrun.training.step import TrainStep

    ends: list[float] = []
    take_step = TrainStep.compute_gradients

    def timed(step: TrainStep, *args: Any) -> Any:
        result = take_step(step, *args)
        ends.append(time.perf_counter())
        return result

    model = gpt2().config
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model.vocab_size, f"{folder}/tokenizer")
        ids.numpy().astype(np.uint16).tofile(Path(folder, "train.bin"))
        ids[:batch].numpy().astype(np.uint16).tofile(Path(folder, "eval.bin"))
        TrainStep.compute_gradients = timed  # type: ignore[method-assign]
        try:
            optrun.run(
                [
                    "data=tokens",
                    f"data.train={folder}/train.bin",
                    f"data.eval={folder}/eval.bin",
                    f"data.max_length={ids.shape[1]}",
                    "model=from_config",
                    f"model.tokenizer={folder}/tokenizer",
                    "model.model_type=gpt2",
                    f"model.vocab_size={model.vocab_size}",
                    f"model.config={{n_embd: {model.n_embd}, n_layer: {model.n_layer},"
                    f" n_head: {model.n_head}, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}}",
                    f"optimizer={optimizer}",
                    "training.precision=bf16",
                    f"training.device={DEVICE}",
                    f"training.compile={str(compiled).lower()}",
                    f"training.per_device_train_batch_size={batch}",
                    f"training.max_steps={steps}",
                    "training.logging_steps=10",
                    "training.eval_steps=null",
                    "checkpoint=none",
                    f"hydra.run.dir={folder}/run",
                ]
            )
        finally:
            TrainStep.compute_gradients = take_step  # type: ignore[method-assign]
    yield from ends


def training_steps(budget: float) -> None:
    """Print tokens a second of each loop, compiled and not, over the bare loop."""
    batch, length, steps = (2, 64, 12) if DRY else (16, 1024, 60)
    ids = blocks(length, batch * (steps + 2), 512 if DRY else 50257)
    loops: dict[str, Callable[..., Iterator[float]]] = {
        "bare loop": bare_loop,
        "transformers.Trainer": trainer_loop,
        "optrun": optrun_loop,
    }
    print(f"\nGPT-2, {batch} x {length} tokens a step, bf16")
    print("| loop | compiled | tokens a second | over the bare loop | peak memory, GiB |")
    print("| --- | --- | --- | --- | --- |")
    begin = time.perf_counter()
    for compiled in (False,) if DRY else (False, True):
        base = 0.0
        for name, loop in loops.items():
            if time.perf_counter() - begin > budget:
                print(f"| {name} | {compiled} | left out: {budget:.0f} s were spent | | |")
                continue
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                ends = list(loop(ids, batch, steps, compiled=compiled))
            except ImportError as error:
                print(f"| {name} | {compiled} | left out: {error} | | |")
                continue
            half = len(ends) // 2
            rate = batch * length * (len(ends) - 1 - half) / (ends[-1] - ends[half])
            base = base or rate
            peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0
            print(
                f"| {name} | {'yes' if compiled else 'no'} | {rate:,.0f} | {rate / base:.2f} |"
                f" {peak:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=150, help="for the training steps")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; OPTRUN_GPU_DRY=1 runs this on the CPU")
    name = "a dry run on the CPU" if DRY else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    optimizer_steps(3 if DRY else options.rounds)
    head_losses(3 if DRY else options.rounds)
    training_steps(options.seconds)


if __name__ == "__main__":
    main()
