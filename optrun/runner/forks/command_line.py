"""Complete the command line of a branch by the configuration of its parent checkpoint.

A branch is a run with `branch_from=CHECKPOINT`; this checkpoint is its parent (`trunk` in code).
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
    is_branch_from,
    merge_trunk_overrides,
    refuse_other_data_position,
)


@dataclass(frozen=True)
class _TrunkConfig:
    """The configuration of a parent checkpoint; a branch takes it over unless it types another."""

    overrides: list[str]
    """The configuration as overrides of the default one."""
    values: PlainDict
    """The same, resolved."""
    step: int

    def add_below(self, typed: Sequence[str]) -> list[str]:
        """Add the parent checkpoint's overrides to the typed ones; the typed ones win."""
        return merge_trunk_overrides(self.overrides, self.values, typed)


class Forks:
    """Completes command lines with `branch_from`, and leaves others as they are.

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
        if command_line.names_config and any(map(is_branch_from, command_line.overrides)):
            raise ConfigError(
                f"-cn {command_line.config_name}: a branch has the configuration of its trunk, so"
                " the recipe would be ignored. Leave -cn out, and give changes as key=value."
            )

    def pin_trunks(self, tokens: Sequence[str]) -> list[str]:
        """Replace the value of `branch_from` by FOLDER@DIGEST; other overrides stay as they are.

        A run then means its newest checkpoint of now, and not of the time when a job starts.

        Raises:
            ConfigError: The value is a range, or neither a run nor a checkpoint of optrun.
            CheckpointError: The checkpoint is damaged, uncommitted or gone.
        """
        return [self._pin(token) if is_branch_from(token) else token for token in tokens]

    def _pin(self, token: str) -> str:
        """Replace the value or values of `branch_from=...`, as `pin_trunks`; null stays.

        `branch_from=runs/a,runs/b` becomes `branch_from=FOLDER@DIGEST,FOLDER@DIGEST`.
        """
        override = overrides.parse([token])[0]
        is_range = override.is_sweep_override() and not override.is_choice_sweep()
        if override.is_delete() or is_range:
            raise ConfigError(
                f"{token}: expected a run directory or a checkpoint, or under -m a list of them."
            )
        values = _values(override)
        if values == [None]:  # branch_from=null
            return token
        trunks = [quote_path(Path(str(locate_trunk(str(value))))) for value in values]
        return f"{KEY}={','.join(trunks)}"

    def check(self, tokens: Sequence[str], *, sweep: bool) -> list[str]:
        """Check the keys, choices and types of typed overrides.

        Those of a branch are checked as changes of its parent checkpoint's configuration: with a
        parent of `optimizer=lamb`, keys of `lamb` are valid. With several parent checkpoints the
        first one counts.

        Args:
            tokens: The typed overrides.
            sweep: Whether a value may be a list of values, as under `-m`.

        Returns:
            The typed overrides, each parent checkpoint as FOLDER@DIGEST.

        Raises:
            ConfigError: An override is wrong.
            CheckpointError: A parent checkpoint is damaged, uncommitted or gone.
        """
        # 1. FOLDER@DIGEST for each parent checkpoint.
        typed = self.pin_trunks(tokens)
        overrides.refuse_names(overrides.parse(typed))
        # 2. What the parent checkpoint adds to them; nothing without one.
        value = first_trunk(typed)
        trunk_only: list[str] = []
        if value is not None:
            merged = self._trunk(value).add_below(typed)
            trunk_only = [token for token in merged if token not in typed]
        # 3. Check all together, since the parent's choices decide which keys there are. One checked
        # token comes back for each, in the same order: the parent's first, then the typed ones.
        checked = overrides.parse_checked(
            self.hydra, self.config_name, [*trunk_only, *typed], sweep=sweep
        )
        return checked[len(trunk_only) :]

    def complete(self, tokens: Sequence[str]) -> list[str]:
        """Add the configuration of the parent checkpoint to the overrides of a branch; these win.

        Overrides without `branch_from` are returned unchanged.

        Args:
            tokens: Overrides of the run; `branch_from` is FOLDER@DIGEST.

        Returns:
            Overrides that make the whole configuration of the branch, see `merge_trunk_overrides`.
        """
        value = first_trunk(tokens)
        if value is None:
            return list(tokens)
        return self._trunk(value).add_below(tokens)

    def refuse_other_position(self, values: PlainMapping) -> None:
        """Refuse a branch with another model or data position than its parent checkpoint.

        Only the configurations are compared; files are compared when they are read. Values without
        `branch_from` pass.

        Args:
            values: Resolved configuration of the branch.

        Raises:
            ConfigError: The message lists the keys with both values; or `branch_from` is set in a
                file; or `training.max_steps` is not beyond the step of the checkpoint.
        """
        value = values.get(KEY)
        if value is None:
            return
        if Trunk.parse(str(value)) is None:
            raise ConfigError(
                f"{KEY}={value}: set in a file; expected on the command line. Remove it from the"
                f" file, and add {KEY}={value} to the command."
            )
        trunk = self._trunk(str(value))
        refuse_other_data_position(trunk.values, values, str(value))
        length = values["training"]["max_steps"]
        if length is not None:
            refuse_ended_fork(str(value), trunk.step, length, f"training.max_steps={length}")

    def _trunk(self, value: str) -> _TrunkConfig:
        """Read the configuration of a checkpoint to branch from, as overrides and as values.

        Relative paths in it are rebased: the folder that the checkpoint's run was started in is put
        before those that exist there.

        Args:
            value: `FOLDER@DIGEST`, pinned, that is, the result of `locate_trunk` as text. Each is
                read once; later calls return the same object.

        Raises:
            ConfigError: A plugin of that run is not loaded, or one of its values cannot be written
                as an override.
            CheckpointError: The checkpoint is gone, damaged or has another digest.
        """
        if value in self._trunks:
            return self._trunks[value]
        from optrun.artifacts.checkpoint import open_verified
        from optrun.runner.resume.state_file import refuse_invalid_state

        trunk = Trunk.parse(value)
        assert trunk is not None, "it was pinned"
        folder = trunk.folder
        # `locate_trunk` has verified it. Tensors stay in their files.
        metadata = open_verified(folder, lazy=True).metadata
        refuse_invalid_state(folder, metadata)  # raises CheckpointError
        require(metadata.plugins or (), str(folder))  # raises ConfigError for an absent plugin
        # Relative paths count from the folder that the run of the checkpoint was started in; an
        # unknown one, None, leaves them as they are. `rebase_paths` changes `config` in place.
        config = saved.with_schemas(metadata.config, str(folder))
        rebase_paths(config, original_cwd(RunDir(folder.parent.parent).hydra))
        values = saved.plain(config)
        tokens = as_overrides(self.hydra, values, str(folder))  # what differs from the defaults
        self._trunks[value] = _TrunkConfig(tokens, values, metadata.global_step)
        return self._trunks[value]


def locate_trunk(value: str) -> Trunk:
    """Find the checkpoint of `branch_from`: the named one, or the newest undamaged one of a run.

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
    return Trunk.of(locate(value, f"{KEY}=").complete_checkpoint())


