"""Long work on data gives signs of life while somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optrun.data import heartbeat
from optrun.data.cache import digest_files, digest_of
from optrun.data.encoded import write_ids
from optrun.data.packing import best_fit
from optrun.data.source import Split
from optrun.data.text_rows import TextRows


def test_signs_are_given_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, signs = [100.0], list[float]()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    heartbeat.send_heartbeat()
    with heartbeat.receive_heartbeats(lambda: signs.append(now[0]), print):
        for _ in range(7):
            heartbeat.send_heartbeat()
            now[0] += 0.25
    heartbeat.send_heartbeat()
    assert signs == [100.0, 100.5, 101.0, 101.5]


def test_what_is_told_with_nobody_to_hear_it_stands_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heartbeat.tell_user("waiting")
    assert capsys.readouterr().err == "optrun: waiting\n"


def _tokenise(folder: Path) -> None:
    write_ids(
        iter(["a", "b"]),
        lambda batch, _: {"input_ids": [[1] for _ in batch]},
        None,
        folder,
        "int32",
        2,
    )


WORKS: dict[str, Callable[[Path], object]] = {
    "hashing files": lambda folder: digest_files([folder / "file"]),
    "hashing texts": lambda _: digest_of(["a"]),
    "reading rows": lambda _: list(Split(TextRows(["a"]), "data.train").cells(["text"])),
    "tokenising": _tokenise,
    "packing": lambda _: best_fit(np.array([3, 2]), 4),
}


@pytest.mark.parametrize("work", WORKS)
def test_work_that_takes_long_gives_signs(tmp_path: Path, work: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    signs: list[None] = []
    with heartbeat.receive_heartbeats(lambda: signs.append(None), print):
        WORKS[work](tmp_path)
    assert signs
