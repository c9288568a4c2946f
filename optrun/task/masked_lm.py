"""Masked-token prediction (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.examples import Example
from optrun.data.source import Source
from optrun.task.evaluation import IGNORED
from optrun.task.language_model import LanguageModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class MaskedLm(LanguageModel):
    """Chosen tokens from all the others.

    Which tokens are chosen is a function of seed, epoch and example: new masks in each epoch, the
    same ones at each evaluation.

    Raises:
        ConfigError: No text, or a tokenizer without a mask token.
    """

    chunks_loss = True

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Set the mask id, the special ids, and the ids that may replace a chosen token."""
        if tokenizer.mask_token_id is None:
            raise ConfigError(
                "task=masked_lm: the tokenizer has no mask token. Choose a model made for it, such"
                " as bert."
            )
        self.mask = int(tokenizer.mask_token_id)
        self.special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        self.ordinary = np.setdiff1d(np.arange(len(tokenizer)), self.special)
        self.probability = self.config.mlm_probability

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:
        """Choose tokens; of the chosen 80 % become the mask, 10 % any ordinary token, 10 % stay.

        At least one token is chosen where there is one that may be, so that no example is without a
        target.
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
            replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
            ids[replaced] = self.ordinary[
                randomness.integers(len(self.ordinary), size=len(replaced))
            ]
        return {"input_ids": ids, "labels": labels}
