"""Check that a decoder keeps the documents of a block apart by their positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.model.attention import KEY, attention_of, needs_one_row_batch
from optrun.model.forward import evaluation_mode, without_cache_and_padding_check

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-4
"""Largest difference of equal logits, in units of their standard deviation: with other shapes,
kernels sum in another order."""
_TOLERANCE_IN_16_BITS = 3e-2


def refuse_mixed_documents(
    model: PreTrainedModel,
    key: str = "task.document_masking=true",
    autocast: AbstractContextManager[object] | None = None,
) -> None:
    """Refuse a model if its tokens see other documents of their block.

    transformers builds a block-diagonal mask if position ids that start again come without an
    attention mask, but not for every architecture. So it is tried with a block of two short
    documents: the logits of the second one must not change with the first document, nor if it is
    alone. A batch has two rows, or one if the attention needs that.

    Args:
        model: On a device where its attention runs, with real weights. Its mode is restored.
        key: The option that asks for separate documents, for messages.
        autocast: The context of the training's precision; None: that of the weights.

    Raises:
        ConfigError: With the model's class and what it does.
    """
    # 1. Blocks of two documents with four tokens each, at the positions 0, 1, 2, 3, 0, 1, 2, 3; the
    #    same blocks with another first document.
    rows = 1 if needs_one_row_batch(model) else 2
    vocabulary = max(2, model.config.get_text_config().vocab_size)
    ids = torch.arange(1, 9, device=model.device).repeat(rows, 1) % vocabulary
    changed_ids = torch.cat([ids[:, :4].flip(1), ids[:, 4:]], dim=1)
    positions = torch.arange(4, device=model.device).repeat(rows, 2)
    # 2. Logits of the second document: in the block, behind the other one, and alone.
    try:
        with (
            evaluation_mode(model),
            without_cache_and_padding_check(model),
            autocast or nullcontext(),
        ):
            in_block = model(input_ids=ids, position_ids=positions).logits[:, 4:]
            behind_other = model(input_ids=changed_ids, position_ids=positions).logits[:, 4:]
            alone = model(input_ids=ids[:, 4:], position_ids=positions[:, 4:]).logits
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{key}: {type(model).__name__} takes no positions that start again with each document:"
            f" {message_in_one_line(error)}. Leave it false."
        ) from error
    # 3. Compare them. The first two are computed with the same shapes, so that they may differ less
    #    than a document in a block and alone.
    instead = "Leave it false."
    if "packing" not in key:
        instead = "Leave it false, or take task.packing=false."
    name = f"{type(model).__name__} with {KEY}={attention_of(model)}"
    is_exact = in_block.dtype in (torch.float32, torch.float64)
    in_block = in_block.double()
    deviation = float(alone.double().std()) or 1.0
    if float((in_block - behind_other.double()).abs().max()) > _TOLERANCE * deviation:
        raise ConfigError(
            f"{key}: tokens of {name} see the documents before their own in a block, whatever their"
            f" positions. {instead}"
        )
    near = _TOLERANCE if is_exact else _TOLERANCE_IN_16_BITS
    if float((in_block - alone.double()).abs().max()) > near * deviation:
        raise ConfigError(
            f"{key}: {name} computes other logits for a document in a block than for the document"
            f" alone. {instead}"
        )
