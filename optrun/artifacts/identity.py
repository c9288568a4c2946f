"""Which run a directory is: a random id made at its begin, in its summary and in each of its checkpoints.

A whole run directory may be copied and moved. A checkpoint that is copied into the directory of another run stays what
it was, and is not taken for one of that run.
"""

from __future__ import annotations

import secrets

from optrun.artifacts.manifest import read_manifest
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.errors import CheckpointError

NO_ID = ""
"""Of a run of before there were ids: no checkpoint with one is its own."""


def new_run_id() -> str:
    """An id that no other run has; 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_id_of(run: RunDir) -> str | None:
    """The id of a run; without its summary, what all of its checkpoints say.

    Returns:
        None where nothing says it; `NO_ID` for a run that is older than ids.

    Raises:
        CheckpointError: The summary is lost, and the checkpoints are of several runs.
        NewerFormatError: A newer optrun wrote the summary.
    """
    try:
        told = read_summary(run.summary).get("run_id")
    except (OSError, ValueError):
        told = None
    if isinstance(told, str) and told:
        return told
    run_ids = {}
    for folder in checkpoint_folders(run):
        try:
            run_ids[folder.name] = read_manifest(folder)["run_id"]
        except (CheckpointError, OSError):
            continue
    ids = set(run_ids.values())
    if ids <= {None}:
        return None
    if None in ids:
        return NO_ID
    if len(ids) > 1:
        listed = ", ".join(f"{name} of {str(run_id)[:12]}" for name, run_id in run_ids.items())
        raise CheckpointError(
            f"{run.checkpoints}: checkpoints of {len(ids)} runs ({listed}), and {run.summary}, which says which of "
            "them this is, cannot be read. Restore it, or take the others away."
        )
    return str(ids.pop())
