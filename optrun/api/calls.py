"""The arguments of a call from Python as a command line."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.config.request import CommandLine

if TYPE_CHECKING:
    from optrun.launch.single_run import Caller

Location = str | PathLike[str]
"""A file or folder."""


def command_line_of(
    overrides: Sequence[str], config_name: str | None = None, config_dir: Location | None = None
) -> CommandLine:
    """Build the command line for the arguments of a call.

    Raises:
        TypeError: The overrides are not a list of strings.
        ConfigError: An override is an option such as `--help`.
    """
    if not isinstance(overrides, list | tuple) or not all(
        isinstance(token, str) for token in overrides
    ):
        raise TypeError(
            f'overrides={overrides!r}: expected a list of texts, such as ["optimizer=lamb",'
            ' "lr=2e-3"].'
        )
    for token in overrides:
        if token.startswith("-"):
            hint = "options are keywords here, such as config_name=, config_dir=, plugins="
            if token in ("-m", "--multirun"):
                hint = "optrun.sweep(...) starts a sweep"
            raise ConfigError(f"{token}: expected key=value; {hint}.")
    options = []
    if config_name is not None:
        options += ["-cn", config_name]
    folder = None
    if config_dir is not None:
        folder = str(config_dir)
        options += ["--config-dir", folder]
    return CommandLine.of([*options, *overrides], list(overrides), config_name, folder)


def load_plugins(plugins: Sequence[Location]) -> None:
    """Load plugins, which register their choices in this process for good.

    Raises:
        TypeError: A single plugin is given, not a list.
    """
    if isinstance(plugins, str | PathLike):
        raise TypeError(
            f'plugins={plugins!r}: expected a list of files or modules, such as ["my_lion.py"].'
        )
    if plugins:
        from optrun.config.registry.plugins import load

        for plugin in plugins:
            load(str(plugin))


def caller(*, quiet: bool) -> Caller:
    """Describe a Python program as the caller of a command; quiet: nothing is printed."""
    from rich.console import Console

    from optrun.launch.single_run import Caller

    return Caller(Console(quiet=quiet), owns_process=False)
