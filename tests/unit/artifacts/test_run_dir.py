from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from optrun.artifacts.run_dir import RunDir, find_runs, parse_step, step_name


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 123_456_789])
def test_step_names_round_trip(step: int) -> None:
    assert parse_step(step_name(step)) == step


@pytest.mark.parametrize("name", ["step-1", "step-00000001.tmp", ".step-00000001", "best"])
def test_other_names_are_no_steps(name: str) -> None:
    assert parse_step(name) is None


def _run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    return path


def test_runs_are_found_in_counting_order_and_not_inside_runs(tmp_path: Path) -> None:
    expected = [_run(tmp_path / "sweep" / str(job)) for job in (0, 1, 2, 10)]
    _run(tmp_path / "sweep" / "2" / "checkpoints" / "inner")
    _run(tmp_path / "sweep" / ".hidden")
    assert list(find_runs(tmp_path)) == expected
    assert list(find_runs(expected[0])) == expected[:1]
    assert list(find_runs(tmp_path / "missing")) == []


def test_an_unreadable_folder_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold runs, which a comparison would miss."""
    _run(tmp_path / "sweep" / "0")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        list(find_runs(tmp_path))


def test_a_folder_of_configuration_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert not RunDir(tmp_path).is_run()
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").touch()
    assert RunDir(str(tmp_path)).is_run()


def test_names_are_those_promised(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files = (
        run.config,
        run.metrics,
        run.summary,
        run.curves,
        run.checkpoint(100),
        run.best,
        run.last,
        run.model,
    )
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "checkpoints/step-00000100",
        "checkpoints/best",
        "checkpoints/last",
        "model",
    ]
