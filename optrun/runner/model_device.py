"""Move a model to its device, and check it there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.run import RunConfig
from optrun.model.attention import needs_device
from optrun.model.build import CAUSAL, refuse_noncausal_model
from optrun.model.documents import refuse_mixed_documents
from optrun.training.step import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def move_to_device(model: PreTrainedModel, config: RunConfig, device: torch.device) -> None:
    """Move an unsharded model to its device; check that attention keeps documents apart.

    Raises:
        ConfigError: It does not, or the check failed.
    """
    keeps = config.task.keeps_apart if needs_device(model) else None  # others were tried on the CPU
    if not isinstance(config.distributed, FsdpConfig):
        model.to(device)
        if keeps is not None:
            refuse_mixed_documents(
                model, keeps, Precision(device, config.training.precision.value).autocast()
            )
    elif keeps is not None:
        raise ConfigError(
            f"model.attn_implementation={config.model.attn_implementation}: with distributed=fsdp"
            f" nobody tries whether {keeps} keeps documents apart by it. Take sdpa, or"
            " distributed=ddp."
        )


def check_sharded_model(model: PreTrainedModel, config: RunConfig) -> None:
    """Check on all ranks that a sharded model sees only the tokens it should.

    Raises:
        ConfigError: The model sees the tokens to predict, or other documents.
    """
    if config.task.AUTO_CLASS == CAUSAL:
        refuse_noncausal_model(config.model, model)
    keeps = config.task.keeps_apart
    if keeps is not None:
        refuse_mixed_documents(
            model, keeps, Precision(model.device, config.training.precision.value).autocast()
        )
