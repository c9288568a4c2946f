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
    """Move an unsharded model to its device, and check there that packed documents stay apart.

    The check is only for an attention that needs a GPU (`needs_device`); `prepare` has checked
    others on the CPU. A model to be sharded stays where it is.

    Raises:
        ConfigError: The attention mixes documents, or cannot be checked because the model is to be
            sharded.
    """
    # None: nothing to check here.
    key = config.task.document_masking_key if needs_device(model) else None
    if not isinstance(config.distributed, FsdpConfig):
        model.to(device)
        if key is not None:
            _refuse_mixed_documents(model, key, config)
    elif key is not None:
        raise ConfigError(
            f"model.attn_implementation={config.model.attn_implementation}: with distributed=fsdp"
            f" optrun cannot check whether it keeps the documents of {key} apart. Choose sdpa, or"
            " distributed=ddp."
        )


def check_sharded_model(model: PreTrainedModel, config: RunConfig) -> None:
    """Check a sharded model: it may see neither the tokens to predict nor other documents.

    Both are tried by forward passes, in which every rank takes part. A model that is not sharded
    has been checked before, by `build_model`, `prepare` or `move_to_device`.

    Raises:
        ConfigError: A forward pass shows that the model sees such tokens.
    """
    if config.task.AUTO_CLASS == CAUSAL:
        refuse_noncausal_model(config.model, model)
    key = config.task.document_masking_key
    if key is not None:
        _refuse_mixed_documents(model, key, config)


def _refuse_mixed_documents(model: PreTrainedModel, key: str, config: RunConfig) -> None:
    """Refuse a model that mixes packed documents in the precision of the run.

    Raises:
        ConfigError: The message names the key, see `document_masking_key`.
    """
    precision = Precision(model.device, config.training.precision.value)
    refuse_mixed_documents(model, key, precision.autocast())
