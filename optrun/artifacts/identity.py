"""Which run a directory is.

A random id made at its begin, in its summary and in each of its checkpoints.

A whole run directory may be copied and moved. A checkpoint that is copied into the directory of
another run stays what it was, and is not taken for one of that run.
"""

from __future__ import annotations

import contextlib
import secrets

from optrun.artifacts.manifest import read_manifest
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import CheckpointError


def new_run_id() -> str:
    """Make an id that no other run has; 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_id_of(run: RunDir) -> str | None:
    """Find the id of a run; without its summary, what all of its checkpoints say.

    Returns:
        None where nothing says it.

    Raises:
        CheckpointError: The summary is lost, and the checkpoints are of several runs.
        OtherFormatError: A newer optrun wrote the summary.
    """
    try:
        run_id_of_summary = read_summary(run.summary).get("run_id")
    except (OSError, ValueError):
        run_id_of_summary = None
    if isinstance(run_id_of_summary, str) and run_id_of_summary:
        return run_id_of_summary
    run_ids: dict[str, str] = {}
    for folder in checkpoint_folders(run):
        with contextlib.suppress(CheckpointError, OSError):
            run_ids |= {folder.name: run_id} if (run_id := read_manifest(folder).run_id) else {}
    ids = set(run_ids.values())
    if not ids:
        return None
    if len(ids) > 1:
        listed = ", ".join(f"{name} of {run_id[:12]}" for name, run_id in run_ids.items())
        raise CheckpointError(
            f"{run.checkpoints}: checkpoints of {len(ids)} runs ({listed}), and {run.summary},"
            " which says which of them this is, cannot be read. Restore it, or take the others"
            " away."
        )
    return ids.pop()
