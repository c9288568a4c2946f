"""Which run a directory is.

A random id made at its begin, in its summary and in each of its checkpoints.

A whole run directory may be copied and moved. A checkpoint that is copied into the directory of
another run stays what it was, and is not taken for one of that run.
"""

from __future__ import annotations

import contextlib

from optrun.artifacts.manifest import read_manifest
from optrun.artifacts.metrics import try_read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import CheckpointError


def run_id_of(run: RunDir) -> str | None:
    """Find the id of a run in its directory.

    The id is in the summary. If that has none, it is the one in the checkpoints. Checkpoints
    without a readable manifest, or without an id in it, do not count.

    Returns:
        None if neither records it.

    Raises:
        CheckpointError: The summary has no id, and the checkpoints have several.
        OtherFormatError: A newer optrun wrote the summary.
    """
    run_id_of_summary = try_read_summary(run.summary).get("run_id")
    if isinstance(run_id_of_summary, str) and run_id_of_summary:
        return run_id_of_summary
    run_ids: dict[str, str] = {}
    for folder in checkpoint_folders(run):
        with contextlib.suppress(CheckpointError, OSError):
            manifest_id = read_manifest(folder).run_id
            if manifest_id:
                run_ids[folder.name] = manifest_id
    ids = set(run_ids.values())
    if not ids:
        return None
    if len(ids) > 1:
        checkpoints_and_ids = ", ".join(
            f"{name} of {run_id[:12]}" for name, run_id in run_ids.items()
        )
        raise CheckpointError(
            f"{run.checkpoints}: checkpoints of {len(ids)} runs ({checkpoints_and_ids}), and"
            f" {run.summary}, which says which of them this is, cannot be read. Restore it, or"
            " take the others away."
        )
    return ids.pop()
