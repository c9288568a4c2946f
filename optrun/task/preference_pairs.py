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
    """Log-probabilities of answers: `2 * pairs` rows, the chosen before the rejected ones."""

    logps: Tensor
    """Log-probability of each answer, summed over its tokens; shape (rows,)."""
    nll: Tensor
    """Mean negative log-likelihood over the tokens of each row, the prompt included; shape (rows,).
    """
    loss: Tensor | float | None = None
    aux_loss: Tensor | None = None
    """Load-balancing loss of a mixture of experts; None: the model returns none."""

    def values(self) -> list[Tensor]:
        """List the tensors, as the outputs of a model do; `loss` is left out."""
        losses = [] if self.aux_loss is None else [self.aux_loss]
        return [self.logps, self.nll, *losses]


@dataclass(frozen=True)
class PairScores:
    """What a loss is made of; each of shape (pairs,).

    Attributes:
        chosen: Log-ratio of the chosen answer; without a reference model the mean log-probability
            of its tokens.
        rejected: The same of the rejected answer.
        mean_difference: Difference of both, each divided by the tokens of its answer.
        nll: Mean negative log-likelihood of the tokens of the prompt with the chosen answer.
    """

    chosen: Tensor
    rejected: Tensor
    mean_difference: Tensor
    nll: Tensor


def pair_batch(examples: list[Example], padding: int) -> Batch:
    """Pad pairs to `input_ids`, `attention_mask` and `labels`, all chosen rows first.

    Their shape is (2 * pairs, longest). The labels of both rows of a pair begin at the same
    position: that of the first target in either. With reference log-probabilities also
    `reference`, shape (pairs, 2), float32.

    Example: a pair with the answers [1, 2, 7] with targets [0, 0, 1] and [1, 2, 8, 9] with
    [0, 0, 1, 1] gives, with padding 0,

        input_ids  1 2 7 0          labels  -100 -100 7 -100
                   1 2 8 9                  -100 -100 8    9
    """
    # 1. The rows.
    rows = [example["input_ids"] for example in examples]
    rows += [example["rejected_ids"] for example in examples]

    # 2. Their labels: the ids from the first target of the pair on.
    begins = []
    for example in examples:
        chosen_begin = int(example[TARGETS].argmax())
        rejected_begin = int(example["rejected_targets"].argmax())
        begins.append(min(chosen_begin, rejected_begin))
    labels = []
    for row, begin in zip(rows, begins * 2, strict=True):
        labels.append(np.where(np.arange(len(row)) < begin, IGNORED, row))

    # 3. Pad them.
    inputs = pad_inputs([{"input_ids": row} for row in rows], padding)
    batch = {**inputs, "labels": pad(labels, IGNORED)}
    if REFERENCE in examples[0]:
        logps = np.stack([example[REFERENCE] for example in examples])
        batch[REFERENCE] = torch.from_numpy(logps.astype(np.float32))
    return batch


def _by_answer(token_losses: Tensor, targets: Tensor, batch: Batch) -> PairOutputs:
    """Sum the losses of tokens over each answer, and average them over all targets of a row.

    Args:
        token_losses: Negative log-probability of each token, 0 without a target; shape
            (rows, longest - 1).
        targets: The ids of these tokens, `IGNORED` without a target; same shape.
        batch: Its labels say which tokens are those of the answers.
    """
    is_of_answer = batch["labels"][:, 1:] != IGNORED
    logps = -(token_losses * is_of_answer).sum(1)
    nll = token_losses.sum(1) / (targets != IGNORED).sum(1)
    return PairOutputs(logps, nll)


def chunked_pair_outputs(
    model: Callable[..., ModelOutput], batch: Batch, *, nll_of_prompt: bool
) -> PairOutputs:
    """Compute `pair_outputs` without the logits of all tokens, for `training.chunked_loss`.

    Args:
        model: Returns `TargetLosses` if it is called with labels.
        batch: As `pair_batch` returns it.
        nll_of_prompt: Whether `nll` includes the tokens of the prompt, as ORPO needs; if not, the
            logits of the answers alone are computed.
    """
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, IGNORED) if nll_of_prompt else batch["labels"]
    token_losses: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).losses
    return _by_answer(token_losses, labels[:, 1:], batch)


def pair_outputs(model: Callable[..., ModelOutput], batch: Batch) -> PairOutputs:
    """Compute the log-probabilities of all answers in one forward pass, in float32 at least.

    Args:
        model: Called with `input_ids` and `attention_mask`; returns `logits`.
        batch: As `pair_batch` returns it.
    """
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    outputs = model(input_ids=ids, attention_mask=mask)
    logits = outputs.logits[:, :-1]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)  # prompts, too, for `nll`
    flat_losses = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    by_answer = _by_answer(flat_losses.view(targets.shape), targets, batch)
    return replace(by_answer, aux_loss=getattr(outputs, "aux_loss", None))


def pair_scores(outputs: PairOutputs, batch: Batch, *, has_reference: bool) -> PairScores:
    """Compute the scores of both answers, from which losses and rewards follow.

    Args:
        outputs: Log-probabilities by the trained model.
        batch: Has the labels, and with a reference model its log-probabilities.
        has_reference: Whether the scores are log-ratios to the reference model; else they are mean
            log-probabilities of tokens.
    """
    # 1. The score of each row: all chosen answers, then all rejected ones. The reference, of shape
    # (pairs, 2), is brought into that order.
    answer_tokens = (batch["labels"] != IGNORED).sum(1)
    if has_reference:
        scores = outputs.logps - batch[REFERENCE].T.flatten()
    else:
        scores = outputs.logps / answer_tokens

    # 2. By pair.
    chosen, rejected = scores.chunk(2)
    chosen_mean, rejected_mean = (scores / answer_tokens).chunk(2)
    nll_of_chosen, _ = outputs.nll.chunk(2)
    return PairScores(chosen, rejected, chosen_mean - rejected_mean, nll_of_chosen)
