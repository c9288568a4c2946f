"""The configuration of a resumed run.

`config.yaml` where the run wrote it, else that of a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf import OmegaConf

from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import read_state
from optrun.artifacts.checksum import file_problem
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import read_manifest, refuse_foreign, refuse_other_format
from optrun.artifacts.metrics import from_json, read_summary, try_read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import CheckpointError, ConfigError, OtherFormatError
from optrun.base.reading import read_text
from optrun.config.hydra_internals import get_omega_conf_dumper
from optrun.config.safety import refuse_code_and_secrets
from optrun.config.saved import differences, read_config, refuse_interpolations


def as_text(values: Mapping[str, object]) -> str:
    """Write a resolved configuration as YAML, as `OmegaConf.to_yaml` does."""
    return str(
        yaml.dump(dict(values), allow_unicode=True, sort_keys=False, Dumper=get_omega_conf_dumper())
    )


def digest_of(text: str) -> str:
    """Digest the text of a configuration, as recorded in the summary; hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def configuration_of(
    run: RunDir, decided_keys: Sequence[str] = ()
) -> tuple[dict[str, object], str | None]:
    """Read the configuration of a run, including the changes of its later starts.

    Normally from `config.yaml`, if the summary confirms that a start of the run wrote it; else from
    the newest checkpoint.

    Args:
        run: The run directory.
        decided_keys: Typed keys, whose values in the file do not matter.

    Returns:
        Resolved values, and a note if they are those of a checkpoint.

    Raises:
        ConfigError: The file was edited, holds an interpolation or names code, or is missing and
            there is no checkpoint.
        OtherFormatError: A newer optrun wrote the newest checkpoint.
    """
    newest = _read_newest_checkpoint(run)
    try:
        values = read_config(run.config)
    except ConfigError as error:
        if newest is None:
            raise ConfigError(
                f"{error} There is no checkpoint that it could be taken from: restore it, or start"
                " a new run."
            ) from error
        return newest[1], _taken(str(error), newest[0])
    refuse_interpolations(values, str(run.config))
    refuse_code_and_secrets(OmegaConf.create(values))
    was_written = _was_written(run)
    if was_written or (was_written is None and newest is None):
        return values, None
    if newest is None:
        raise ConfigError(
            f"{run.config}: changed since the run wrote it, and there is no checkpoint that says"
            " what it was. Restore it, or start a new run."
        )
    folder, saved_values = newest
    changes = differences(saved_values, values)
    if not changes:
        return values, None
    if as_text(saved_values).startswith(read_text(run.config)):
        return saved_values, _taken(f"{run.config}: cut.", folder)
    open_keys = [
        key
        for key in changes
        if not any(key == decided or key.startswith(f"{decided}.") for decided in decided_keys)
    ]
    if open_keys:
        changed_keys = ", ".join(
            f"{key}={changes[key][1]} (was {changes[key][0]})" for key in open_keys[:5]
        )
        key = open_keys[0]
        before, now = changes[key]
        raise ConfigError(
            f"{run.config}: {changed_keys}: changed since {folder} was saved, and not on the"
            f" command line. To train with it, give {key}={now} there;"
            f" to continue as before, {key}={before}."
        )
    return saved_values, None


def plugins_of(run: RunDir) -> list[dict[str, object]]:
    """Read the plugin records of a run from its summary, else from its newest checkpoint.

    Each record is one of `config.registry.origins.records`. Empty if neither can be read.
    """
    try:
        plugins = read_summary(run.summary).get("plugins", [])
    except (OSError, ValueError):
        newest = _read_newest_checkpoint(run)
        plugins = [] if newest is None else read_state(newest[0]).get("plugins", [])
    return plugins if isinstance(plugins, list) else []


def _taken(why: str, folder: Path) -> str:
    return f"{why} The configuration was taken from {folder}, and is written back."


def _was_written(run: RunDir) -> bool | None:
    """Tell whether a start of the run wrote exactly this file.

    None if that was not recorded.
    """
    recorded = try_read_summary(run.summary).get("config_sha256")
    return None if recorded is None else recorded == digest_of(read_text(run.config))


def _read_newest_checkpoint(run: RunDir) -> tuple[Path, dict[str, object]] | None:
    """Find the newest checkpoint with a readable state, and the configuration in it.

    None if there is none. Damaged checkpoints and those of another run are passed over.

    Raises:
        OtherFormatError: A newer optrun wrote one of the checkpoints.
    """
    folders = checkpoint_folders(run)
    for folder in folders:
        refuse_other_format(folder)
    run_id = run_id_of(run) if folders else None
    for folder in folders:
        try:
            refuse_foreign(folder, run_id)
            entry = read_manifest(folder).files[names.CHECKPOINT_STATE]
            if file_problem(folder / names.CHECKPOINT_STATE, entry) is None:
                return folder, from_json(read_state(folder)["config"])
        except OtherFormatError:
            raise
        except (CheckpointError, OSError, KeyError):
            continue
    return None
