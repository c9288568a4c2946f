"""Explain a configuration: which parameter gets what, before a single step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.config.schema.run import RunConfig

if TYPE_CHECKING:
    from optrun.explain.branch import TrunkState


def run(
    config: RunConfig,
    *,
    all_tensors: bool = False,
    as_json: bool = False,
    png: Path | str | None = None,
    trunk: TrunkState | None = None,
) -> None:
    """Explain what a configuration means.

    Args:
        config: The whole configuration.
        all_tensors: Show every tensor, not every group.
        as_json: One JSON object on stdout, and nothing else.
        png: Draw the schedule and the peaks of the groups there.
        trunk: Of a branch.

    Raises:
        ConfigError: Whatever training would refuse before its first step, as far as it does not
            depend on the data.
        StorageError: The picture cannot be written.
    """
    from optrun.explain.build import explain

    facts = explain(config, trunk=trunk)
    if png is not None:
        from optrun.explain.picture import draw

        draw(facts, Path(png))
    if as_json:
        sys.stdout.write(json.dumps(facts.as_dict()) + "\n")
        return
    from rich.console import Console

    from optrun.explain.tables import render

    console = Console(highlight=False)
    render(facts, console, all_tensors=all_tensors)
    if png is not None:
        console.print(f"picture: {png}")
