"""What a model says next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    tokens: int,
    *,
    ends: Sequence[int] = (),
    seed: int | None = None,
) -> str:
    """Continue a prompt; the model's mode and the random state are left as they were.

    Args:
        model: In any mode.
        tokenizer: Its tokenizer.
        ids: Of the prompt; of one that fills the model's positions only the end is read.
        tokens: How many at most.
        ends: Tokens that end it; empty: those of the model.
        seed: Of the sampling; None: the most probable token each time.

    Returns:
        The continuation alone, without its special tokens.
    """
    training = model.training
    device = next(model.parameters()).device
    room = getattr(model.config, "max_position_embeddings", None)
    if tokenizer.pad_token_id is not None:
        padding = tokenizer.pad_token_id
    else:
        padding = tokenizer.eos_token_id
    ids = list(ids) or [padding or 0]
    if room is not None:
        ids = ids[-max(room - 1, 1) :]
        tokens = min(tokens, max(room - len(ids), 1))
    encoded = torch.tensor([ids], device=device)
    how: dict[str, object] = (
        {"do_sample": False}
        if seed is None
        else {"do_sample": True, "temperature": 0.7, "top_k": 50}
    )
    if ends:
        how["eos_token_id"] = list(ends)
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(seed or 0)
            generated = model.generate(  # type: ignore[operator,unused-ignore]
                encoded,
                attention_mask=torch.ones_like(encoded),
                max_new_tokens=tokens,
                pad_token_id=padding,
                **how,
            )
    finally:
        model.train(training)
    return str(tokenizer.decode(generated[0, encoded.shape[1] :], skip_special_tokens=True))
