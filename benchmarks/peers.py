"""The same model, rows and steps by optrun and by its peers.

Time, memory, and that the losses agree.

    python benchmarks/peers.py [--steps 24] [--repeats 3] [--only REGEX]

Chats and preferences train a GPT-2, pairs of texts a BERT, with torch's AdamW in float32, clipping
and no dropout, the rows in the order that optrun takes them. The bare loop is what a person writes
by hand, as nanoGPT does. Each run is a process of its own on one thread. Its times are CPU seconds,
so that other programs disturb less. Tokens are those of the rows, without padding, and the first
four steps do not count. The peak of memory holds all that is imported. A peer that is not installed
is named, and so is liger, whose kernels need a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]
BATCH, LENGTH, LR, WARM_UP = 8, 128, 1e-3, 4
WORDS = 65536
"""Of the large vocabulary."""
GPT = [
    "model=gpt_tiny",
    "model.config.n_layer=4",
    "model.config.n_embd=128",
    "model.config.n_head=4",
]
BERT = [
    "model=bert_tiny",
    "model.config.hidden_size=128",
    "model.config.hidden_dropout_prob=0.0",
    "model.config.attention_probs_dropout_prob=0.0",
]
Found = tuple[list[float], list[float]]
"""CPU time after each step, and the loss of each."""


class Peer(NamedTuple):
    """One way to train."""

    by: str
    train: Callable[[Path, int], Found] | None
    """Takes the folder of models and rows, and the steps; None.

    It needs a GPU, where CPU time would not tell.
    """
    needs: str = ""
    """A package."""

    def lacking(self) -> str:
        """Say what is missing; empty if nothing is."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"not installed: `pip install {self.needs.replace('_', '-')}`"
        return "" if self.train else "needs a GPU"


def by_optrun(task: str, model: str = "decoder", *more: str) -> Callable[[Path, int], Found]:
    """Train by optrun's own words."""

    def train(place: Path, steps: int) -> Found:
        import optrun
        from optrun.training.loop import Loop

        ticks, step, folder = [], Loop._step, place / f"run-{os.getpid()}"

        def ticking(self: Loop) -> None:
            step(self)
            ticks.append(time.process_time())

        with mock.patch.object(Loop, "_step", ticking):
            optrun.run(
                [
                    *words(place, task, steps),
                    "model=pretrained",
                    f"model.path={place / model}",
                    *more,
                    f"hydra.run.dir={folder}",
                ]
            )
        lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return ticks, [line["train/loss"] for line in lines if "train/loss" in line]

    return train


def words(place: Path, task: str, steps: int) -> list[str]:
    """What optrun is told."""
    return [
        f"task={task}",
        "data=files",
        f"data.train={place / task}.jsonl",
        "data.eval_fraction=0",
        f"lr={LR}",
        f"data.max_length={LENGTH}",
        f"training.max_steps={steps}",
        f"training.per_device_train_batch_size={BATCH}",
        "training.logging_steps=1",
        "training.dataloader_num_workers=0",
        "scheduler=constant",
        "checkpoint=none",
        "optimizer=adamw",
        "optimizer.weight_decay=0",
        "param_groups=single",
        "training.device=cpu",
    ]


def ordered(place: Path, task: str) -> Any:
    """Read the rows in the order of optrun's first epoch."""
    from datasets import Dataset

    from optrun.data.loader import EpochPlan

    rows = [
        json.loads(line)
        for line in (place / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    order = EpochPlan(len(rows), BATCH, 1, seed=0).order(0)[:]
    return Dataset.from_list([rows[int(at)] for at in order])


def tokenized(place: Path, model: str) -> tuple[Any, Any, list[dict[str, list[int]]]]:
    """Load model and tokenizer, and tokenise the chats: the last answer is the target."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / model)
    rows = []
    for row in ordered(place, "sft"):
        asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)[
            "input_ids"
        ]
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"])["input_ids"]
        labels = [-100] * len(asked) + whole[len(asked) :]
        rows.append({"input_ids": whole[:LENGTH], "labels": labels[:LENGTH]})
    return AutoModelForCausalLM.from_pretrained(place / model), tokenizer, rows


def bare(place: Path, steps: int) -> Found:
    """Train by hand."""
    from transformers import DataCollatorForSeq2Seq

    model, tokenizer, rows = tokenized(place, "decoder")
    model.train()
    batches: Any = torch.utils.data.DataLoader(
        rows, BATCH, collate_fn=DataCollatorForSeq2Seq(tokenizer)
    )  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0, fused=True)
    ticks, losses = [], []
    for batch, _ in zip(batches, range(steps), strict=False):
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        ticks.append(time.process_time())
    return ticks, losses


def ran(trainer: Any) -> Found:
    """Run a trainer of transformers, or one that is made of it."""
    from transformers import TrainerCallback

    ticks = []

    class Ticking(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ticks.append(time.process_time())

    trainer.add_callback(Ticking())
    trainer.train()
    return ticks, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def options(place: Path, steps: int) -> dict[str, Any]:
    """Give every trainer the same arguments."""
    return {
        "output_dir": str(place / f"run-{os.getpid()}"),
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
    }


def by_trainer(place: Path, steps: int) -> Found:
    """Train with transformers.Trainer."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model, tokenizer, rows = tokenized(place, "decoder")
    arguments = TrainingArguments(**options(place, steps), train_sampling_strategy="sequential")
    return ran(Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), rows))


