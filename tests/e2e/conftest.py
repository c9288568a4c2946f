"""Runs of a user's, without the picture at the end where no test looks at it, and with little
of `data=stdlib`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from optrun.data import stdlib


@pytest.fixture(scope="session")
def few_files() -> list[Path]:
    """One file in twenty of the standard library, whose tokens take seconds.

    `test_wheel.py` reads them all.
    """
    return stdlib.stdlib_files()[::20]


@pytest.fixture(autouse=True)
def _quick(no_pictures: None, few_files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `data=stdlib` reads is little."""
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: few_files)
