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
    """Generate the continuation of a prompt.

    The model's mode and torch's random state are restored.

    Args:
        model: In any mode.
        tokenizer: Its tokenizer.
        ids: Ids of the prompt, truncated on the left to the model's positions minus one; empty: one
            padding token.
        tokens: The largest number of new tokens; fewer if the model has no position left.
        ends: Ids of tokens that end the text; empty: those of the model's generation config.
        seed: Seed of the sampling, with temperature 0.7 and top-k 50; None: the most probable token
            each time.

    Returns:
        The continuation without the prompt and without special tokens.
    """
    # 1. Fit the prompt and the new tokens into the model's positions.
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id  # which may be None, too
    prompt = list(ids) or [padding or 0]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None:
        prompt = prompt[-max(positions - 1, 1) :]
        tokens = min(tokens, max(positions - len(prompt), 1))

    # 2. Choose how tokens are picked, and where the text ends.
    options: dict[str, object] = {"do_sample": seed is not None}
    if seed is not None:
        options |= {"temperature": 0.7, "top_k": 50}
    if ends:
        options["eos_token_id"] = list(ends)

    # 3. Generate, in evaluation mode.
    device = next(model.parameters()).device
    input_ids = torch.tensor([prompt], device=device)
    was_training = model.training
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(seed or 0)
            generated = model.generate(  # type: ignore[operator,unused-ignore]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=tokens,
                pad_token_id=padding,
                **options,
            )
    finally:
        model.train(was_training)
    return str(tokenizer.decode(generated[0, len(prompt) :], skip_special_tokens=True))