def by_trl(
    kind: str, task: str, model: str = "decoder", **more: Any
) -> Callable[[Path, int], Found]:
    """Train with a trainer of TRL."""

    def train(place: Path, steps: int) -> Found:
        import trl
        from transformers import AutoModelForCausalLM, AutoTokenizer

        given = options(place, steps) | {
            "train_sampling_strategy": "sequential",
            "max_length": LENGTH,
        }
        arguments = getattr(trl, f"{kind}Config")(**given, gradient_checkpointing=False, **more)
        tokenizer = AutoTokenizer.from_pretrained(place / model)
        trained = AutoModelForCausalLM.from_pretrained(place / model)
        rows = ordered(place, task)
        return ran(
            getattr(trl, f"{kind}Trainer")(
                trained, args=arguments, train_dataset=rows, processing_class=tokenizer
            )
        )

    return train


def by_sentences(place: Path, steps: int) -> Found:
    """Train with sentence-transformers."""
    made: Any = importlib.import_module("sentence_transformers")
    losses: Any = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    samplers: Any = importlib.import_module("sentence_transformers.base.sampler")
    in_order = lambda rows, batch_size, drop_last, **_: samplers.DefaultBatchSampler(  # noqa: E731
        torch.utils.data.SequentialSampler(rows), batch_size, drop_last
    )
    model = made.SentenceTransformer(str(place / "encoder"))
    arguments = made.SentenceTransformerTrainingArguments(
        **options(place, steps), batch_sampler=in_order
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    return ran(
        made.SentenceTransformerTrainer(model, arguments, ordered(place, "embedding"), loss=loss)
    )


LARGE = f"chats, {WORDS:,} words"
PEERS = {
    "chats": [
        Peer("a bare loop", bare),
        Peer("optrun", by_optrun("sft")),
        Peer("transformers.Trainer", by_trainer, "accelerate"),
        Peer("TRL", by_trl("SFT", "sft"), "trl"),
    ],
    LARGE: [
        Peer("optrun, all logits", by_optrun("sft", "large", "training.chunked_loss=false")),
        Peer("optrun, chunked loss", by_optrun("sft", "large", "training.chunked_loss=true")),
        Peer("TRL, which computes the loss in chunks", by_trl("SFT", "sft", "large"), "trl"),
        Peer("TRL with liger", None),
    ],
    "preferences": [
        Peer("optrun", by_optrun("preference")),
        Peer("TRL", by_trl("DPO", "preference"), "trl"),
        Peer(
            "TRL, reference first",
            by_trl("DPO", "preference", precompute_ref_log_probs=True),
            "trl",
        ),
    ],
    "pairs of texts": [
        Peer("optrun", by_optrun("embedding", "encoder")),
        Peer("sentence-transformers", by_sentences, "sentence_transformers"),
    ],
}


def prepare(place: Path, steps: int) -> dict[str, int]:
    """Write rows and models; returns the tokens of the steps that count, by task."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import optrun
    from optrun.data import stdlib_chat, stdlib_pairs
    from optrun.data.stdlib import stdlib_files

    files = stdlib_files()[:120]
    answers = [row for path in files for row in stdlib_chat.pairs_of(path)]
    texts = {row["code"]: row["summary"] for path in files for row in stdlib_pairs.pairs_of(path)}
    pairs = {
        text: code for code, text in texts.items()
    }  # none twice: sentence-transformers takes it for a negative
    rows: dict[str, list[Any]] = {
        "sft": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in answers],
        "preference": answers,
        "embedding": [{"anchor": text, "positive": code} for text, code in pairs.items()],
    }
    for task, each in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in each[: steps * BATCH])
        (place / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    for task, model, name in (("sft", GPT, "decoder"), ("embedding", BERT, "encoder")):
        optrun.run([*words(place, task, 1), *model, f"hydra.run.dir={place / task}"])
        (place / task / "model").rename(place / name)
    grown = AutoModelForCausalLM.from_pretrained(place / "decoder")
    grown.resize_token_embeddings(WORDS)
    grown.save_pretrained(place / "large")
    chat, text = (AutoTokenizer.from_pretrained(place / name) for name in ("decoder", "encoder"))
    chat.save_pretrained(place / "large")
    file = place / "large" / "tokenizer.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    entries["model"]["vocab"] |= {f"<{number}>": number for number in range(len(chat), WORDS)}
    file.write_text(json.dumps(entries), encoding="utf-8")
    talks, compared, both = (ordered(place, task)[WARM_UP * BATCH :] for task in rows)

    def tokens(some: Any, side: str) -> int:
        chats = [*map(list.__add__, some["prompt"], some[side])]
        return sum(min(len(ids), LENGTH) for ids in chat.apply_chat_template(chats)["input_ids"])

    talk, told = (
        tokens(talks, "completion"),
        tokens(compared, "chosen") + tokens(compared, "rejected"),
    )
    known = sum(
        min(len(ids), LENGTH) for ids in text([*both["anchor"], *both["positive"]])["input_ids"]
    )
    return {"chats": talk, LARGE: talk, "preferences": told, "pairs of texts": known}


def measure(place: Path, steps: int, task: str, at: int) -> dict[str, Any]:
    """Train by one of them in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = PEERS[task][at].train
    assert train is not None
    ticks, losses = train(place, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counted = ticks[steps - 1] - ticks[WARM_UP - 1]
    return {"seconds": time.process_time(), "counted": counted, "peak": peak, "losses": losses}


def apart(place: Path, steps: int, *what: object) -> dict[str, Any]:
    """Prepare, or train by one, in a process of its own.

    The peak of a process holds that of the one it is made by.
    """
    command = [
        sys.executable,
        __file__,
        "--steps",
        str(steps),
        "--apart",
        json.dumps([str(place), *what]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(place: Path, steps: int, repeats: int, only: str) -> Iterator[str]:
    """Yield rows; losses are compared with those of the first of each task."""
    tokens = apart(place, steps)
    for task, peers in PEERS.items():
        asked = [at for at, peer in enumerate(peers) if re.search(only, f"{task}: {peer.by}")]
        able = [at for at in asked if not peers[at].lacking()]
        found: dict[int, list[dict[str, Any]]] = {at: [] for at in able}
        for turn in range(repeats):
            for at in able if turn % 2 else able[::-1]:
                found[at].append(apart(place, steps, task, at))
        for at in asked:
            said = f"| {task} | {peers[at].by} |"
            if at in able:
                middle = {
                    key: statistics.median(run[key] for run in found[at])
                    for key in ("seconds", "counted", "peak")
                }
                losses, first = (found[which][0]["losses"] for which in (at, able[0]))
                furthest = max(abs(a - b) for a, b in zip(losses, first, strict=True))
                said += (
                    f" {middle['seconds']:.0f} | {tokens[task] / middle['counted']:,.0f} |"
                    f" {middle['peak']:,.0f} |"
                )
                yield f"{said} {losses[-1]:.5f} | {'–' if at == able[0] else f'{furthest:.0e}'} |"
            else:
                yield f"{said} {peers[at].lacking()} | | | | |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="rows that have this in them, as in 'preferences: TRL'"
    )
    parser.add_argument("--apart", type=json.loads, help="what this process does")
    given = parser.parse_args()
    if given.apart is not None:
        place, *what = given.apart
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            told = (
                measure(Path(place), given.steps, *what)
                if what
                else prepare(Path(place), given.steps)
            )
        print(json.dumps(told))
        return
    print(f"{given.steps} steps of {BATCH} rows, medians of {given.repeats} runs.\n")
    print(
        "| rows | by | CPU seconds with the start | tokens a CPU second | peak memory, MiB | loss"
        " of the last step | largest difference of a loss |\n| --- | --- | --- | --- | --- | --- |"
        " --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        for row in table(Path(folder), given.steps, given.repeats, given.only):
            print(row, flush=True)


if __name__ == "__main__":
    main()
