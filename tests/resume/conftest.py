"""Runs without the picture at the end."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(no_pictures: None) -> None:
    pass
