"""Streams.

Each row read where it lies, each example once an epoch, the order a function of its place.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, Features, Value

from optrun.base.errors import ConfigError, OptrunError
from optrun.data import chat, first_rows
from optrun.data.first_rows import FIRST_ROWS, with_empty_columns
from optrun.data.hub_file import HubFile
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.data.row_advice import is_nested
from optrun.data.shards import find_row_starts
from optrun.data.stream import (
    StreamedBlocks,
    StreamedRows,
    StreamRows,
    WindowOrder,
    Windows,
    open_stream,
)

ROWS = [
    {"text": f"row {number} ä" + "x" * (number % 7), "label": number % 3} for number in range(57)
]


def jsonl(path: Path, rows: list[dict], line_end: str = "\n") -> Path:  # type: ignore[type-arg]
    path.write_bytes(
        "".join(json.dumps(row, ensure_ascii=False) + line_end for row in rows).encode()
    )
    return path


def parquet(path: Path, rows: list[dict]) -> Path:  # type: ignore[type-arg]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    return path


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_are_those_of_the_files_in_any_slice(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    files = [
        write(tmp_path / f"{part}.{write.__name__}", ROWS[begin:end])
        for part, begin, end in (("a", 0, 23), ("b", 23, 24), ("c", 24, 57))
    ]
    notes: list[str] = []
    rows = open_stream("data.train", files, 5, notes)
    assert len(rows) == 57
    assert "found by reading" in notes[0]
    assert list(rows) == ROWS
    for begin, end in ((0, 57), (22, 25), (23, 24), (40, 41), (11, 11)):
        assert rows.read(begin, end) == ROWS[begin:end]
    assert rows.select_columns(["label"]).read(3, 5) == [{"label": 0}, {"label": 1}]
    assert rows.borders.tolist() == [0, 5, 10, 15, 20, 23, 24, 29, 34, 39, 44, 49, 54, 57]
    parts = [0, 2, 4, 5, 6, 8, 10, 12, 13] if write is parquet else list(range(14))
    assert rows.parts_of_windows.tolist() == parts
    assert rows.window_bytes(["text"]).shape == (13,)
    assert rows.where(23) == f"data.train={files[1]}: row 1"


def test_lines_are_found_across_chunks_and_blank_ones_are_none(tmp_path: Path) -> None:
    raw = b'{"a": 1}\r\n\n  \n {"a": 2}\n\t\n{"a": "' + b"y" * 90 + b'"}\n\n{"a": 4}'
    whole, digest = find_row_starts([raw])
    assert [json.loads(raw[a:b]) for a, b in pairwise(whole)][1] == {"a": 2}
    assert len(whole) == 5
    for size in (1, 7, 64):
        again, same = find_row_starts(raw[at : at + size] for at in range(0, len(raw), size))
        assert again.tolist() == whole.tolist()
        assert same == digest
    (tmp_path / "a.jsonl").write_bytes(raw)
    assert open_stream("data.train", [tmp_path / "a.jsonl"], 1, []).shards[0].content == digest


def runs_of(borders: np.ndarray, parts: np.ndarray, seed: int, epoch: int = 0) -> np.ndarray:
    """Which window each example of an epoch is of."""
    order = WindowOrder(borders, parts, seed=seed, epoch=epoch)
    return np.searchsorted(borders, order[: len(order)], side="right") - 1


def test_an_order_has_each_example_once_in_any_slice() -> None:
    randomness = np.random.default_rng(0)
    for count in (1, 2, 3, 4, 5, 8, 9, 30):
        borders = np.concatenate([[0], np.cumsum(randomness.integers(1, 6, count))])
        parts = np.unique([0, *randomness.integers(0, count, count // 3), count])
        seen = set()
        for seed, epoch in ((1, 0), (1, 1), (2, 0)):
            order = WindowOrder(borders, parts, seed=seed, epoch=epoch)
            whole = order[0 : len(order)]
            assert sorted(whole.tolist()) == list(range(borders[-1]))
            assert [order[at : at + 1].tolist()[0] for at in range(len(order))] == whole.tolist()
            assert order[6:11].tolist() == whole[6:11].tolist()
            seen.add(tuple(whole.tolist()))
        assert len(seen) == 3 or len(order) < 9


def test_the_first_tenth_of_an_epoch_is_of_the_whole_file_and_seeds_share_no_order() -> None:
    """By chance alone.

    40 of 400 windows have a decile of the file without one of them once in 80 epochs.
    """
    borders, parts, seeds = np.arange(0, 401 * 5, 5), np.arange(401), range(20)
    orders = [runs_of(borders, parts, seed, epoch) for seed in seeds for epoch in (0, 1)]
    tenths = [np.unique(order[: len(order) // 10]) for order in orders]
    deciles = np.array([np.bincount(windows // 40, minlength=10) for windows in tenths])
    assert all((counts > 0).sum() >= 8 for counts in deciles)
    expected = deciles.sum() / 10
    assert ((deciles.sum(axis=0) - expected) ** 2 / expected).sum() < 27.9, (
        "chi-squared, 9 degrees, 1 in 1000"
    )
    places = np.array(
        [np.argsort(order[::5], kind="stable")[:: len(order) // 5 // 400] for order in orders]
    )
    found = np.corrcoef(places)[np.triu_indices(len(orders), 1)]
    assert abs(found).max() < 0.25, "the deviation is 0.05, and 780 pairs are looked at"
    assert all(len(np.unique(order[:20])) > 1 for order in orders), "four windows are mixed"


def test_windows_of_a_part_stay_together() -> None:
    borders, parts = np.arange(0, 601, 5), np.arange(0, 121, 10)
    for seed in range(5):
        windows = runs_of(borders, parts, seed)
        assert all(len(np.unique(turn // 10)) == 2 for turn in windows.reshape(6, 100)), (
            "two parts at a time"
        )
        assert len(np.unique(windows[:20])) == 4
        assert {*np.unique(windows[:100] // 10)} != {0, 1}, "which are far apart"


def test_every_step_is_where_it_is_whichever_one_comes_first() -> None:
    borders, parts = np.arange(0, 101, 5), np.array([0, 3, 4, 9, 20])
    arrange = lambda seed, epoch: WindowOrder(borders, parts, seed=seed, epoch=epoch)  # noqa: E731
    arrange.name = "windows"  # type: ignore[attr-defined]
    plan = EpochPlan(100, 3, 2, seed=5, arrangement=arrange)  # type: ignore[arg-type]
    straight = list(islice(plan.steps(0), 40))
    assert plan.steps_per_epoch == 17
    for step in range(40):
        assert list(islice(plan.steps(step), 40 - step)) == straight[step:]


@pytest.mark.parametrize(("window", "most"), [(4, 6), (6, 8), (10, 10), (25, 20)])
def test_row_groups_are_read_twice_at_most_and_few_of_them_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, most: int
) -> None:
    """Windows lie across groups of ten rows.

    Of each file four groups stayed before, also when all of it was read.
    """
    files = [parquet(tmp_path / f"{number}.parquet", ROWS) for number in range(12)]
    tail = [{**ROWS[0], "text": "a short last file"}]
    rows = open_stream("data.train", [*files, parquet(tmp_path / "tail.parquet", tail)], window, [])
    recent, read = rows.shards[0].recent, []  # type: ignore[attr-defined]
    actual = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda *a, **k: read.append(len(recent)) or actual(*a, **k),
    )
    order = Windows(rows, rows.borders)(0, 0)
    found = [rows.row(index) for index in order[0 : len(order)].tolist()]
    assert sorted(map(str, found)) == sorted(map(str, ROWS * 12 + tail))
    assert max(read) <= most
    assert len(read) < 2 * 12 * 6


def test_windows_that_share_a_block_of_the_hub_are_read_near_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optrun.data.hub_file.BLOCK", 512)
    here = open_stream("data.train", [jsonl(tmp_path / "a.jsonl", ROWS)], 5, [])
    raw = (tmp_path / "a.jsonl").read_bytes()
    monkeypatch.setattr(HubFile, "opened", lambda _: io.BytesIO(raw))
    sha = hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
    rows = open_stream(
        "data.path", [HubFile("o/n", "a", "a.jsonl", len(raw), f"sha1:{sha}")], 5, []
    )
    assert here.parts_of_windows.tolist() == list(range(13))
    assert rows.parts_of_windows.tolist() == [0, 3, 6, 9, 12]
    assert list(rows) == ROWS


def blocks(rows: StreamRows, length: int = 8) -> StreamedBlocks:
    def encode(found: list[dict]) -> dict[str, list[np.ndarray]]:  # type: ignore[type-arg]
        return {"input_ids": [np.frombuffer(row["text"].encode(), dtype=np.uint8) for row in found]}

    return StreamedBlocks(rows, encode, length, "bytes", {"input_ids": 0})


def test_a_stream_without_windows_has_no_blocks(tmp_path: Path) -> None:
    rows = open_stream("data.path", [jsonl(tmp_path / "a.jsonl", ROWS)], 5, [])
    rows.borders = rows.borders[:1]
    assert len(blocks(rows)) == 0


def test_blocks_hold_every_token_once(tmp_path: Path) -> None:
    rows = open_stream("data.train", [jsonl(tmp_path / "a.jsonl", ROWS)], 9, []).select_columns(
        ["text"]
    )
    made = blocks(rows)
    assert not made.notes, "so few windows are all counted"
    ids = [made[index]["input_ids"] for index in range(len(made))]
    assert b"".join(piece.astype(np.uint8).tobytes() for piece in ids).decode() == "".join(
        r["text"] for r in ROWS
    )
    assert max(map(len, ids)) <= 8
    assert len(made) <= 1.2 * sum(map(len, ids)) / 8
    assert made.fingerprint() == blocks(rows).fingerprint() != blocks(rows, 9).fingerprint()
    plan = EpochPlan(len(made), 4, 2, seed=3, arrangement=made.arrangement)
    first = [
        index
        for step in zip(range(plan.steps_per_epoch), plan.steps(0), strict=False)
        for micro in step[1]
        for _, index in micro
    ]
    assert sorted(first) == list(range(len(made)))
    later = next(plan.steps(plan.steps_per_epoch - 1))
    assert [index for micro in later for _, index in micro] == first[-sum(map(len, later)) :]
    assert plan.ordering == "4 far windows of 9"


def test_blocks_of_many_windows_are_planned_by_some_of_them(tmp_path: Path) -> None:
    many = [{"text": f"{number} " * (20 + number % 5)} for number in range(300)]
    many += [{"text": ""}] * 10
    rows = open_stream("data.train", [jsonl(tmp_path / "a.jsonl", many)], 10, []).select_columns(
        ["text"]
    )
    made = blocks(rows, 32)
    assert "blocks are planned by 8 of 31 windows" in made.notes[0]
    ids = [made[index]["input_ids"] for index in range(len(made))]
    assert sum(map(len, ids)) >= 0.99 * sum(len(row["text"]) for row in many)
    assert min(map(len, ids)) >= 1


def test_rows_become_examples_when_they_are_asked_for(tmp_path: Path) -> None:
    def make(row: dict) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
        if row["label"] == 2:
            raise ConfigError("it is a two.")
        return {"input_ids": np.array([len(row["text"])])}

    rows = open_stream("data.train", [jsonl(tmp_path / "a.jsonl", ROWS)], 9, [])
    made = StreamedRows(rows, make, "lengths", {"labels": np.arange(57)})
    assert made[4] == {"input_ids": np.array([len(ROWS[4]["text"])]), "labels": 4}
    with pytest.raises(ConfigError, match=r"a\.jsonl: row 6: it is a two"):
        made[5]
    assert (
        made.fingerprint()
        != StreamedRows(rows, make, "lengths", {"labels": np.arange(1, 58)}).fingerprint()
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_is_the_same_message_out_of_a_worker(tmp_path: Path, workers: int) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    path.write_bytes(path.read_bytes().replace(b'{"text": "row 9', b'{text: "row 9'))
    rows = open_stream("data.train", [path], 9, [])
    made = StreamedRows(rows, lambda row: {"input_ids": np.array([row["label"]])}, "labels")
    loader = BatchLoader(
        made,
        None,
        lambda found: {"ids": torch.tensor([int(one["input_ids"][0]) for one in found])},
        0,
        workers,
    )
    plan = EpochPlan(len(made), 4, 1, seed=0, arrangement=made.arrangement)
    with pytest.raises(ConfigError, match=r"a\.jsonl: row 10 is not JSON") as caught:
        list(zip(range(plan.steps_per_epoch), loader.training(plan, 0), strict=False))
    assert "Traceback" not in str(caught.value)


def test_a_worker_tokenises_in_one_thread_whatever_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the parent are not there after a fork.

    A tokenizer that was in use would wait for them for ever.
    """
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    rows = open_stream("data.train", [jsonl(tmp_path / "a.jsonl", ROWS)], 9, [])
    made = StreamedRows(
        rows, lambda _: {"alone": os.environ["TOKENIZERS_PARALLELISM"] == "false"}, "threads"
    )
    loader = BatchLoader(
        made, None, lambda found: {"alone": torch.tensor([one["alone"] for one in found])}, 0, 1
    )
    steps = loader.training(EpochPlan(len(made), 4, 1, seed=0, arrangement=made.arrangement), 0)
    assert next(steps)[0]["alone"].all()
    steps.close()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    def refused(name: str, content: str) -> str:
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            list(open_stream("data.train", [path], 9, []))
        return str(caught.value)

    assert "cannot begin in the middle of a compressed file" in refused("a.jsonl.gz", "x")
    assert "reads .jsonl, .ndjson, .parquet" in refused("a.csv", "text\na\n")
    assert "the file is empty" in refused("b.jsonl", "")
    assert "no rows in it" in refused("c.jsonl", "\n \n")
    assert "row 2 is not JSON" in refused("d.jsonl", '{"text": 1}\n{"text"\n')
    assert "row 2 is not an object" in refused("e.jsonl", '{"text": 1}\n3\n')
    assert "cannot be read as parquet" in refused("f.parquet", "abcdefgh")
    good = jsonl(tmp_path / "g.jsonl", ROWS)
    with pytest.raises(ConfigError, match="several formats"):
        open_stream("data.train", [good, parquet(tmp_path / "g.parquet", ROWS)], 9, [])


