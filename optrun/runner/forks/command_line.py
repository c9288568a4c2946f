"""`branch_from=...`.

A new run, or a sweep of them, with the configuration of its trunk and what was typed over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import ChoiceSweep, Override

from optrun.artifacts.forks import KEY, Trunk
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.target import locate
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config import overrides, saved, store
from optrun.config.hydra_internals import Hydra
from optrun.config.literal import quote_path
from optrun.config.original_cwd import original_cwd, rebase_paths
from optrun.config.registry.origins import require
from optrun.config.request import CommandLine
from optrun.config.schema.run import refuse_ended_fork
from optrun.runner.forks.overrides import (
    as_overrides,
    names_fork,
    refuse_other_data_position,
    under,
)


@dataclass(frozen=True)
class _TrunkConfig:
    """The configuration of a trunk, to be put under the command line of a branch."""

    overrides: list[str]
    """Its configuration."""
    values: PlainDict
    """The same, resolved."""
    step: int

    def under(self, typed: Sequence[str]) -> list[str]:
        """Put the configuration of the trunk under the overrides of a branch."""
        return under(self.overrides, self.values, typed)


class Forks:
    """Completes the command lines of forks, and leaves others as they are.

    Args:
        hydra: Composes configurations.
        command_line: The command line, not checked yet.

    Raises:
        ConfigError: A recipe is named beside `branch_from`; its values would be ignored.
    """

    def __init__(self, hydra: Hydra, command_line: CommandLine) -> None:
        self.hydra = hydra
        self.config_name = command_line.config_name
        self._trunks: dict[str, _TrunkConfig] = {}
        if command_line.names_config and any(map(names_fork, command_line.overrides)):
            raise ConfigError(
                f"-cn {command_line.config_name}: a branch has the configuration of its trunk, and"
                " the recipe would be left unread. Leave -cn out, and give what should be"
                " different as key=value."
            )

    def pinned(self, tokens: Sequence[str]) -> list[str]:
        """Replace each `branch_from` by FOLDER@DIGEST, so that later checkpoints change nothing.

        Raises:
            ConfigError: The value is a range, or neither a run nor a checkpoint of optrun.
            CheckpointError: The checkpoint is damaged, uncommitted or gone.
        """
        expanded = list(tokens)
        for at, token in enumerate(tokens):
            if names_fork(token):
                override = overrides.parse([token])[0]
                if override.is_delete() or (
                    override.is_sweep_override() and not override.is_choice_sweep()
                ):
                    raise ConfigError(
                        f"{token}: expected a run directory or a checkpoint, or under -m a list of"
                        " them."
                    )
                values = _values(override)
                if values != [None]:
                    trunks = (quote_path(Path(str(find_trunk(str(value))))) for value in values)
                    expanded[at] = f"{KEY}={','.join(trunks)}"
        return expanded

    def checked(self, tokens: Sequence[str], *, sweep: bool) -> list[str]:
        """Check overrides as `overrides.parse_checked`, against the configuration of the trunk.

        Returns:
            The typed overrides, each trunk as FOLDER@DIGEST.
        """
        typed = self.pinned(tokens)
        overrides.refuse_names(overrides.parse(typed))
        value = trunk_of(typed)
        below: list[str] = []
        if value is not None:  # of several trunks the first
            typed_words = set(typed)
            tokens_below = self._trunk(value).under(typed)
            below = [token for token in tokens_below if token not in typed_words]
        checked = overrides.parse_checked(
            self.hydra, self.config_name, [*below, *typed], sweep=sweep
        )
        return checked[len(below) :]

    def complete(self, tokens: Sequence[str]) -> list[str]:
        """Put the configuration of the checkpoint that a run branches from under its overrides.

        Overrides without `branch_from` are returned as they are.

        Args:
            tokens: Overrides of the run, each `branch_from` as FOLDER@DIGEST.
        """
        value = trunk_of(tokens)
        if value is None:
            return list(tokens)
        return self._trunk(value).under(tokens)

    def require_place(self, values: PlainMapping) -> None:
        """Refuse a branch with another model, data or position in the data than its checkpoint.

        Only the configurations are compared; files are compared when they are read. Values without
        `branch_from` pass.

        Args:
            values: Resolved configuration of the branch.

        Raises:
            ConfigError: The message lists the keys with both values, or `branch_from` stands in a
                file, or the checkpoint is at or behind `training.max_steps`.
        """
        value = values.get(KEY)
        if value is not None:
            if Trunk.parse(str(value)) is None:
                raise ConfigError(
                    f"{KEY}={value}: it stands in a file; expected on the command line alone."
                )
            trunk = self._trunk(str(value))
            refuse_other_data_position(trunk.values, values, str(value))
            length = values["training"]["max_steps"]
            if length is not None:
                refuse_ended_fork(str(value), trunk.step, length, f"training.max_steps={length}")

    def _trunk(self, value: str) -> _TrunkConfig:
        """Read the configuration of a checkpoint to branch from, as overrides and as values.

        Args:
            value: `FOLDER@DIGEST`. Each is read once; later calls return the same object.

        Raises:
            ConfigError: A plugin of that run is not loaded, or no override writes one of its
                values.
            CheckpointError: The checkpoint is gone, damaged or has another digest.
        """
        if value not in self._trunks:
            trunk = Trunk.parse(value)
            assert trunk is not None, "it was pinned"
            from optrun.artifacts.checkpoint import open_verified
            from optrun.runner.resume.state_file import refuse_garbage

            folder = trunk.folder
            metadata = open_verified(folder, lazy=True).metadata
            refuse_garbage(folder, metadata)
            require(metadata.plugins or (), str(folder))
            before = saved.with_schemas(metadata.config, str(folder))
            rebase_paths(before, original_cwd(RunDir(folder.parent.parent).hydra))
            values = saved.plain(before)
            overrides_of_trunk = as_overrides(self.hydra, values, str(folder))
            self._trunks[value] = _TrunkConfig(overrides_of_trunk, values, metadata.global_step)
        return self._trunks[value]


def find_trunk(value: str) -> Trunk:
    """Find the checkpoint of `branch_from`: a checkpoint, or the newest whole one of a run.

    Args:
        value: RUN_DIR, CHECKPOINT, or the `FOLDER@DIGEST` that a branch records.

    Raises:
        ConfigError: The path is neither a run nor a checkpoint of optrun.
        CheckpointError: The checkpoint is damaged, uncommitted or gone, or has another digest.
    """
    trunk = Trunk.parse(value)
    if trunk is not None and not Path(value).exists():
        trunk.require()
        return trunk
    return Trunk.of(locate(value, f"{KEY}=").whole_checkpoint())


def trunk_of(tokens: Sequence[str]) -> str | None:
    """Read the value of `branch_from=`, or the first of several.

    None if it is absent or null.
    """
    for override in overrides.parse([token for token in tokens if names_fork(token)]):
        first = _values(override)[0]
        if first is None:
            return None
        return str(first)
    return None


def _values(override: Override) -> list[object]:
    """Read the values of an override (several in a sweep), without quotes."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [overrides.plain_value(item) for item in value.list]
    return [overrides.plain_value(value)]


def whole_command_line(hydra: Hydra, command_line: CommandLine) -> CommandLine:
    """Put the configuration of the trunk under the overrides of one branch.

    A command line without `branch_from`, or with `branch_from=null`, stays as it is.

    Raises:
        ConfigError: An override is wrong, `branch_from` has several values or names no trunk, or
            the branch has another model or another position in the data than its trunk.
        CheckpointError: The checkpoint is damaged, uncommitted or gone, or has another digest.
    """
    override = command_line.override(KEY)
    if override is None or _values(override)[0] is None:
        return command_line
    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several trunks are a sweep. Add -m to run one job for each."
        )
    forks = Forks(hydra, command_line)
    composed = forks.complete(forks.checked(command_line.overrides, sweep=False))
    forks.require_place(
        saved.plain(store.without_hydra(store.compose(hydra, command_line.config_name, composed)))
    )
    return replace(command_line, overrides=composed)
