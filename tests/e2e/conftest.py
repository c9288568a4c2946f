"""Runs of a user's, without the picture at the end where no test looks at it."""

from __future__ import annotations

import pytest

from optrun.data import stdlib


@pytest.fixture(autouse=True)
def _quick(no_pictures: None) -> None:
    pass


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """`data=stdlib` is one file in twenty of the library, whose tokens take seconds; `test_wheel.py` reads them all."""
    few = stdlib.stdlib_files()[::20]
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: few)
