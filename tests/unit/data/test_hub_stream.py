"""Files of the hub.

Only the bytes that are asked for, the hub's own digests, and the commit of a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractBufferedFile

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError, OptrunError
from optrun.data import hub_file
from optrun.data.hub_file import HubFile
from optrun.data.stream import open_stream
from optrun.runner.resume.data_position import pinned_revision, with_revision
from tests.running import composed

SHA, OTHER = "a" * 40, "b" * 40
ROWS = [
    {"text": f"row {number} " + "x" * (number % 50), "label": number % 3} for number in range(700)
]


class Remote:
    """Bytes of a hub, and which of them were fetched."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fetched: list[tuple[str, int, int]] = []

    def add(self, path: str, content: bytes, kind: str = "sha1") -> HubFile:
        self.files[path] = content
        head = b"blob %d\0" % len(content) if kind == "sha1" else b""
        return HubFile(
            "o/n",
            SHA,
            path,
            len(content),
            f"{kind}:{hashlib.new(kind, head + content).hexdigest()}",
        )


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Remote:
    here = Remote()
    monkeypatch.setenv("OPTRUN_CACHE", str(tmp_path / "cache"))

    class Opened(AbstractBufferedFile):
        """The file of `HfFileSystem`, whose bytes lie here."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            path = self.path.rpartition("/")[2]
            here.fetched.append((path, start, end))
            return here.files[path][start:end]

    def opened(path: str, mode: str, **options: Any) -> Opened:
        return Opened(SimpleNamespace(), path, mode, **options)

    monkeypatch.setattr(hub_file, "_file_system", lambda: SimpleNamespace(open=opened))
    monkeypatch.setitem(hub_file._CACHE, "block_size", 512)
    hub_file._opened.cache_clear()
    return here


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).bytes(10_000)
    extra = [{**row, "extra": noise} for row in rows]
    pq.write_table(
        pa.Table.from_pylist(extra),
        file,
        row_group_size=100,
        compression="none",
        use_dictionary=False,
    )
    return file.getvalue()


def test_any_bytes_are_those_of_the_file(remote: Remote) -> None:
    content = np.random.default_rng(0).bytes(3000)
    file = remote.add("a.bin", content)
    for begin, size in (
        (0, 3000),
        (0, 1),
        (511, 2),
        (512, 512),
        (2999, 1),
        (2990, 50),
        (100, 500),
        (5, 0),
    ):
        assert file.read(begin, size) == content[begin : begin + size], (begin, size)
    assert b"".join(file.chunks()) == content
    whole = file.opened()
    assert whole.seek(-10, io.SEEK_END) == 2990
    assert whole.read() == content[-10:]
    assert file.read(2000, 100) == content[2000:2100]
    remote.fetched.clear()
    assert file.read(1990, 100) == content[1990:2090]
    assert not remote.fetched, "a block stays a while"


def test_rows_are_those_of_the_same_files_here(remote: Remote, tmp_path: Path) -> None:
    files = [remote.add("a.jsonl", jsonl(ROWS[:300])), remote.add("b.jsonl", jsonl(ROWS[300:]))]
    notes: list[str] = []
    rows = open_stream("data.path", files, 50, notes)
    assert list(rows) == ROWS
    assert "found by reading" in notes[0]
    assert list(rows.source_digests().values()) == [file.content for file in files]
    remote.fetched.clear()
    hub_file._opened.cache_clear()
    again: list[str] = []
    rows = open_stream("data.path", files, 50, again)
    assert not again, "a later start knows where the rows are"
    assert rows.read(310, 313) == ROWS[310:313]
    assert sum(end - begin for _, begin, end in remote.fetched) <= 1024
    for file in files:
        (tmp_path / file.path).write_bytes(remote.files[file.path])
    here = open_stream("data.train", [tmp_path / file.path for file in files], 50, [])
    assert (here.borders == rows.borders).all()


def test_of_parquet_only_the_columns_that_are_read_are_fetched(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hub_file._CACHE, "block_size", 100_000)
    content = parquet(ROWS)
    file = remote.add("a.parquet", content, "sha256")
    rows = open_stream("data.path", [file], 50, []).select_columns(["label", "text"])
    assert rows.read(0, 700) == [{"label": row["label"], "text": row["text"]} for row in ROWS]
    sizes = rows.window_bytes(["text"])
    assert sum(end - begin for _, begin, end in remote.fetched) < 0.5 * len(content)
    remote.fetched.clear()
    assert len(open_stream("data.path", [file], 1, [])) == 700
    assert (open_stream("data.path", [file], 50, []).window_bytes(["text"]) == sizes).all()
    assert not remote.fetched, "row groups are remembered by the digest of the file"


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_other_bytes_than_the_hub_names_are_refused(remote: Remote, kind: str) -> None:
    file = remote.add("a.jsonl", jsonl(ROWS), kind)
    remote.files["a.jsonl"] = remote.files["a.jsonl"].replace(b"row 9", b"Row 9")
    with pytest.raises(
        OptrunError,
        match=rf"data.path=o/n: a\.jsonl at revision {SHA}: .*other bytes than it lists",
    ):
        open_stream("data.path", [file], 1, [])


def test_a_hub_that_fails_or_knows_no_ranges_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub_file._opened.cache_clear()
    file = HubFile("o/n", SHA, "a.jsonl", 9, "sha1:0")
    opened = SimpleNamespace(open=lambda *_, **__: io.BytesIO(b"x"))
    monkeypatch.setattr(hub_file, "_file_system", lambda: opened)
    with pytest.raises(OptrunError, match="the hub sent 1 bytes of the 9 that were requested"):
        file.read(0, 9)
    hub_file._opened.cache_clear()
    monkeypatch.setattr(hub_file, "_file_system", lambda: SimpleNamespace())
    with pytest.raises(
        OptrunError,
        match=r"data.path=o/n: a\.jsonl at revision a+: the hub does not send its bytes",
    ):
        file.read(0, 9)


def test_a_run_goes_on_at_the_commit_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optrun.runner.resume.data_position.commit_of", lambda _: OTHER)
    config = composed("data=hub", "data.path=o/n", "data.streaming=true")
    parts = {f"hf://datasets/o/n@{SHA}/a.jsonl": "1"}
    saved = CheckpointMetadata(
        global_step=1, config={"data": {"path": "o/n", "revision": None}}, plan={"parts": parts}
    )
    assert pinned_revision(config, None) == OTHER
    assert pinned_revision(config, saved) == SHA
    named = replace(config, data=replace(config.data, revision="main"))  # type: ignore[type-var]
    assert pinned_revision(named, saved) == OTHER, "other data were asked for"
    assert with_revision(config, SHA).data.revision == SHA  # type: ignore[attr-defined]
    whole = composed("data=hub", "data.path=o/n")
    assert pinned_revision(whole, saved) is None
    assert with_revision(whole, None) is whole


@pytest.mark.parametrize(
    ("name", "fact"), [("a.csv", "reads .jsonl"), ("a.jsonl.gz", "middle of a compressed file")]
)
def test_what_cannot_be_streamed_is_refused(remote: Remote, name: str, fact: str) -> None:
    with pytest.raises(ConfigError, match=fact) as caught:
        open_stream("data.path", [remote.add(name, b"x")], 1, [])
    assert f"hf://datasets/o/n@{SHA}/{name}" in str(caught.value)
