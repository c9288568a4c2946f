"""Warn before the first step of checkpoints that the disk has no room for."""

from __future__ import annotations

import shutil

import torch

from optrun.artifacts.atomic import MARGIN
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.formatting import size
from optrun.config.schema.checkpoint import CheckpointConfig
from optrun.model.weights import model_tensors
from optrun.optimizer.footprint import state_bytes


def checkpoint_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Estimate the size of a checkpoint before the optimizer has any state.

    Args:
        model: The model to train.
        optimizer: Optimizer over the model's named parameters.

    Returns:
        Bytes. If the state of one parameter cannot be predicted, that of all is assumed to be twice
        the trained weights, as Adam's.
    """
    weights = sum(tensor.nbytes for tensor in model_tensors(model).values())
    # `state_bytes` maps each parameter that is trained to the bytes of its state; None: unknown.
    state_sizes = [count for count in state_bytes(optimizer).values() if count is not None]
    trained: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        trained += group["params"]
    if len(state_sizes) < len(trained):
        state_sizes = [2 * param.nbytes for param in trained]
    return weights + sum(state_sizes)


def space_warning(run: RunDir, config: CheckpointConfig, checkpoint_size: int) -> str | None:
    """Return a warning if the disk has too little room for the coming checkpoints; else None.

    Args:
        run: The run directory.
        config: Says how many checkpoints are kept.
        checkpoint_size: Bytes of one checkpoint.
    """
    # A checkpoint is written before the oldest one is deleted: one more than are kept.
    count = max(1, config.keep_last + config.keep_best + 1 - len(checkpoint_folders(run)))
    free = shutil.disk_usage(run.path).free
    if free >= count * checkpoint_size + MARGIN:
        return None
    return (
        f"warning: {count} checkpoints of about {size(checkpoint_size)} are still to come,"
        f" {size(free)} are free in {run.path}: saving will fail. Make room,"
        " or keep fewer (checkpoint.keep_last, checkpoint.keep_best)."
    )
