"""Runs of a user's, without the picture at the end where no test looks at it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(no_pictures: None) -> None:
    pass
