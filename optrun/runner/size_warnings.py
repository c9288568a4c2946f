"""Warn of sizes that are allowed, but rarely meant.

Of a micro-batch and of checkpoints, told before the first step.
"""

from __future__ import annotations

import os
import shutil

import torch

from optrun.artifacts.atomic import MARGIN
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.formatting import size
from optrun.config.schema.checkpoint import CheckpointConfig
from optrun.config.schema.data import StdlibConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.config.schema.training import MOST_PER_DEVICE, Precision
from optrun.model.weights import model_tensors
from optrun.optimizer.footprint import state_bytes


def size_warnings(config: RunConfig, device: torch.device) -> list[str]:
    """Warn of float16 without a GPU, and of a micro-batch whose logits alone fill the memory."""
    notes = []
    if device.type == "cpu" and config.training.precision is Precision.fp16:
        notes.append(
            "warning: training.precision=fp16 on a CPU: its small range costs skipped steps and no"
            " CPU gains from it. Take training.precision=bf16 or fp32."
        )
    data = config.data
    model = config.model
    batch = config.training.per_device_train_batch_size or MOST_PER_DEVICE
    if not isinstance(data, StdlibConfig) or not isinstance(model, FromConfigConfig):
        return notes
    needed = 2 * 4 * batch * data.max_length * model.vocab_size
    memory = _memory(device)
    if needed > memory and config.training.chunked_loss.lower() == "false":
        notes.append(
            f"warning: data.max_length={data.max_length} with"
            f" training.per_device_train_batch_size={batch}: the logits of a micro-batch and their"
            f" gradient take {size(needed)}; memory is {size(memory)}. Lower one of them."
        )
    return notes


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def checkpoint_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Estimate the size of a checkpoint before the optimizer has any state.

    Args:
        model: What is trained.
        optimizer: Over the model's parameters, with names.

    Returns:
        Bytes; for an optimizer whose state is not known beforehand, twice the weights are assumed
        for it.
    """
    weights: int = sum(
        tensor.numel() * tensor.element_size() for tensor in model_tensors(model).values()
    )
    state_sizes = [count for count in state_bytes(optimizer).values() if count is not None]
    trained: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        trained += group["params"]
    if len(state_sizes) < len(trained):
        state_sizes = [2 * param.numel() * param.element_size() for param in trained]
    return int(weights + sum(state_sizes))


def space_warning(run: RunDir, config: CheckpointConfig, checkpoint_size: int) -> str | None:
    """Warn of too little room for the checkpoints; else None.

    Args:
        run: The run directory.
        config: How many checkpoints are kept.
        checkpoint_size: Bytes of one.
    """
    # The next one is written before an old one goes.
    count = max(1, config.keep_last + config.keep_best + 1 - len(checkpoint_folders(run)))
    free = shutil.disk_usage(run.path).free
    if free >= count * checkpoint_size + MARGIN:
        return None
    return (
        f"warning: {count} checkpoints of about {size(checkpoint_size)} are still to come,"
        f" {size(free)} are free in {run.path}: saving will fail. Make room,"
        " or keep fewer (checkpoint.keep_last, checkpoint.keep_best)."
    )
