"""Next-token prediction."""

from __future__ import annotations

from typing import Any

import torch

from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import CausalLmConfig
from optrun.data.examples import Example
from optrun.data.source import Source
from optrun.errors import ConfigError
from optrun.task.base import (
    IGNORED,
    TOKEN_METRICS,
    Batch,
    MetricAccumulator,
    ModelNeeds,
    Task,
    TextKind,
    TokenMetrics,
    pad,
)
from optrun.task.language_model import language_examples, opening


class CausalLm(Task):
    """Each token from the ones before it.

    Args:
        config: The task choice.
        data: Lengths and limits.
        source: Rows.
        tokenizer: Of the model.
        seed: Picks examples where they are limited.

    Raises:
        ConfigError: No text, or a tokenizer without an end-of-text token.
    """

    name = "causal_lm"
    auto_class = "AutoModelForCausalLM"
    text_kind = TextKind.STREAM

    def __init__(self, config: CausalLmConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int) -> None:
        super().__init__()
        separator = tokenizer.eos_token_id
        if separator is None:
            separator = tokenizer.sep_token_id
        if separator is None:
            raise ConfigError("task=causal_lm: the tokenizer has no end-of-text token to put between documents.")
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else separator
        self.max_length = data.max_length
        self.limits = [f"data.max_length={data.max_length}"]
        self.train, self.eval = language_examples(
            source, data, tokenizer, task=self.name, packing=config.packing, separator=separator, seed=seed
        )
        self.prompt = config.prompt if config.prompt is not None else source.prompt
        self.sample_tokens = config.sample_tokens

    def needs(self) -> ModelNeeds:
        """A model with a language-model head that looks back alone."""
        return ModelNeeds(max_length=self.max_length)

    def collate(self, examples: list[Example]) -> Batch:
        """`input_ids` and `labels` of shape (batch, longest); `attention_mask` only where something is padded."""
        rows = [example["input_ids"] for example in examples]
        batch = {"input_ids": pad(rows, self.padding), "labels": pad(rows, IGNORED)}
        if len({len(row) for row in rows}) > 1:
            batch["attention_mask"] = (batch["labels"] != IGNORED).long()
        return batch

    def weight(self, batch: Batch) -> int:
        """Tokens with a token before them."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def metric_names(self) -> list[str]:
        """Over target tokens."""
        return TOKEN_METRICS

    def evaluation(self) -> MetricAccumulator:
        """Loss, perplexity, accuracy."""
        return TokenMetrics(shift=True)


def continue_text(model: Any, tokenizer: Any, prompt: str, tokens: int, *, seed: int) -> str:
    """Sample a continuation; the random state is left as it was.

    Args:
        model: In any mode; left in evaluation mode.
        tokenizer: Its tokenizer.
        prompt: What to continue; of one that fills the model's positions only the end is.
        tokens: How many tokens at most.
        seed: Of the sampling.

    Returns:
        The continuation alone.
    """
    model.eval()
    device = next(model.parameters()).device
    ids = opening(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None:
        ids = ids[-max(room - 1, 1) :]
        tokens = min(tokens, max(room - len(ids), 1))
    encoded = torch.tensor([ids], device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        made = model.generate(
            encoded,
            attention_mask=torch.ones_like(encoded),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            top_k=50,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    text: str = tokenizer.decode(made[0, encoded.shape[1] :], skip_special_tokens=True)
    return text
