"""Whether a decoder keeps documents of one block apart where their positions begin anew."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from optrun.base.errors import ConfigError
from optrun.model.attention import KEY, attention_of, needs_one_row_batch
from optrun.model.forward import without_cache_and_padding_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NEAR = 1e-4
"""How far logits may differ, in units of their spread: other shapes are summed in another order."""
_NEAR_IN_16_BITS = 3e-2


def refuse_mixed_documents(
    model: PreTrainedModel,
    key: str = "task.document_masking=true",
    autocast: AbstractContextManager[object] | None = None,
) -> None:
    """Refuse a model that mixes the documents of a block.

    transformers builds a block-diagonal mask where position ids that begin anew come without an
    attention mask; not every architecture takes part. So it is tried: two short documents in one
    block, then the second behind another first one, then the second alone; in a batch of two rows,
    unless a batch has to be one.

    Args:
        model: In any mode; put back into it. On a device where its attention runs, with real
            weights.
        key: What asks for it, for messages.
        autocast: The precision it trains in; None: that of its weights.

    Raises:
        ConfigError: With the model's class and what it does.
    """
    name = type(model).__name__
    training = model.training
    rows = 1 if needs_one_row_batch(model) else 2
    ids = torch.arange(1, 9, device=model.device).repeat(rows, 1) % max(
        2, model.config.get_text_config().vocab_size
    )
    changed_ids = torch.cat([ids[:, :4].flip(1), ids[:, 4:]], dim=1)
    positions = torch.arange(4, device=model.device).repeat(rows, 2)
    model.eval()
    try:
        with torch.no_grad(), without_cache_and_padding_check(model), autocast or nullcontext():
            first, second = (
                model(input_ids=block_ids, position_ids=positions).logits[:, 4:]
                for block_ids in (ids, changed_ids)
            )
            single = model(input_ids=ids[:, 4:], position_ids=positions[:, 4:]).logits
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key}: {name} takes no positions that begin anew with each document: {message}. Leave"
            " it false."
        ) from error
    finally:
        model.train(training)
    if "packing" in key:
        instead = "Leave it false."
    else:
        instead = "Leave it false, or take task.packing=false."
    name = f"{name} with {KEY}={attention_of(model)}"
    near = _NEAR if first.dtype in (torch.float32, torch.float64) else _NEAR_IN_16_BITS
    first = first.double()
    second = second.double()
    single = single.double()
    spread = float(single.std()) or 1.0
    if float((first - second).abs().max()) > _NEAR * spread:
        raise ConfigError(
            f"{key}: tokens of {name} see the documents before their own in a block, whatever their"
            f" positions. {instead}"
        )
    if float((first - single).abs().max()) > near * spread:
        raise ConfigError(
            f"{key}: {name} computes something else for a document in a block than for the document"
            f" alone. {instead}"
        )
