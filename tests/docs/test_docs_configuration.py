"""The configuration reference says what the schemas and YAML files say."""

from __future__ import annotations

from optrun.config import store
from tests.docs import configuration


def test_the_reference_is_of_today() -> None:
    written = configuration.PAGE.read_text(encoding="utf-8")
    assert written == configuration.page(), (
        "`make docs` writes docs/reference/configuration.md anew"
    )


def test_every_key_of_every_choice_has_a_row() -> None:
    written = configuration.PAGE.read_text(encoding="utf-8")
    for group, schemas in store.GROUPS.items():
        for choice in schemas:
            assert f"### `{group}={choice}`" in written
    assert "| `lr` |" in written
    assert written.count("\n| `optimizer.betas` |") >= 5
