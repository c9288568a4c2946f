"""Whether a decoder keeps documents of one block apart where their positions begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from optrun.errors import ConfigError
from optrun.model.forward import lean_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NEAR = 1e-4
"""How far logits may differ, in units of their spread: other shapes are summed in another order."""


def expect_apart(model: PreTrainedModel, key: str = "task.document_masking=true") -> None:
    """Refuse a model whose tokens of one document see another one, or know where in a block they stand.

    transformers builds a block-diagonal mask where position ids that begin anew come without an attention mask; not
    every architecture takes part. So it is tried: two short documents in one block, then the second behind another
    first one, then the second alone.

    Args:
        model: In any mode; put back into it. On any device, with real weights.
        key: What asks for it, for messages.

    Raises:
        ConfigError: With the model's class and what it does.
    """
    name, training = type(model).__name__, model.training
    ids = torch.arange(1, 9, device=model.device)[None] % max(2, model.config.get_text_config().vocab_size)
    other = torch.cat([ids[:, :4].flip(1), ids[:, 4:]], dim=1)
    positions = torch.arange(4, device=model.device).repeat(2)[None]
    model.eval()
    try:
        with torch.no_grad(), lean_forward(model):
            first, second = (model(input_ids=some, position_ids=positions).logits[:, 4:] for some in (ids, other))
            alone = model(input_ids=ids[:, 4:], position_ids=positions[:, 4:]).logits
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key}: {name} takes no positions that begin anew with each document: {words}. Leave it false."
        ) from error
    finally:
        model.train(training)
    instead = "Leave it false." if "packing" in key else "Leave it false, or take task.packing=false."
    spread = float(alone.float().std()) or 1.0
    if float((first - second).abs().max()) > _NEAR * spread:
        raise ConfigError(
            f"{key}: tokens of {name} see the documents before their own in a block, whatever their positions. "
            f"{instead}"
        )
    if float((first - alone).abs().max()) > _NEAR * spread:
        raise ConfigError(
            f"{key}: {name} computes something else for a document in a block than for the document alone. {instead}"
        )
