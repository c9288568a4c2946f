"""Let a model continue a prompt."""

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
    """Continue a prompt; the model's mode and torch's random state are put back.

    Args:
        model: In any mode.
        tokenizer: Its tokenizer.
        ids: Ids of the prompt, truncated on the left to the model's positions minus one; empty: one
            padding token.
        tokens: Most new tokens; fewer if the model has no position left.
        ends: Ids of tokens that end the text; empty: those of the model's generation config.
        seed: Seed of the sampling, with temperature 0.7 and top-k 50; None: the most probable token
            each time.

    Returns:
        The continuation without the prompt and without special tokens.
    """
    training = model.training
    device = next(model.parameters()).device
    positions = getattr(model.config, "max_position_embeddings", None)
    if tokenizer.pad_token_id is not None:
        padding = tokenizer.pad_token_id
    else:
        padding = tokenizer.eos_token_id
    ids = list(ids) or [padding or 0]
    if positions is not None:
        ids = ids[-max(positions - 1, 1) :]
        tokens = min(tokens, max(positions - len(ids), 1))
    encoded = torch.tensor([ids], device=device)
    options: dict[str, object] = {"do_sample": seed is not None}
    if seed is not None:
        options |= {"temperature": 0.7, "top_k": 50}
    if ends:
        options["eos_token_id"] = list(ends)
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
                **options,
            )
    finally:
        model.train(training)
    return str(tokenizer.decode(generated[0, encoded.shape[1] :], skip_special_tokens=True))
