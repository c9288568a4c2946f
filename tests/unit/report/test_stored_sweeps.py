"""What a report finds in stored sweeps of every kind.

So that a change of the report shows what it changes.
"""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from optrun.report import build
from tests.report_sweeps import NAMES, found_in, snapshot, stored


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.report_sweeps.make --snapshot` writes it anew."""
    monkeypatch.chdir(tmp_path)
    stored(name, tmp_path)
    found = json.loads(json.dumps(found_in(build.report([Path(name)]))))
    assert found == json.loads(snapshot(name).read_text(encoding="utf-8"))


def test_a_line_is_left_free_above_the_choice_that_was_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored("confirmed", tmp_path)
    console = Console(file=StringIO(), width=200)
    build.report([Path("confirmed")], console=console)
    printed = [line.strip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    title = printed.index("The choice that was confirmed")
    assert printed[title - 1] == ""
    assert printed[title - 2].startswith("The 9")
