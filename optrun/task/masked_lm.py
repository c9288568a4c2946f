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
    """Prediction of masked tokens.

    Which tokens are masked depends on seed, epoch and example: masks are new in each epoch, and the
    same at each evaluation.

    Raises:
        ConfigError: No text, or a tokenizer without a mask token.
    """

    chunks_loss = True

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Set `mask`, the mask id; `special` and `ordinary` ids; and the `probability` of masking.

        Raises:
            ConfigError: The tokenizer has no mask token.
        """
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
        """Choose tokens to predict: 80 % become the mask, 10 % a random token, 10 % stay.

        A token that is not special is chosen with probability `task.mlm_probability`. If none is,
        one random token is chosen, unless all are special. `labels` has the ids of the chosen
        tokens, and `IGNORED` elsewhere.
        """
        ids = example["input_ids"].copy()
        labels = np.full_like(ids, IGNORED)
        candidates = np.flatnonzero(~np.isin(ids, self.special))  # positions
        if len(candidates):
            # 1. Choose positions.
            is_chosen = randomness.random(len(candidates)) < self.probability
            chosen = candidates[is_chosen]
            if len(chosen) == 0:
                chosen = candidates[[randomness.integers(len(candidates))]]
            labels[chosen] = ids[chosen]

            # 2. Mask 80 % of them, and put random tokens that are not special at 10 %; 10 % stay.
            draw = randomness.random(len(chosen))
            ids[chosen[draw < 0.8]] = self.mask
            replaced = chosen[(draw >= 0.8) & (draw < 0.9)]
            indices = randomness.integers(len(self.ordinary), size=len(replaced))
            ids[replaced] = self.ordinary[indices]
        return {"input_ids": ids, "labels": labels}
