"""What a person asked for: the configuration of a run and the command line it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.config.schema.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run, asked for."""

    config: RunConfig
    """Typed and checked."""
    values: Mapping[str, Any]
    """The same, resolved and plain."""
    argv: Sequence[str]
    """Command-line arguments after `optrun`."""
    config_name: str
    """Of the primary configuration: `config`, or a recipe."""
    overrides: Sequence[str]
    """The `key=value` arguments among them, checked."""