def test_a_file_that_changes_underway_is_noticed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    rows = open_stream("data.train", [path], 9, [])
    jsonl(path, [{"text": "other"} for _ in ROWS])
    os.utime(path, ns=(1, 1))
    with pytest.raises(OptrunError, match=r"a\.jsonl: this file changed while it was read"):
        rows.read(0, 3)
    with pytest.raises(
        OptrunError, match=r"^data\.train=\S+a\.jsonl: this file changed while it was read"
    ):
        rows.head()


def test_a_file_written_over_in_place_is_noticed_at_the_next_read(tmp_path: Path) -> None:
    """Rows of the same length lie where the others lay, and parse as well.

    Only its time of change tells.
    """
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    rows = open_stream("data.train", [path], 9, []).select_columns(["text"])
    assert rows.read(0, 1) == [{"text": ROWS[0]["text"]}]
    before = path.stat()
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b"row", b"ROW"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 5_000_000))
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    with pytest.raises(OptrunError, match=r"a\.jsonl: this file changed while it was read"):
        rows.read(1, 2)


def test_a_parquet_file_that_changes_is_noticed_with_its_next_group(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ROWS)
    rows = open_stream("data.train", [path], 9, [])
    assert rows.read(0, 1) == ROWS[:1]
    path.write_bytes(b"x" * path.stat().st_size)
    os.utime(path, ns=(1, 1))
    with pytest.raises(OptrunError, match=r"a\.parquet: this file changed while it was read"):
        rows.read(10, 11)


