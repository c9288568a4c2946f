"""From a command line to the request for one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from optrun.config import overrides, saved, store
from optrun.config.batch import leave_open
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine, Request
from optrun.config.safety import refuse_stored_trust


def compose_request(hydra: Hydra, command_line: CommandLine) -> Request:
    """Compose, check and resolve the configuration of one run.

    Raises:
        ConfigError: A key, choice or value that does not exist or does not fit.
    """
    checked, cfg = compose_line(hydra, command_line)
    return request_of(command_line, cfg, checked)


def compose_changed(command_line: CommandLine, overrides: Sequence[str]) -> Request:
    """Compose one run from a command line with other overrides, over the user's folders.

    Raises:
        ConfigError: As `compose_request`.
    """
    hydra = store.open_hydra(command_line.config_dir)
    return compose_request(hydra, replace(command_line, overrides=overrides))


def compose_line(hydra: Hydra, command_line: CommandLine) -> tuple[list[str], DictConfig]:
    """Check the overrides of one run, and compose them.

    Returns:
        The checked overrides, and what they compose to, Hydra's node in it.

    Raises:
        ConfigError: A key, choice or value that does not exist or does not fit.
    """
    checked = overrides.check(hydra, command_line.config_name, command_line.parsed, sweep=False)
    cfg = store.with_values(hydra, command_line.config_name, checked.choices, checked.tokens)
    return checked.tokens, cfg


def request_of(command_line: CommandLine, cfg: DictConfig, checked: Sequence[str]) -> Request:
    """Type, check and resolve a composed configuration.

    Args:
        command_line: Where it came from.
        cfg: A composed configuration, with or without Hydra's node.
        checked: The overrides as `overrides.parse_checked` returns them.

    Raises:
        ConfigError: A mandatory value is missing or one is out of range, or a file says what only a
            person may say.
    """
    run_cfg = store.without_hydra(cfg)
    leave_open(run_cfg, checked)
    config = store.typed(run_cfg)
    refuse_stored_trust(run_cfg, checked)
    typed_line = vars(replace(command_line, overrides=checked))
    return Request(**typed_line, config=config, values=saved.plain(run_cfg))
