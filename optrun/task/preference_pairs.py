"""Pairs of answers as batches, and what a model makes of them: log-probabilities, by answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from optrun.data.examples import Example
from optrun.data.loader import Batch
from optrun.task.base import pad, pad_inputs
from optrun.task.chat_encoder import TARGETS
from optrun.task.evaluation import IGNORED

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

REFERENCE = "reference"
"""Log-probabilities of both answers by the start model."""


@dataclass
class PairOutputs:
    """What a model makes of the answers: `2 * pairs` rows, the chosen before the rejected ones."""

    logps: Tensor
    """Sum over the tokens of each answer, shape (rows,)."""
    nll: Tensor
    """Mean of -log p over all tokens of each row, the prompt's too, shape (rows,)."""
    loss: Tensor | float | None = None
    aux_loss: Tensor | None = None
    """Balances the experts of a model; None: it returns no such loss."""

    def values(self) -> list[Tensor]:
        """List the tensors."""
        losses = [] if self.aux_loss is None else [self.aux_loss]
        return [self.logps, self.nll, *losses]


@dataclass(frozen=True)
class PairScores:
    """What a loss is made of; each of shape (pairs,).

    Attributes:
        chosen: w; without a reference the mean log-probability of a token of the chosen answer.
        rejected: l, likewise.
        chosen_tokens: Tokens of the chosen answer.
        rejected_tokens: Likewise.
        nll: Mean over tokens of -log pi of the prompt with the chosen answer.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    nll: Tensor

    @property
    def mean_difference(self) -> Tensor:
        """Difference of the log-ratios by token."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


def pair_batch(examples: list[Example], padding: int) -> Batch:
    """Pad pairs to `input_ids`, `attention_mask` and `labels`, chosen rows first.

    Their shape is (2 * pairs, longest). Labels stand on the answers, which begin where the tokens
    of the prompt and those of one of the two wholes diverge.
    """
    rows = [example[name] for name in ("input_ids", "rejected_ids") for example in examples]
    begins = [
        min(int(example_pair[TARGETS].argmax()), int(example_pair["rejected_targets"].argmax()))
        for example_pair in examples
    ] * 2
    labels = [
        np.where(np.arange(len(row)) < begin, IGNORED, row)
        for row, begin in zip(rows, begins, strict=True)
    ]
    batch = {
        **pad_inputs([{"input_ids": row} for row in rows], padding),
        "labels": pad(labels, IGNORED),
    }
    if REFERENCE in examples[0]:
        batch[REFERENCE] = torch.from_numpy(
            np.stack([example[REFERENCE] for example in examples]).astype(np.float32)
        )
    return batch


def _by_answer(losses: Tensor, counted: Tensor, batch: Batch) -> PairOutputs:
    """Sum losses over the answers, and average them over the counted targets."""
    answers = batch["labels"][:, 1:] != IGNORED
    return PairOutputs(-(losses * answers).sum(1), losses.sum(1) / (counted != IGNORED).sum(1))


def chunked_pair_outputs(
    model: Callable[..., ModelOutput], batch: Batch, *, whole: bool
) -> PairOutputs:
    """Compute the same as `pair_outputs` from losses by target.

    Args:
        model: Called with labels it returns `TargetLosses`.
        batch: Of `pair_batch`.
        whole: Whether `nll` is wanted, over the prompt too; else it is over the answer.
    """
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, IGNORED) if whole else batch["labels"]
    losses: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).losses
    return _by_answer(losses, labels[:, 1:], batch)


def pair_outputs(model: Callable[..., ModelOutput], batch: Batch) -> PairOutputs:
    """Compute the log-probabilities of both answers in one pass.

    Args:
        model: Called with `input_ids` and `attention_mask`; returns `logits`.
        batch: Of `pair_batch`.
    """
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    outputs = model(input_ids=ids, attention_mask=mask)
    logits = outputs.logits[:, :-1]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
    losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)
    by_answer = _by_answer(losses, targets, batch)
    return replace(by_answer, aux_loss=getattr(outputs, "aux_loss", None))


def pair_scores(outputs: PairOutputs, batch: Batch, *, has_reference: bool) -> PairScores:
    """Compute log-ratios and likelihoods for losses and rewards.

    Log-ratios, or without a reference means over tokens.
    """
    tokens = (batch["labels"] != IGNORED).sum(1)
    if has_reference:
        scores = outputs.logps - batch[REFERENCE].T.flatten()
    else:
        scores = outputs.logps / tokens
    chosen, rejected = scores.chunk(2)
    first, second = tokens.chunk(2)
    return PairScores(chosen, rejected, first, second, outputs.nll.chunk(2)[0])
