"""The configuration reference, which `make docs` writes, has a row for every key."""

from __future__ import annotations

from optrun.config import store
from tests.docs import configuration


def test_every_key_of_every_choice_has_a_row() -> None:
    written = configuration.page()
    for group, schemas in store.GROUPS.items():
        for choice in schemas:
            assert f"### `{group}={choice}`" in written
    assert "| `lr` |" in written
    assert written.count("\n| `optimizer.betas` |") >= 5
