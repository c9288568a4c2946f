"""A long text file reads as Python reads it, in any part, with a few chunks in memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from optrun.data import long_text as module
from optrun.data.long_text import long_text

RAW = "eins\r\nzwei ä € 𝄞\rdrei\n\r\n\n" * 9 + "𝄞\r"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64, 10_000])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_it_is_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, mark: bytes
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(mark + RAW.encode())
    text, whole = long_text(path, "content"), path.read_text(encoding="utf-8-sig")
    assert str(text) == whole
    assert len(text) == len(whole)
    choose = random.Random(1)
    for _ in range(60):
        begin, end = sorted(choose.choices(range(len(whole) + 3), k=2))
        assert text[begin:end] == whole[begin:end]
    head, tail = text.cut(11)
    assert (str(head), str(tail), tail[3:9]) == (whole[:11], whole[11:], whole[14:20])
    monkeypatch.setattr(module, "_NEAR", 4)
    for begin, end in ((0, len(whole)), (3, 30), (8, 9), (20, 20)):
        assert text.rfind("\n", begin, end) == whole.rfind("\n", begin, end)
        assert text.rfind("q", begin, end) == -1
    assert repr(head) != repr(tail)
