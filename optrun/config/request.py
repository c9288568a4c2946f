"""What a person asked for: the command line, and the configuration that it composes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optrun.base.plain import PlainMapping
from optrun.config.schema.run import RunConfig

DEFAULT_CONFIG = "config"
"""The primary configuration where no recipe is named."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What was typed, taken apart; nothing is composed yet."""

    argv: Sequence[str] = ()
    """Command-line arguments after `optrun`."""
    config_name: str = DEFAULT_CONFIG
    """Of the primary configuration: `config`, or a recipe."""
    names_config: bool = False
    """Whether it was named, with `-cn`."""
    config_dir: str | None = None
    """`--config-dir`: a folder of choices and recipes of the user's own."""
    overrides: Sequence[str] = ()
    """The `key=value` arguments among them."""


@dataclass(frozen=True, kw_only=True)
class Request(CommandLine):
    """One run, asked for; the overrides are checked."""

    config: RunConfig
    """Typed and checked."""
    values: PlainMapping
    """The same, resolved and plain."""
