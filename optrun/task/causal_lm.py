"""Next-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.data.examples import Example, limited
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.data.token_blocks import TokenBlocks
from optrun.task.base import TextKind, join_to_one_row, pad, pad_inputs
from optrun.task.evaluation import IGNORED
from optrun.task.generation import continue_prompt
from optrun.task.language_model import LanguageModel
from optrun.task.tokens import largest_id_plus_one, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_SAMPLED_BLOCKS = 1000
"""Blocks of token files in which the end of a document is searched, evenly spread."""


class CausalLm(LanguageModel):
    """Next-token prediction on texts or token files.

    Raises:
        ConfigError: No text, or a tokenizer without an end-of-text token.
    """

    shift = True
    chunks_loss = True
    text_kind = TextKind.STREAM
    predictor = "optrun.runner.predictors:TextGeneration"

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set `document_end_id`, `padding`, and `prompt`, the start of sampled texts.

        The end of a document is the tokenizer's end-of-text token, else its separator; it also pads
        if there is no padding token. The prompt is `task.prompt`, else the one that comes with the
        data.

        Raises:
            ConfigError: The tokenizer has neither an end-of-text nor a separator token.
        """
        end_id = tokenizer.eos_token_id
        if end_id is None:
            end_id = tokenizer.sep_token_id
        if end_id is None:
            raise ConfigError(
                "task=causal_lm: the tokenizer has no end-of-text token to put between documents."
            )
        self.document_end_id = end_id
        if tokenizer.pad_token_id is None:
            self.padding = end_id
        self.prompt = self.config.prompt if self.config.prompt is not None else source.prompt

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read blocks of token files as examples; read texts as `LanguageModel.read` does.

        A note warns if `task.document_masking` finds no end of a document in about 1,000 blocks.

        Args:
            source: Used for texts only.
            split: The split to read.
            tokenizer: Encodes texts; ids of token files must not be above its largest id.
            limit: The largest number of examples; None: no limit.
            seed: Draws the examples if they are limited; None: the same draw in every run.

        Raises:
            ConfigError: As `LanguageModel.read`; or a token file has ids beyond the tokenizer's.
        """
        rows: object = split.rows
        if not isinstance(rows, TokenBlocks):
            return super().read(source, split, tokenizer, limit, seed)
        rows.expect_ids_below(largest_id_plus_one(tokenizer), split.key)  # else ConfigError
        if self.config.document_masking:
            self._warn_without_documents(rows, split.key)
        return limited(rows, limit, seed=seed)

    def _warn_without_documents(self, blocks: TokenBlocks, key: str) -> None:
        """Warn if about 1,000 blocks, spread over all, have no end of a document."""
        sampled = range(0, len(blocks), max(1, len(blocks) // _SAMPLED_BLOCKS))
        for index in sampled:
            if self.document_end_id in blocks[index]["input_ids"]:
                return
        self.notes.append(
            f"warning: {key}: task.document_masking finds no documents to keep apart:"
            f" none of {len(sampled):,} blocks holds the id {self.document_end_id}, the"
            " tokenizer's end of a document"
        )

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to `input_ids` and `labels`, shape (batch, longest).

        `attention_mask` is added only if something is padded. With `task.document_masking` there
        are `position_ids` instead, which start at 0 in each document: models of transformers
        separate documents by them. Padding and the first token of a document then have no label.
        """
        rows = [example["input_ids"] for example in examples]
        if self.config.document_masking:
            return self._collate_documents(rows)
        has_equal_lengths = len({len(row) for row in rows}) == 1
        if has_equal_lengths:  # full blocks: nothing to pad
            ids = torch.from_numpy(np.stack(rows).astype(np.int64, copy=False))
            return {"input_ids": ids, "labels": ids.clone()}
        return {**pad_inputs(examples, self.padding), "labels": pad(rows, IGNORED)}

    def _collate_documents(self, rows: list[np.ndarray]) -> Batch:
        """Pad blocks, with positions from 0 in each document; see `collate`.

        With `one_row` the blocks are joined to one row, shape (1, tokens).

        Example: with 9 as the end of a document and 0 as padding, the blocks [5, 9, 6, 7] and
        [8, 9, 4] give

            input_ids     5  9    6  7        8  9    4     0
            begins        -  -    x  -        -  -    x     x
            labels        5  9 -100  7        8  9 -100  -100
            position_ids  0  1    0  1        0  1    0     0
        """
        ids = pad(rows, self.padding)
        labels = pad(rows, IGNORED)

        # 1. A document begins behind the end of another one. Each padding token begins one, too, so
        # that no token attends to it. (A block may begin inside of a document: no begin there.)
        begins = torch.zeros_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, :-1] == self.document_end_id
        for number, row in enumerate(rows):
            begins[number, len(row) :] = True

        # 2. The first token of a document is not predicted from the document before it.
        labels[begins] = IGNORED

        # 3. A position is the distance to the latest begin; cummax carries its column on.
        columns = torch.arange(ids.shape[1]).expand_as(ids)
        latest_begin = torch.where(begins, columns, 0).cummax(1)[0]
        batch = {"input_ids": ids, "labels": labels, "position_ids": columns - latest_begin}

        # 4. Join the blocks, if the model's attention takes one row.
        if not self.one_row:
            return batch
        # In one row the first token would be predicted from the end of the block before.
        labels[:, 0] = IGNORED
        return join_to_one_row(batch, map(len, rows))

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of a batch without padding, and its blocks.

        If documents are kept apart in one row, the number of blocks is computed from the tokens:
        all blocks are full but the last one of the data.
        """
        tokens, blocks = super().count_tokens_and_examples(batch)
        if self.one_row and "position_ids" in batch:
            blocks = -(-tokens // self.max_length)  # rounded up
        return tokens, blocks

    def sample(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int
    ) -> tuple[str, str] | None:
        """Sample a continuation of the prompt.

        None if there is no prompt, or with `task.sample_tokens=0`.
        """
        if not self.prompt or not self.config.sample_tokens:
            return None
        (ids,) = prompt_ids(tokenizer, [self.prompt])
        return self.prompt, continue_prompt(
            model, tokenizer, ids, self.config.sample_tokens, seed=seed
        )
