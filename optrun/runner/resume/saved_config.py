"""Read the configuration of a run to resume: `config.yaml`, or that of a checkpoint."""

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
from optrun.base.plain import is_inside_any
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


def read_configuration(
    run: RunDir, decided_keys: Sequence[str] = ()
) -> tuple[dict[str, object], str | None]:
    """Read the configuration of a run, including the changes of its later starts.

    It is `config.yaml` if that is as the run wrote it, by the digest in the summary. If the file
    was lost or damaged, it is that of the newest checkpoint. An edit is refused, unless the
    command line says what the edited key is to be.

    Args:
        run: The run directory.
        decided_keys: Typed keys, whose values in the file do not matter.

    Returns:
        Resolved values, and a note for the user if a damaged file is replaced.

    Raises:
        ConfigError: The file was edited, holds an interpolation or names code; or it cannot be
            used, and there is no checkpoint.
        OtherFormatError: A newer optrun wrote the newest checkpoint.
    """
    newest = _read_newest_checkpoint(run)
    # 1. A file that cannot be read.
    try:
        values = read_config(run.config)
    except ConfigError as error:
        if newest is None:
            raise ConfigError(
                f"{error} There is no checkpoint to take the configuration from. Restore the file,"
                " or start a new run."
            ) from error
        return newest[1], _note_replaced(str(error), newest[0])
    refuse_interpolations(values, str(run.config))
    refuse_code_and_secrets(OmegaConf.create(values))
    # 2. A file as the run wrote it, or one that nothing can be compared with.
    is_as_written = _is_as_written(run)
    if is_as_written or (is_as_written is None and newest is None):
        return values, None
    if newest is None:
        raise ConfigError(
            f"{run.config}: changed since the run wrote it, and there is no checkpoint with the"
            " original configuration. Restore the file, or start a new run."
        )
    # 3. A file that differs from the checkpoint.
    folder, saved_values = newest
    changes = differences(saved_values, values)
    if not changes:
        return values, None
    if as_text(saved_values).startswith(read_text(run.config)):
        return saved_values, _note_replaced(f"{run.config}: cut short.", folder)
    # 4. An edited file.
    edits = []
    for key, (before, now) in changes.items():
        if not is_inside_any(key, decided_keys):
            edits.append((key, before, now))
    if edits:
        changed_keys = ", ".join(f"{key}={now} (was {before})" for key, before, now in edits[:5])
        key, before, now = edits[0]
        raise ConfigError(
            f"{run.config}: {changed_keys}: edited since {folder} was saved, and not typed on the"
            f" command line. To train with the edit, add {key}={now} to the command; to continue"
            f" as before, add {key}={before}."
        )
    return saved_values, None


def plugins_of(run: RunDir) -> list[dict[str, object]]:
    """Read the records of a run's plugins from its summary, else from its newest checkpoint.

    They were made by `config.registry.origins.records`. Empty if the run has none, or if neither
    file can be read.
    """
    try:
        plugins = read_summary(run.summary).get("plugins", [])
    except (OSError, ValueError):
        newest = _read_newest_checkpoint(run)
        plugins = [] if newest is None else read_state(newest[0]).get("plugins", [])
    return plugins if isinstance(plugins, list) else []


def _note_replaced(why: str, folder: Path) -> str:
    """Write the note on a damaged `config.yaml`, replaced from a checkpoint."""
    return f"{why} The configuration was taken from {folder}, and is written back."


def _is_as_written(run: RunDir) -> bool | None:
    """Tell whether `config.yaml` has the digest in the summary; None if there is no digest."""
    recorded = try_read_summary(run.summary).get("config_sha256")
    if recorded is None:
        return None
    return bool(recorded == digest_of(read_text(run.config)))


def _read_newest_checkpoint(run: RunDir) -> tuple[Path, dict[str, object]] | None:
    """Find the newest checkpoint with a readable state; return its folder and configuration.

    Checkpoints with a damaged state and those of another run are skipped; tensors are not read.
    None if no checkpoint is left.

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
