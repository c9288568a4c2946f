"""Masked-token prediction (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import MaskedLmConfig
from optrun.data.examples import Example
from optrun.data.source import Source
from optrun.errors import ConfigError
from optrun.task.base import IGNORED, TOKEN_METRICS, Batch, MetricAccumulator, ModelNeeds, Task, TokenMetrics, pad
from optrun.task.language_model import language_examples


class MaskedLm(Task):
    """Chosen tokens from all the others.

    Which tokens are chosen is a function of seed, epoch and example: new masks in each epoch, the same ones at each
    evaluation.

    Raises:
        ConfigError: No text, or a tokenizer without a mask token.
    """

    name = "masked_lm"
    auto_class = "AutoModelForMaskedLM"

    def __init__(self, config: MaskedLmConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int) -> None:
        super().__init__()
        if tokenizer.mask_token_id is None:
            raise ConfigError(
                "task=masked_lm: the tokenizer has no mask token. Choose a model made for it, such as bert."
            )
        self.mask = int(tokenizer.mask_token_id)
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), self.special)
        self.probability = config.mlm_probability
        self.max_length = data.max_length
        self.limits = [f"data.max_length={data.max_length}"]
        self.train, self.eval = language_examples(
            source, data, tokenizer, task=self.name, packing=config.packing, separator=None, seed=seed
        )

    def needs(self) -> ModelNeeds:
        """A model with a masked-language-model head."""
        return ModelNeeds(max_length=self.max_length)

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:
        """Choose tokens; of the chosen 80 % become the mask, 10 % any ordinary token, 10 % stay.

        At least one token is chosen where there is one that may be, so that no example is without a target.
        """
        ids = example["input_ids"].copy()
        labels = np.full_like(ids, IGNORED)
        free = np.flatnonzero(~np.isin(ids, self.special))
        if len(free):
            chosen = free[randomness.random(len(free)) < self.probability]
            if len(chosen) == 0:
                chosen = free[[randomness.integers(len(free))]]
            labels[chosen] = ids[chosen]
            fate = randomness.random(len(chosen))
            ids[chosen[fate < 0.8]] = self.mask
            other = chosen[(fate >= 0.8) & (fate < 0.9)]
            ids[other] = self.ordinary[randomness.integers(len(self.ordinary), size=len(other))]
        return {"input_ids": ids, "labels": labels}

    def collate(self, examples: list[Example]) -> Batch:
        """`input_ids`, `labels` and `attention_mask` of shape (batch, longest)."""
        rows = [example["input_ids"] for example in examples]
        return {
            "input_ids": pad(rows, self.padding),
            "labels": pad((example["labels"] for example in examples), IGNORED),
            "attention_mask": pad((np.ones_like(row) for row in rows), 0),
        }

    def weight(self, batch: Batch) -> int:
        """Chosen tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def metric_names(self) -> list[str]:
        """Over target tokens."""
        return TOKEN_METRICS

    def evaluation(self) -> MetricAccumulator:
        """Loss, perplexity and accuracy over chosen tokens."""
        return TokenMetrics(shift=False)
