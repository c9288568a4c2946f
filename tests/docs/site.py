"""Prepare the site: its menu without the pages that only `make docs` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any, **_: object) -> Any:
    """Drop menu entries whose page is missing, such as `reference/zoo.md`.

    MkDocs calls this once.
    """
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for entries in section.values():
            if isinstance(entries, list):
                entries[:] = [
                    entry
                    for entry in entries
                    if all((docs / page).exists() for page in entry.values())
                ]
    return config
