"""From a command line to the request for one run."""

from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from optrun.config import overrides, saved, store
from optrun.config.batch import unset_derived_size
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine, Request
from optrun.config.safety import refuse_stored_trust


def compose_request(hydra: Hydra, command_line: CommandLine) -> Request:
    """Compose, check and resolve the configuration of one run.

    Returns:
        The command line with its configuration: typed, as plain values, and the checked overrides.

    Raises:
        ConfigError: A key, choice or value is unknown or does not fit.
    """
    checked, cfg = compose_line(hydra, command_line)
    return build_request(command_line, cfg, checked)


def compose_changed(command_line: CommandLine, overrides: Sequence[str]) -> Request:
    """Compose one run from a command line with other overrides; opens Hydra anew.

    Raises:
        ConfigError: As `compose_request`.
    """
    hydra = store.open_hydra(command_line.config_dir)
    return compose_request(hydra, replace(command_line, overrides=overrides))


def compose_line(hydra: Hydra, command_line: CommandLine) -> tuple[list[str], DictConfig]:
    """Check the overrides of one run, and compose them.

    Returns:
        The checked overrides, and the composed configuration with the node `hydra`.

    Raises:
        ConfigError: A key, choice or value is unknown or does not fit.
    """
    checked = overrides.check(hydra, command_line.config_name, command_line.parsed, sweep=False)
    cfg = store.compose_values(hydra, command_line.config_name, checked.choices, checked.tokens)
    return checked.tokens, cfg


def build_request(command_line: CommandLine, cfg: DictConfig, checked: Sequence[str]) -> Request:
    """Build the request for a run: convert, check and resolve its composed configuration.

    Args:
        command_line: The command line of the run.
        cfg: The composed configuration, with or without the node `hydra`.
        checked: The overrides from `overrides.check`; they replace those of the command line.

    Raises:
        ConfigError: A value is missing or out of range, or a file sets `model.trust_remote_code`.
    """
    run_cfg = store.without_hydra(cfg)
    unset_derived_size(run_cfg, checked)
    config = store.typed(run_cfg)
    refuse_stored_trust(run_cfg, checked)
    fields_of_line = vars(replace(command_line, overrides=checked))
    return Request(**fields_of_line, config=config, values=saved.plain(run_cfg))
