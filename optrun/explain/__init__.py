"""Explain a configuration before a single step."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from optrun.config.schema.run import RunConfig

if TYPE_CHECKING:
    from optrun.explain.facts import TrunkState


def run(
    config: RunConfig,
    *,
    as_json: bool = False,
    trunk: TrunkState | None = None,
) -> None:
    """Print what a configuration would do, to standard output.

    Args:
        config: The whole configuration.
        as_json: Print one JSON object, which has every tensor, in place of tables.
        trunk: State of the trunk, if the run is a branch.

    Raises:
        ConfigError: Training would refuse the configuration before its first step, regardless of
            the data.
    """
    from optrun.explain.build import explain

    facts = explain(config, trunk=trunk)
    if as_json:
        sys.stdout.write(json.dumps(facts.as_dict()) + "\n")
        return
    from rich.console import Console

    from optrun.explain.tables import render

    render(facts, Console(highlight=False))
