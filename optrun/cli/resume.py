"""`optrun resume=...`: continue a run, in its directory and with its configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from optrun.artifacts.forks import KEY as BRANCH_FROM
from optrun.artifacts.forks import Trunk
from optrun.artifacts.metrics import try_read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.target import Target, find_target
from optrun.base import shell
from optrun.base.errors import ConfigError, printable, refuse_url
from optrun.cli.auto_lr import compose_new
from optrun.config import overrides, saved
from optrun.config.batch import unset_derived_size
from optrun.config.compose import build_request
from optrun.config.hydra_internals import Hydra
from optrun.config.literal import quote_path
from optrun.config.original_cwd import original_command, original_cwd, rebase_paths
from optrun.config.registry.origins import require
from optrun.config.request import CommandLine
from optrun.launch.rank_checks import refuse_unfit
from optrun.launch.single_run import Caller, execute, start
from optrun.runner.outcome import Outcome


def resume(hydra: Hydra, command_line: CommandLine, value: str, caller: Caller) -> Outcome:
    """Continue the run named by `resume=`.

    `auto` starts a new run if there is none to continue. A run killed before it wrote its
    configuration starts over with its recorded command line.

    Args:
        hydra: Composes configurations, also from the user's folders.
        command_line: The command line, whose overrides change the run; not checked yet.
        value: RUN_DIR, CHECKPOINT, `latest` or `auto`.
        caller: The command line or a Python program, and where it prints.

    Raises:
        ConfigError: There is no such run, a change does not fit it, or `branch_from` is given with
            another value than `auto`.
        OptrunError: As `execute` raises it.
    """
    branch = command_line.override(BRANCH_FROM)
    if value != "auto" and branch is not None and branch.value() is not None:
        raise ConfigError(
            f"resume={value} and branch_from: resume continues a run, in its directory;"
            " branch_from begins a new one. Give one of them; with resume=auto a branch begins"
            " where there is none to continue with."
        )
    given_dir = _run_dir(command_line)
    target = find_target(value, given_dir)
    if target is None:  # resume=auto, and nothing to resume
        new_run = command_line.without("resume")
        checked, cfg = compose_new(hydra, new_run, caller.console)
        # Composing took a moment, in which another process may have begun a run there.
        target = find_target(value, given_dir)
        if target is None:
            return start(hydra, replace(command_line, overrides=checked), cfg, caller)
    if target.checkpoint is None and target.run.is_unbegun():
        return _start_over(hydra, command_line, target.run, caller)
    return _continue(hydra, command_line, target, caller)


def _start_over(hydra: Hydra, command_line: CommandLine, run: RunDir, caller: Caller) -> Outcome:
    """Start a run again, in its directory, if it was killed before its first save.

    Hydra's record has the recipe and the overrides; the typed changes win over them.

    Raises:
        ConfigError: Hydra was killed before it recorded the command line.
    """
    run_dir_token = f"hydra.run.dir={quote_path(run.path)}"
    recorded = original_command(run.hydra)
    if recorded is None:
        raise ConfigError(
            f"{run.path}: this run was killed before it noted how it was started. Repeat its"
            f" command with {shell.quote(run_dir_token)}."
        )
    recipe, recorded_tokens = recorded
    _refuse_other_recipe(command_line, run, recipe)
    # 1. The overrides: `seed=1 lr=0.1` on record and `resume=RUN_DIR lr=0.2` now give `seed=1
    # lr=0.2 hydra.run.dir=RUN_DIR`.
    changes = _changes(command_line)
    changed_keys = {override.key_or_group for override in changes.parsed}
    # Trust in the code of a model is given on each command line anew.
    replaced_keys = (*changed_keys, "resume", "model.trust_remote_code")
    unchanged = replace(command_line, overrides=recorded_tokens).without(*replaced_keys)
    tokens = [*unchanged.overrides, *changes.overrides, run_dir_token]
    # 2. The run. Relative paths on record start from the folder where the run was started.
    again = replace(command_line, config_name=recipe, overrides=tokens)
    checked, cfg = compose_new(hydra, again, caller.console)
    rebase_paths(cfg, original_cwd(run.hydra))
    sys.stderr.write(
        f"optrun: {printable(str(run.path))}: this run ended before its first save; it starts"
        " over.\n"
    )
    return start(hydra, replace(again, overrides=checked), cfg, caller)


def _continue(hydra: Hydra, command_line: CommandLine, target: Target, caller: Caller) -> Outcome:
    """Continue a run from a checkpoint, with its configuration and the typed changes.

    Args:
        hydra: Composes choices of groups.
        command_line: The command line, not checked yet.
        target: The run, and the checkpoint that was named; None: the newest one.
        caller: The command line or a Python program.

    Raises:
        ConfigError: A change does not fit, or a plugin of the run is missing.
        OptrunError: As `execute` raises it.
    """
    from optrun.runner.resume.checkpoint import ResumePoint
    from optrun.runner.resume.saved_config import plugins_of, read_configuration

    # 1. The saved configuration. `mended_note` says so if a damaged file was replaced, else None.
    changes = _changes(command_line)
    recipe = try_read_summary(target.run.summary).get("config_name")
    _refuse_other_recipe(command_line, target.run, recipe)
    changed_keys = [override.key_or_group for override in changes.parsed]
    saved_values, mended_note = read_configuration(target.run, changed_keys)
    require(plugins_of(target.run), str(target.run.path))  # the same code of plugins
    saved_cfg = saved.with_schemas(saved_values, str(target.run.config))
    # 2. The changes. Saved relative paths start from the folder where the run was started, typed
    # ones from the present folder, so the saved ones are rebased before the typed ones are put in.
    changes = _without_same_trunk(saved_cfg.branch_from, changes, target.run)
    folder = original_cwd(target.run.hydra)
    rebase_paths(saved_cfg, folder)
    tokens = list(changes.overrides)
    changed_cfg = saved.changed(hydra, saved_cfg, tokens)
    unset_derived_size(changed_cfg, tokens, resumes=True)
    # 3. The run.
    request = build_request(command_line, changed_cfg, tokens)
    refuse_unfit(request.config, tokens, caller.launched, resumes=True)
    notes = [] if mended_note is None else [mended_note]
    point = ResumePoint(
        target.checkpoint, folder, saved=bool(saved_cfg.checkpoint.enabled), notes=notes
    )
    return execute(request, target.run, caller, point)


def _run_dir(command_line: CommandLine) -> Path | None:
    """Return `hydra.run.dir` if the command line names one."""
    override = command_line.override("hydra.run.dir")
    if override is None:
        return None
    path = str(override.value())
    refuse_url("hydra.run.dir", path)
    return Path(path)


def _changes(command_line: CommandLine) -> CommandLine:
    """Return the typed changes: the command line without `resume` and `hydra.run.dir`.

    Raises:
        ConfigError: An override is for Hydra, which has no effect on a resume.
    """
    changes = command_line.without("resume", "hydra.run.dir")
    for token in filter(overrides.is_hydra, changes.overrides):
        raise ConfigError(f"{token}: has no effect on a run that continues; leave it out.")
    return changes


def _without_same_trunk(run_trunk: str | None, changes: CommandLine, run: RunDir) -> CommandLine:
    """Drop `branch_from` from the changes of a run if it repeats the run's own.

    Args:
        run_trunk: `branch_from` of the run: the checkpoint that it began from, as FOLDER@DIGEST.
        changes: Overrides that change the run.
        run: The resumed run.

    Raises:
        ConfigError: The typed `branch_from` names another trunk, or `branch_schedule` is typed.
    """
    branch = changes.override(BRANCH_FROM)
    if branch is not None and not _names_trunk(branch.value(), run_trunk):
        raise ConfigError(
            f"{branch.input_line}: the run in {run.path} began from"
            f" {run_trunk or 'its own step 0'}, and continues. Start a branch from elsewhere"
            " in another directory."
        )
    schedule = changes.override("branch_schedule")
    if schedule is not None:
        raise ConfigError(
            f"{schedule.input_line}: the schedule of a branch was fixed when the branch began."
            " Leave it out, or begin another branch."
        )
    return changes.without(BRANCH_FROM)


def _names_trunk(value: object, run_trunk: str | None) -> bool:
    """Tell whether a typed `branch_from` names the trunk of a run: the checkpoint it began from.

    None, or null, is right for a run that is no branch.

    Args:
        value: The typed value: a folder at or above the checkpoint, FOLDER@DIGEST, or None.
        run_trunk: `branch_from` of the run.

    Example:
        >>> run_trunk = "/runs/a/checkpoints/step-00000100@0123456789abcdef"
        >>> _names_trunk("/runs/a", run_trunk), _names_trunk("/runs/b", run_trunk)
        (True, False)
        >>> _names_trunk(None, None)
        True
    """
    trunk = Trunk.parse(run_trunk)
    if value is None:
        return trunk is None
    if trunk is None:
        return False
    typed_trunk = Trunk.parse(str(value))
    if typed_trunk is None:  # a folder without a digest
        return trunk.folder.is_relative_to(Path(str(value)).resolve())
    is_inside = trunk.folder.is_relative_to(typed_trunk.folder.resolve())
    return is_inside and typed_trunk.digest == trunk.digest


def _refuse_other_recipe(command_line: CommandLine, run: RunDir, recipe: object) -> None:
    """Refuse `-cn` with another recipe than the run's: nothing would read it.

    Args:
        command_line: The command line that resumes the run.
        run: The resumed run, for the message.
        recipe: Name of the configuration that the run began with; None: not recorded. Then any
            `-cn` is accepted.

    Raises:
        ConfigError: `-cn` names another one.
    """
    if not command_line.names_config or recipe is None:
        return
    if recipe != command_line.config_name:
        raise ConfigError(
            f"-cn {command_line.config_name}: the run in {run.path} began with {recipe} and"
            " keeps its configuration. Leave out -cn, and write what should change as key=value."
        )
