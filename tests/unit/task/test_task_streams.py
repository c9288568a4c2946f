"""A stream's examples are those of the same rows read whole, for every task that reads streams.

And what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from optrun.base.errors import ConfigError
from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS
from optrun.data.build import load_source
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.data.source import Source
from optrun.task import Task
from optrun.task.evaluation import IGNORED
from tests.unit.task.conftest import SENTENCE

WORDS = SENTENCE.split()
ROWS = range(40)
COLUMNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sequence_classification": lambda n: {"text": words(n), "label": ("odd", "even")[n % 2]},
}


def words(number: int) -> str:
    return " ".join(WORDS[(number + place) % len(WORDS)] for place in range(1 + number % 5))


def write(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Two files of unequal length."""
    paths = []
    for name, part in (("a.jsonl", rows[:23]), ("b.jsonl", rows[23:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        paths.append(str(folder / name))
    return paths


def source_of(paths: list[str], **values: Any) -> Source:
    config = choice(
        "data", SCHEMAS, "files", {"train": paths, "eval": paths, "max_length": 12, **values}
    )
    return load_source(config, seed=0, documents=False)


def both(
    make_task: Callable[..., Task], name: str, paths: list[str], **options: Any
) -> tuple[Task, Task]:
    return make_task(name, source_of(paths), **options), make_task(
        name, source_of(paths, streaming=True), **options
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[name], other[name]) for name in one)
    return all(map(same, one, other)) if isinstance(one, list) else bool(np.array_equal(one, other))


@pytest.mark.parametrize("name", COLUMNS)
def test_a_streams_examples_are_those_of_the_rows_read_whole(
    tmp_path: Path, make_task: Callable[..., Task], name: str
) -> None:
    whole, streamed = both(
        make_task, name, write(tmp_path, [COLUMNS[name](number) for number in ROWS])
    )
    assert len(whole.train) == len(streamed.train) == len(ROWS)
    assert streamed.labels == whole.labels
    assert streamed.needs() == whole.needs()
    for number in ROWS:
        assert same(whole.train[number], streamed.train[number]), number
    some = [streamed.train[number] for number in (3, 38, 20)]
    batch = streamed.collate(some)
    assert all(bool((batch[key] == other).all()) for key, other in whole.collate(some).items())
    assert streamed.eval.fingerprint() == whole.eval.fingerprint()


def test_classes_with_names_are_those_that_datasets_wrote(
    tmp_path: Path, make_task: Callable[..., Task]
) -> None:
    """As parquet of the hub has them: numbers in the file, names beside."""
    names = datasets.ClassLabel(names=["neg", "pos"])
    rows = {"text": [words(number) for number in ROWS], "label": [number % 2 for number in ROWS]}
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path, batch_size=7)
    whole, streamed = both(make_task, "sequence_classification", [str(path)])
    assert whole.labels == streamed.labels == ["neg", "pos"]
    assert all(same(whole.train[number], streamed.train[number]) for number in ROWS)


def test_a_bad_row_is_named_when_it_is_met(tmp_path: Path, make_task: Callable[..., Task]) -> None:
    rows = [COLUMNS["sequence_classification"](number) for number in ROWS]
    paths = write(tmp_path, [*rows, {"text": ["a"], "label": "odd"}])
    source = source_of(paths, streaming=True, eval=None, eval_fraction=0)
    task = make_task("sequence_classification", source)
    with pytest.raises(ConfigError, match=r"data\.train=.*b\.jsonl: row 18: it has \['a'\]"):
        task.train[40]


def chat(number: int, *, long: bool = False) -> dict[str, Any]:
    asked = {"role": "user", "content": SENTENCE * 3 if long else words(number)}
    return {"messages": [asked, {"role": "assistant", "content": words(number + 1)}]}


CHATS = {"chat_template": "chatml", "assistant_only_loss": True, "sample_tokens": 0}


def test_chats_without_a_target_are_left_out_of_their_batches(
    tmp_path: Path, make_task: Callable[..., Task]
) -> None:
    """Of a stream as of rows read whole, in whichever order; a run goes on in the middle of it."""
    long = {number for number in ROWS if number % 3 == 1}
    paths = write(tmp_path, [chat(number, long=number in long) for number in ROWS])
    source = source_of(
        paths, streaming=True, max_length=60, shuffle_window=8, eval=None, eval_fraction=0
    )
    with pytest.raises(
        ConfigError,
        match=r"a\.jsonl: row 2: data\.max_length=60: it has [\d,]+ tokens, .*rows=drop",
    ):
        _ = make_task("sft", source, **CHATS).train[1]
    task = make_task("sft", source, **CHATS, overlong_rows="drop")
    whole = make_task(
        "sft",
        source_of(paths, max_length=60, eval=None, eval_fraction=0),
        **CHATS,
        overlong_rows="drop",
    )
    assert any("13 of the first 40 rows (task.overlong_rows=drop)" in note for note in task.notes)
    assert len(task.train) == 40
    assert len(whole.train) == 27
    plan = EpochPlan(40, 2, 2, 0, arrangement=task.train.arrangement)  # type: ignore[attr-defined]
    loader = BatchLoader(task.train, None, task.collate, seed=0, workers=0)
    steps = [batches for batches, _ in zip(loader.training(plan, 0), range(10), strict=False)]
    rows = [
        row
        for batches in steps
        for batch in batches
        for row in batch["labels"]
        if (row != IGNORED).any()
    ]
    sizes = {len(batch["labels"]) for batches in steps for batch in batches}
    assert (len(rows), sizes) == (27, {1, 2})
    learnt = sorted(row[row != IGNORED].tolist() for row in rows)
    assert learnt == sorted(
        whole.train[at]["input_ids"][whole.train[at]["targets"] != 0].tolist() for at in range(27)
    )
    empty = [batch for batches in steps for batch in batches if not task.count(batch)]
    assert empty, "a batch of which none is left keeps one row, without a target"
    assert {len(batch["labels"]) for batch in empty} == {1}
    assert all(
        same(one, other) for one, other in zip(loader.training(plan, 6), steps[6:], strict=False)
    )


def test_what_no_length_gives_a_target_is_refused(
    tmp_path: Path, make_task: Callable[..., Task]
) -> None:
    for rows, message in (
        (
            [chat(0), {"messages": chat(0)["messages"][:1]}],
            r"a\.jsonl: row 2: it has no turn of the assistant",
        ),
        (
            [chat(number, long=True) for number in range(3)],
            r"every row of data\.train has a longer prompt",
        ),
    ):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = source_of(
            [str(tmp_path / "a.jsonl")], streaming=True, max_length=60, eval=None, eval_fraction=0
        )
        with pytest.raises(ConfigError, match=message):
            make_task("sft", source, **CHATS, overlong_rows="drop")


def test_texts_that_are_met_later_are_looked_at(
    tmp_path: Path, make_task: Callable[..., Task], tokenizer: Callable[[str], Any]
) -> None:
    """Turns among the first hundred rows of texts Arrow refuses already."""
    turns = chat(0)["messages"]
    rows = [*[{"prompt": "a", "completion": " cat"}] * 99, {"prompt": "", "completion": "a"}]
    rows += [{"prompt": turns[:1], "completion": turns[1:]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = source_of([str(tmp_path / "a.jsonl")], streaming=True, eval=None, eval_fraction=0)
    endless = tokenizer("chat")
    endless.eos_token = None
    task = make_task("sft", source, endless, sample_tokens=0)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl: row 100: it has no token to learn: too short\. Leave"
    ):
        task.train[99]
    with pytest.raises(ConfigError, match=r"a\.jsonl: row 101: it has turns, unlike the first row"):
        task.train[100]


def test_what_a_chat_has_beside_its_columns_is_read_though_the_first_row_lacks_it(
    tmp_path: Path, make_task: Callable[..., Task]
) -> None:
    rows = [{"instruction": words(number), "output": words(number + 1)} for number in range(4)]
    rows[1]["input"] = rows[3]["system"] = words(9)
    for name, part in (("all.jsonl", rows), ("a.jsonl", rows[:3]), ("b.jsonl", rows[3:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    alone: dict[str, Any] = {"max_length": 200, "eval": None, "eval_fraction": 0}
    whole = make_task("sft", source_of([str(tmp_path / "all.jsonl")], **alone), **CHATS)
    for names in (("all.jsonl",), ("a.jsonl", "b.jsonl")):
        paths = [str(tmp_path / name) for name in names]
        streamed = make_task("sft", source_of(paths, streaming=True, **alone), **CHATS)
        for number in range(4):
            assert same(whole.train[number], streamed.train[number]), number
    assert len(streamed.train[1]["input_ids"]) > len(streamed.train[0]["input_ids"]) + 2
