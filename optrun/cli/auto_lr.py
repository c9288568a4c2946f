"""`lr=auto lr_from=SWEEP_DIR`.

The learning rate that a sweep of the same recipe found, shown before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from optrun.base.errors import ConfigError, refuse_url
from optrun.base.formatting import rate
from optrun.cli.branch import whole_command_line
from optrun.config import overrides, saved, store
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine
from optrun.config.tokens import key_of

_KEYS = ("lr", "lr_from")


def resolve(hydra: Hydra, config_name: str, tokens: Sequence[str]) -> tuple[list[str], str | None]:
    """Put the number in place of `lr=auto`.

    Args:
        hydra: Composes.
        config_name: A recipe, or the default.
        tokens: Overrides of one run.

    Returns:
        The overrides, with the number and without `lr_from`, and what `lr_from` of the run's
        configuration says: where the number came from, with its interval. None where nobody asked.

    Raises:
        ConfigError: One of both keys alone; the sweep is of another recipe or does not tell.
    """
    given = {key: token for token in tokens if (key := key_of(token)) in _KEYS}
    values = {key: overrides.parse([token])[0].value() for key, token in given.items()}
    automatic = values.get("lr") == "auto"
    if not automatic and "lr_from" not in values:
        return list(tokens), None
    if not automatic:
        raise ConfigError(
            f"{given['lr_from']}: says where lr=auto takes its number from. Add lr=auto, or leave"
            " it out."
        )
    if not isinstance(values.get("lr_from"), str):
        raise ConfigError(
            "lr=auto: takes its number from a sweep over lr of the same recipe: add"
            " lr_from=SWEEP_DIR."
        )
    refuse_url("lr_from", values["lr_from"])
    from optrun.report.transfer.answer import rate_from

    kept = [token for token in tokens if key_of(token) not in _KEYS]
    cfg = store.compose(
        hydra, config_name, overrides.checked(hydra, config_name, kept, sweep=False)
    )
    found, said = rate_from(
        Path(str(values["lr_from"])).expanduser(), saved.plain(store.without_hydra(cfg))
    )
    return [*kept, f"lr={rate(found.lr.value)}"], said


def compose_new(
    hydra: Hydra, command_line: CommandLine, console: Console
) -> tuple[list[str], DictConfig]:
    """Compose a run that begins.

    On its trunk if it is a branch, with the learning rate that `lr=auto` finds.

    Args:
        hydra: Composes.
        command_line: Not checked yet.
        console: Where the learning rate is said.

    Returns:
        The checked overrides, and what they compose to, Hydra's node in it.

    Raises:
        ConfigError: A key or value that does not exist or does not fit.
        CheckpointError: The trunk is damaged or gone.
    """
    whole = whole_command_line(hydra, command_line)
    tokens, learnt = resolve(hydra, command_line.config_name, whole.overrides)
    checked = overrides.checked(hydra, command_line.config_name, tokens, sweep=False)
    cfg = store.compose(hydra, command_line.config_name, checked)
    if learnt is not None:
        console.print(f"lr=auto: {learnt}", markup=False, highlight=False, soft_wrap=True)
        cfg.lr_from = learnt
    return checked, cfg
