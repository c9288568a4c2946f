from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from optrun.artifacts.metrics import (
    MetricsWriter,
    read_metrics,
    read_summary,
    to_json,
    truncate_after,
    write_summary,
)


def _strict(text: str) -> object:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_each_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 1, "train/loss": 2.0})
        assert read_metrics(path).records == [{"step": 1, "train/loss": 2.0}]
        metrics.write({"step": 2, "train/loss": 1.0})
        metrics.sync()
        assert path.read_text().count("\n") == 2


def test_non_finite_numbers_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    _strict(path.read_text())
    (record,) = read_metrics(path).records
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("step", [None, -1, 1.0, True, "1"])
def test_a_record_needs_a_step(tmp_path: Path, step: object) -> None:
    with MetricsWriter(tmp_path / "m") as metrics, pytest.raises(ValueError, match="step"):
        metrics.write({"step": step})


def test_a_value_that_is_no_json_is_named(tmp_path: Path) -> None:
    with (
        MetricsWriter(tmp_path / "m") as metrics,
        pytest.raises(TypeError, match=r"train/loss: .* got complex"),
    ):
        metrics.write({"step": 1, "train/loss": 1j})
    assert (tmp_path / "m").read_bytes() == b""


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_reported_and_the_next_writer_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 1, "train/loss": 2.0})
        metrics.write({"step": 2, "train/loss": 1.5})
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    log = read_metrics(path)
    whole = cut == 1  # only the line end is gone: nothing is lost
    assert [record["step"] for record in log.records] == ([1, 2] if whole else [1])
    assert len(log.problems) == (0 if whole else 1)
    with MetricsWriter(path) as metrics:
        metrics.write({"step": 3, "train/loss": 1.0})
    log = read_metrics(path)
    assert [record["step"] for record in log.records] == ([1, 2, 3] if whole else [1, 3])
    assert log.problems == []


@pytest.mark.parametrize(
    "line",
    [b"\x00\x00\x00", b"\xff\xfe{", b"[1]", b"{}", b'{"step": "x"}', b"[" * 100_000],
    ids=range(6),
)
def test_a_line_that_is_no_record_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    log = read_metrics(path)
    assert [record["step"] for record in log.records] == [1, 2]
    assert len(log.problems) == 1
    assert "line 2" in log.problems[0]


def test_truncate_after_keeps_lines_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d,   "train/loss": 1.50}\n' % step for step in range(1, 11)]
    path.write_bytes(b"".join(lines) + b'{"step": 11, "tr')
    truncate_after(path, 6)
    assert path.read_bytes() == b"".join(lines[:6])
    before = path.stat().st_ino
    truncate_after(path, 6)
    assert path.stat().st_ino == before
    truncate_after(path, 0)
    assert path.read_bytes() == b""
    truncate_after(tmp_path / "none", 6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_series_orders_by_step_and_the_later_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":2,"a":1}\n{"step":1,"a":3,"b":"text"}\n{"step":2,"a":5,"c":"NaN"}\n')
    log = read_metrics(path)
    assert log.series("a") == ([1, 2], [3.0, 5.0])
    assert log.series("b") == ([], [])
    assert log.names() == ["a", "c"]


def test_summary_round_trip_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(
        path,
        {"message": "NaN", "metrics": {"last": {"eval/loss": math.nan}}, "overrides": ("lr=1",)},
    )
    _strict(path.read_text())
    summary = read_summary(path)
    assert summary["message"] == "NaN"
    assert math.isnan(summary["metrics"]["last"]["eval/loss"])
    assert summary["overrides"] == ["lr=1"]


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, {"status": "running"})
    with pytest.raises(TypeError, match=r"summary\.model\.class"):
        write_summary(path, {"model": {"class": object()}})
    assert read_summary(path) == {"status": "running"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_summary_is_a_value_error_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "summary.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"summary\.json"):
        read_summary(path)


def test_to_json_refuses_what_json_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"a\.b\[1\]: .* got bytes"):
        to_json({"b": [1, b"x"]}, where="a")
