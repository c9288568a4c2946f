"""What a model says next, without chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], tokens: int, *, ends: Sequence[int]
) -> str:
    """Continue a prompt by its most probable token each time; the model's mode is left as it was.

    Args:
        model: In any mode.
        tokenizer: Its tokenizer.
        ids: Of the prompt; of one that fills the model's positions only the end is read.
        tokens: How many at most.
        ends: Tokens that end it.

    Returns:
        The continuation alone, without its special tokens.
    """
    training, device = model.training, next(model.parameters()).device
    room = getattr(model.config, "max_position_embeddings", None)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = list(ids) or [padding or 0]
    if room is not None:
        ids = ids[-max(room - 1, 1) :]
        tokens = min(tokens, max(room - len(ids), 1))
    encoded = torch.tensor([ids], device=device)
    model.eval()
    try:
        with torch.no_grad():
            made = model.generate(  # type: ignore[operator,unused-ignore]
                encoded,
                attention_mask=torch.ones_like(encoded),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=padding,
                eos_token_id=list(ends) or None,
            )
    finally:
        model.train(training)
    return str(tokenizer.decode(made[0, encoded.shape[1] :], skip_special_tokens=True))