def first_trunk(tokens: Sequence[str]) -> str | None:
    """Return the first value of `branch_from=` among overrides; None if it is absent or null."""
    for override in overrides.parse([token for token in tokens if is_branch_from(token)]):
        first = _values(override)[0]
        return None if first is None else str(first)
    return None


def _values(override: Override) -> list[object]:
    """Return the values of an override without quotes; a sweep has several."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return [overrides.plain_value(item) for item in value.list]
    return [overrides.plain_value(value)]


def add_trunk_config(hydra: Hydra, command_line: CommandLine) -> CommandLine:
    """Add the parent checkpoint's configuration to the command line of a branch.

    Typed overrides win. A command line without `branch_from`, or with `branch_from=null`, is
    returned unchanged.

    Args:
        hydra: Composes configurations.
        command_line: The command line of one run, not checked yet.

    Returns:
        A command line with all overrides of the branch, checked; `branch_from` is FOLDER@DIGEST.

    Raises:
        ConfigError: An override is wrong, `branch_from` has several values or names no parent
            checkpoint, or the branch has another model or another position in the data than its
            parent checkpoint.
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
    # Check what was typed, add the parent's configuration, compose, and compare with the parent.
    tokens = forks.complete(forks.check(command_line.overrides, sweep=False))
    config = store.compose(hydra, command_line.config_name, tokens)
    forks.refuse_other_position(saved.plain(store.without_hydra(config)))
    return replace(command_line, overrides=tokens)
