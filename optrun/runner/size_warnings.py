"""What is allowed, and rarely meant: told before the first step."""

from __future__ import annotations

import os

import torch

from optrun.base.formatting import size
from optrun.config.schema.data import StdlibConfig
from optrun.config.schema.model import FromConfigConfig
from optrun.config.schema.run import RunConfig
from optrun.config.schema.training import MOST_PER_DEVICE, Precision


def size_warnings(config: RunConfig, device: torch.device) -> list[str]:
    """Warn of float16 without a GPU, and of a micro-batch whose logits alone fill the memory."""
    notes = []
    if device.type == "cpu" and config.training.precision is Precision.fp16:
        notes.append(
            "warning: training.precision=fp16 on a CPU: its small range costs skipped steps and no CPU gains from it. "
            "Take training.precision=bf16 or fp32."
        )
    data, model = config.data, config.model
    batch = config.training.per_device_train_batch_size or MOST_PER_DEVICE
    if not isinstance(data, StdlibConfig) or not isinstance(model, FromConfigConfig):
        return notes
    needed = 2 * 4 * batch * data.max_length * model.vocab_size
    memory = _memory(device)
    if needed > memory:
        notes.append(
            f"warning: data.max_length={data.max_length} with training.per_device_train_batch_size={batch}: the logits "
            f"of a micro-batch and their gradient take {size(needed)}; memory is {size(memory)}. Lower one of them."
        )
    return notes


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