def test_columns_are_those_of_the_first_rows_of_every_file(tmp_path: Path) -> None:
    one = jsonl(
        tmp_path / "a.jsonl",
        [{"text": "a"}, {"text": "b", "more": 1, "mixed": 1}, {"text": "c", "mixed": "x"}],
    )
    other = jsonl(
        tmp_path / "b.jsonl", [{"text": "d", "list": [{"k": "v"}]}, {"text": "e", "more": 2}]
    )
    rows = open_stream("data.train", [one, other], 9, [])
    assert rows.column_names == ["text", "more", "mixed", "list"]
    assert rows.features["more"].dtype == "int64"
    assert is_nested(rows.features["list"])
    assert rows[:2] == {
        "text": ["a", "b"],
        "more": [None, 1],
        "mixed": [None, 1],
        "list": [None, None],
    }
    some = rows.select_columns(["list", "more"])
    assert some.features == {name: rows.features[name] for name in ("list", "more")}
    assert some.read(1, 4) == [
        {"list": None, "more": 1},
        {"list": None, "more": None},
        {"list": [{"k": "v"}], "more": None},
    ]
    assert list(rows.select_columns(["list"]).head) == [{"list": None}] * 3
    assert rows.select([0, 4])["more"] == [None, 2]
    assert rows.select([0])[0] == {"text": "a", "more": None, "mixed": None, "list": None}


