"""Whether the checkpoints, the model and the tokenizer of a run are whole."""

from __future__ import annotations

import os
from pathlib import Path

from optrun.artifacts.identity import run_id_of
from optrun.artifacts.manifest import problems
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.artifacts.saved_folder import folder_problems
from optrun.base.errors import CheckpointError, OtherFormatError


def saved_folders(run: RunDir) -> list[Path]:
    """List `model/` and `tokenizer/` of a run, as far as they exist."""
    return [folder for folder in (run.model, run.tokenizer) if os.path.lexists(folder)]


def run_problems(run: RunDir) -> list[str]:
    """List the damage of a run's checkpoints, model and tokenizer; empty if it is whole.

    Every byte is read.
    """
    try:
        run_id = run_id_of(run)
    except CheckpointError as error:
        return [str(error)]
    messages = missing_model(run)
    for folder in checkpoint_folders(run):
        messages += problems(folder, run_id)
    for folder in saved_folders(run):
        messages += folder_problems(folder)
    return messages


def missing_model(run: RunDir) -> list[str]:
    """Return one message if a finished run has no `model/`; else an empty list.

    Empty, too, if the summary cannot be read, so that nobody knows whether the run is finished.
    """
    try:
        finished = read_summary(run.summary).get("status") == "finished"
    except (OSError, ValueError, OtherFormatError):
        return []
    if finished and not os.path.lexists(run.model):
        return [f"{run.model}: missing, although the run is finished."]
    return []
