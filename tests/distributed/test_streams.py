"""A stream, and chats, on several ranks.

The batches and the losses of one rank, also after a move to other numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.ranked_runs import Start, batches, differences, start_on
from tests.e2e.test_sft import write_chats
from tests.running import TINY_BERT, TINY_GPT, sentence

NAMES = ("train/loss", "eval/loss", "train/grad_norm")
COMMON = [
    "data=files",
    "training.max_steps=7",
    "training.per_device_train_batch_size=4",
    "training.global_batch_size=16",
    "training.logging_steps=1",
    "training.eval_steps=3",
    "checkpoint.save_steps=2",
]
STREAM = ["data.streaming=true", "data.shuffle_window=7"]
GPT = [word for word in TINY_GPT if not word.startswith("data.")]
CHATS = [
    *(word for word in GPT if not word.startswith("task.")),
    *(
        "task=sft",
        "data.max_length=64",
        "task.chat_template=chatml",
        "task.assistant_only_loss=true",
        "task.sample_tokens=0",
    ),
]
CASES = {
    "blocks": [*GPT, "data.max_length=16", *STREAM],
    "rows": [
        *TINY_BERT,
        "task=sequence_classification",
        "model.config.hidden_dropout_prob=0.1",
        *STREAM,
    ],
    "chats": CHATS,
    "chats-packed": [*CHATS, "task.packing=true"],
    "chats-streamed": [*CHATS, *STREAM],
}
"""An epoch of each ends in the middle of a step's micro-batches."""


def start(
    case: str, folder: Path, kind: str, *more: str, stop_at: int | None = None, name: str = ""
) -> Start:
    """A start of a case in a folder of its own.

    Its data are written where they are not yet there.
    """
    chats = case.startswith("chats")
    parts = [folder / f"{case[:5]}-{part}.jsonl" for part in range(3)]
    for part, path in enumerate(parts):
        if path.exists():
            continue
        if chats:
            write_chats(folder, 23, path.name)
        else:
            rows = range(31 * part, 31 * part + 31)
            lines = ({"text": sentence(row), "label": "odd" if row % 2 else "even"} for row in rows)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.train=[{parts[0]},{parts[1]}]", f"data.eval={parts[2]}"]
    words = [*COMMON, *CASES[case], *files, f"distributed={kind}", *more]
    return Start(folder / (name or f"{case}-{kind}"), words, stop_at)


def same(one: Path, other: Path, tolerance: float = 1e-6) -> None:
    """The same batches in the same order, and the same losses but for the order of a sum."""
    assert batches(one) == batches(other)
    found = differences(one, other, NAMES)
    assert max(found["train/loss"], found["eval/loss"]) <= tolerance, found
    assert found["train/grad_norm"] <= 100 * tolerance, found


def compare(folder: Path, kinds: list[str], cases: list[str], *more: str) -> None:
    """Each of these cases on two ranks in each of these ways, and alone."""
    start_on(
        2, [start(case, folder, kind, *more) for case in cases for kind in kinds], folder / "meet"
    )
    start_on(1, [start(case, folder, "none", *more) for case in cases], folder)
    for case in cases:
        for kind in kinds:
            same(folder / f"{case}-none", folder / f"{case}-{kind}")


def test_two_ranks_read_the_stream_of_one(tmp_path: Path) -> None:
    compare(tmp_path, ["ddp"], ["rows"], "training.max_steps=3", "checkpoint.save_steps=9")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_stream_and_chat_on_two_ranks(tmp_path: Path, kind: str) -> None:
    """Target tokens of micro-batches differ, so a mean of means would be another loss."""
    compare(tmp_path, [kind], list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["blocks", "rows", "chats-streamed"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stream_goes_on_with_other_ranks_and_workers(
    tmp_path: Path, kind: str, case: str
) -> None:
    """Begun on 2 ranks, gone on with alone and with workers, ended on 2 ranks with workers, in
    the second epoch.
    """
    start_on(1, [start(case, tmp_path, "none")], tmp_path)
    workers, moved = "training.dataloader_num_workers=2", "moved"
    start_on(2, [start(case, tmp_path, kind, stop_at=2, name=moved)], tmp_path / "first")
    start_on(1, [start(case, tmp_path, kind, workers, stop_at=4, name=moved)], tmp_path)
    start_on(2, [start(case, tmp_path, kind, workers, name=moved)], tmp_path / "second")
    same(tmp_path / f"{case}-none", tmp_path / moved)
