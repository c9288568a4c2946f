"""The value tables beside the trajectories, each entry through public API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference.reference_format import TABLES, entries
from tests.reference.reference_tables import CHECKS

ENTRIES = [
    pytest.param(table, entry, id=f"{table}-{title}")
    for table in CHECKS
    for title, _, entry in entries(table)
]


def test_every_known_table_is_checked() -> None:
    assert set(CHECKS) == set().union(*TABLES.values())


@pytest.mark.parametrize(("table", "entry"), ENTRIES)
def test_table(table: str, entry: Any) -> None:
    CHECKS[table](table, entry)