def test_columns_of_parquet_are_those_of_every_file(tmp_path: Path) -> None:
    files = [
        parquet(tmp_path / "a.parquet", [{"text": "a"}] * 12),
        parquet(tmp_path / "b.parquet", [{"text": "b", "n": 1}]),
    ]
    rows = open_stream("data.train", files, 9, [])
    assert rows.column_names == ["text", "n"]
    assert rows.features["n"].dtype == "int64"
    assert rows.select_columns(["n"]).read(11, 13) == [{"n": None}, {"n": 1}]
    assert list(rows.select_columns(["n"])["n"]) == [None] * 12 + [1]
    assert rows.select_columns(["n"]).features == {"n": rows.features["n"]}


def test_a_column_that_no_first_row_has_is_refused_where_it_would_have_been_read(
    tmp_path: Path,
) -> None:
    alpaca = {"instruction": "a", "output": "b"}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

    def read(row: dict, last: dict, columns: list[str]) -> list[dict]:  # type: ignore[type-arg]
        path = jsonl(tmp_path / "a.jsonl", [*[row] * FIRST_ROWS, row | last])
        return (
            open_stream("data.train", [path], 9, [])
            .select_columns(columns)
            .read(FIRST_ROWS, FIRST_ROWS + 1)
        )

    for row, name, value in (
        (alpaca, "input", "X"),
        (alpaca, "system", "X"),
        (alpaca, "tools", [{}]),
        (chat, "tools", "[]"),
        (chat, "system", "X"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(row, {name: value}, list(row))
        assert (
            f"a.jsonl: row {FIRST_ROWS + 1} has a column {name}, which none of the first 100 rows"
            in str(caught.value)
        )
        assert f'"{name}": null' in str(caught.value)
        assert read(row, {name: ""}, list(row)) == [row], "nothing is lost"
        assert read(row | {name: None}, {name: value}, [*row, name]) == [row | {name: value}]
    others = {"input": "X", "history": "X"}
    assert read(chat, others, ["messages"]) == [chat], "no task reads these beside turns"
    assert read({"text": "a"}, others | {"tools": [{}]}, ["text"]) == [{"text": "a"}]
    assert read({"prompt": "a", "completion": "b"}, {"tools": "x"}, ["prompt"]) == [{"prompt": "a"}]


def test_the_columns_that_belong_to_chats_are_those_that_chats_take_in() -> None:
    chats = {"messages": [{"role": "user", "content": "a"}]}
    for layout, names in chat._REQUIRED_COLUMNS.items():
        wanted = {*chat._OPTIONAL_COLUMNS.get(layout, ()), chat._TOOLS, chat._TEMPLATE_KWARGS}
        assert (
            first_rows.missing_optional_columns(
                names, dict.fromkeys(names, chats["messages"]), names
            )
            == wanted
        )


@pytest.mark.parametrize("count", [0, 2])
def test_a_table_without_rows_gets_its_empty_columns(count: int) -> None:
    table = Dataset.from_dict({"a": ["x"] * count}, features=Features({"a": Value("string")}))
    wider = with_empty_columns(table, count, {"b": Value("int64")})
    assert wider.features == Features({"a": Value("string"), "b": Value("int64")})
    assert wider["b"][:] == [None] * count
