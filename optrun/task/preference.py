"""Preference optimization: DPO and related losses on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.data.chat import Chat, Plain
from optrun.data.examples import Example, Examples, Joined, chosen
from optrun.data.loader import Batch, ExampleSource
from optrun.data.mixture import MixedExamples
from optrun.data.preferences import (
    CHOSEN,
    REJECTED,
    Pair,
    PairColumns,
    pair_columns,
    preference_texts,
    preferences,
)
from optrun.data.progress import progress
from optrun.data.source import Source, Split
from optrun.task.chat_encoder import TARGETS
from optrun.task.chat_task import ChatTask, marked_text
from optrun.task.dropout import disable_dropout
from optrun.task.evaluation import MetricAccumulator, SummedMetrics
from optrun.task.preference_losses import pair_losses
from optrun.task.preference_pairs import (
    REFERENCE,
    PairOutputs,
    PairScores,
    chunked_pair_outputs,
    pair_batch,
    pair_outputs,
    pair_scores,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MEASURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""Metrics of pairs, by TRL's names."""


class Pairs(Joined):
    """Pairs of a chosen and a rejected answer, each with its prompt, as examples.

    Attributes:
        reference: Log-probabilities of both answers by the reference model, shape (pairs, 2); None:
            not needed, or not computed yet. Not part of the fingerprint: they follow from the pairs
            and that model.
    """

    reference: np.ndarray | None = None

    def __getitem__(self, index: int) -> Example:
        """Return the ids and targets of both answers, and their reference log-probabilities."""
        chosen = self.first[index]
        rejected = self.second[index]
        pair = {
            **chosen,
            "rejected_ids": rejected["input_ids"],
            "rejected_targets": rejected[TARGETS],
        }
        if self.reference is not None:
            pair[REFERENCE] = self.reference[index]
        return pair


class Preference(ChatTask):
    """Preference optimization by the losses of TRL's `DPOTrainer`, of ORPO and of SimPO.

    Tokens are TRL's, too: both answers of a pair begin at the first token in which one of the two
    texts differs from the prompt with the opening of an answer; a text longer than
    `data.max_length` loses its end.

    Raises:
        ConfigError: No pairs, pairs that cannot be read, a template that fails, or a split in which
            both answers of every pair are equal.
    """

    columns = ("text_column",)
    unit = "examples"
    predictor = "optrun.runner.predictors:ChatAnswers"
    chunks_loss = True
    measured = MEASURES

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield all texts of the training rows: prompts and both answers."""
        return preference_texts(source)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference model, the model before training."""
        return bool(self.config.loss_type.has_reference)

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the columns and the chat template.

        Sets `columns_of` by the key of the split, and `template`, None if all rows are plain texts.
        May change the tokenizer's template and end of text, with notes.

        Raises:
            ConfigError: No columns of pairs, or chats without a template.
        """
        self.use_template(tokenizer)
        self.limits = self.limits * 2  # chosen and rejected answers have the same limit
        self.columns_of: dict[str, PairColumns] = {}
        # 1. The columns of each split; its first row shows whether it has chats. Then there must be
        # a template, chatml if need be.
        has_chats = False
        for split in source.splits:
            self.columns_of[split.key] = pair_columns(source, split)
            first = next(self.rows(split), None) if len(split.rows) else None
            if first is not None and isinstance(first[0], Chat):
                has_chats = True
                self.require_template(split, tokenizer)

        # 2. The template, and the token that ends an answer in it.
        if not has_chats:
            self.template = None  # a tokenizer's template that no row needs is not rendered
        self.set_end_of_answers(tokenizer)
        self.note_template(tokenizer)

    def rows(self, split: Split) -> Iterator[Pair]:
        """Yield the pairs of a split, checked by `check_rows`."""
        return self.check_rows(split, preferences(split, self.columns_of[split.key], self.roles))

    def read(
        self,
        source: Source,  # noqa: ARG002
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one pair for each row, or for `limit` rows drawn with `seed`.

        A pair is refused or dropped if truncation leaves one of its answers without a token that
        carries loss, see `drop_rows_without_target`. An empty split has no examples. `source` is
        not needed.

        Raises:
            ConfigError: A row that the template cannot write, or no pair with different answers.
        """
        part = split.take(chosen(len(split.rows), limit, seed=seed))
        if not len(part.rows):
            return Examples(np.zeros(1, dtype=np.int64), {})  # none
        columns = str(self.columns_of[part.key])  # part of the cache key

        # 1. Encode each answer with its prompt: one example a row, for each of the two answers.
        def encode_answers(index: int) -> Examples:
            """Encode the chosen answers (index 0) or the rejected ones (1)."""

            def rows() -> Iterator[Chat | Plain]:
                return (pair[index] for pair in self.rows(part))

            return self.encode_rows(part, tokenizer, rows, "preference", columns, str(index))

        both_answers = [encode_answers(0), encode_answers(1)]

        # 2. Refuse pairs without a preference, and pairs of which truncation left nothing; what is
        # dropped is dropped from both.
        self._refuse_equal_answers(both_answers, part)
        chosen_answers, rejected_answers = self.drop_rows_without_target(both_answers, part)
        return Pairs(chosen_answers, rejected_answers)

    def _refuse_equal_answers(self, answers: Sequence[Examples], part: Split) -> None:
        """Refuse a split if the two answers of every pair have the same tokens.

        If only some have, a note says how many.

        Raises:
            ConfigError: All pairs have equal answers.
        """
        chosen_hashes, rejected_hashes = (examples.hashes for examples in answers)
        assert chosen_hashes is not None
        is_same = chosen_hashes == rejected_hashes
        count = len(is_same)
        if is_same.all():
            raise ConfigError(
                f"{part.key}: {CHOSEN} and {REJECTED} are the same in every row, {count:,} of"
                f" {count:,}, so there is no preference to learn. Take rows with equal answers out"
                " of the data, or correct the two columns."
            )
        if is_same.any():
            self.notes.append(
                f"warning: {part.key}: {CHOSEN} and {REJECTED} are the same in"
                f" {int(is_same.sum()):,} of {count:,} rows, first in row"
                f" {part.number(int(is_same.argmax()))}: nothing is learnt from them"
            )

    # Batches
    # ----------------------------------------------------------------------------------------------

    def collate(self, examples: list[Example]) -> Batch:
        """Pad pairs to a batch by `pair_batch`."""
        return pair_batch(examples, self.padding)

    def count(self, batch: Batch) -> int:
        """Count the pairs of a batch."""
        return len(batch["input_ids"]) // 2

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of both answers with their prompts, and the pairs."""
        return int(batch["attention_mask"].sum()), self.count(batch)

    def adapt(self, model: PreTrainedModel) -> None:
        """Disable the model's dropout with `task.disable_dropout`, but not the dropout of LoRA.

        Also let `generate` stop at the end of an answer, see `ChatTask.adapt`.
        """
        super().adapt(model)
        if self.config.disable_dropout:
            disable_dropout(model)  # leaves out the modules of LoRA, which the model has by now

    # Loss
    # ----------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch) -> PairOutputs:
        """Compute the log-probabilities of all answers in one forward pass."""
        if self.chunked:
            return chunked_pair_outputs(
                model, batch, nll_of_prompt=self.config.loss_type.value == "orpo"
            )
        return pair_outputs(model, batch)

    def scores(self, outputs: PairOutputs, batch: Batch) -> PairScores:
        """Compute the scores of both answers, by `pair_scores`."""
        return pair_scores(outputs, batch, has_reference=self.has_reference)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Compute the mean loss of the pairs, plus the load-balancing loss of experts; shape ()."""
        losses, _ = self.loss_by_example(outputs, batch)
        loss = losses.mean()
        if self.router_loss_coef is None or outputs.aux_loss is None:
            return loss
        experts: Tensor = outputs.aux_loss.to(loss.device)
        return loss + self.router_loss_coef * experts

    def loss_by_example(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of each pair, and count it once; shape (pairs,) each."""
        losses = pair_losses(self.config, self.scores(outputs, batch))
        return losses, torch.ones_like(losses, dtype=torch.int64)

    def measure(self, outputs: Any, batch: Batch) -> Tensor:
        """Sum rewards and log-probabilities over the pairs, in the order of `MEASURES`; shape (6,).

        A reward is beta times the log-ratio. Without a reference model it is beta times the mean
        log-probability of a token, which is then also reported as `logps`.
        """
        # 1. Rewards and log-probabilities of the chosen and the rejected answers, shape (pairs,).
        # `scores` are log-ratios to the reference model, or mean log-probabilities of tokens;
        # `outputs.logps` has those of all chosen answers, then those of all rejected ones.
        scores = self.scores(outputs, batch)
        chosen = self.config.beta * scores.chosen.detach()
        rejected = self.config.beta * scores.rejected.detach()
        if self.has_reference:
            logps = outputs.logps.detach().chunk(2)
        else:
            logps = (scores.chosen, scores.rejected)

        # 2. In the order of `MEASURES`: both rewards, accuracy, margin, both log-probabilities.
        is_right = (chosen > rejected).float()
        by_pair = [chosen, rejected, is_right, chosen - rejected, *logps]
        return torch.stack([value.float().sum() for value in by_pair])

    def running_metrics(self) -> MetricAccumulator:
        """Construct the mean loss and the means of `MEASURES` over pairs."""
        return PairMetrics(self)

    # The reference
    # ----------------------------------------------------------------------------------------------

    def reference(
        self,
        model: nn.Module,
        pairs: Pairs,
        batch_size: int,
        to_device: Callable[[Batch], Batch],
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> np.ndarray:
        """Compute the reference model's log-probabilities of both answers of each pair.

        The pairs are sorted by length, the longest first, so that batches have little padding;
        which pairs share a batch depends on the pairs alone.

        Args:
            model: The model before training, in evaluation mode, on its device.
            pairs: The pairs.
            batch_size: Pairs in a batch.
            to_device: Moves a batch to the device.
            autocast: Constructs the context of the forward pass.

        Returns:
            Values rounded to float32, as float64; shape (pairs, 2).

        Raises:
            ConfigError: A log-probability is NaN or infinite.
        """
        reference_logps = np.zeros((len(pairs), 2))
        longest_first = np.argsort(-pairs.lengths, kind="stable")
        with torch.no_grad(), progress("reference log-probabilities", len(pairs)) as bar:
            for begin in range(0, len(pairs), batch_size):
                indices = longest_first[begin : begin + batch_size]
                batch = self.collate([pairs[int(index)] for index in indices])
                with autocast():
                    outputs = self.forward(model, to_device(batch))
                # All chosen answers come before all rejected ones, shape (2 * pairs,): (2, pairs),
                # then transposed.
                reference_logps[indices] = outputs.logps.float().view(2, -1).T.cpu().numpy()
                bar.done(len(indices))
        if not np.isfinite(reference_logps).all():
            raise ConfigError(
                "task=preference: the model before training gives a log-probability that is NaN or"
                " infinite. Check that its weights are complete, or take another model."
            )
        return reference_logps

    def shown(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Decode both answers of the first training pair, each with its prompt, between « and ».

        In a mixture, the first pair of the first source. None without a pair.
        """
        pairs: Any = self.train
        if isinstance(pairs, MixedExamples):
            pairs = next(iter(pairs.sources.values()))
        if not isinstance(pairs, Pairs) or not len(pairs):
            return None
        chosen = marked_text(tokenizer, pairs.first[0])
        rejected = marked_text(tokenizer, pairs.second[0])
        return f"{CHOSEN}: {chosen}\n{REJECTED}: {rejected}"


class PairMetrics(SummedMetrics):
    """The mean loss of pairs, and the means of `MEASURES`.

    Args:
        task: Counts and measures the pairs of a batch.
    """

    def __init__(self, task: Preference) -> None:
        super().__init__(task.count, ["loss", *MEASURES], *[0.0] * len(MEASURES))
        self.task = task

    def sum_batch(self, outputs: object, batch: Batch) -> list[float]:
        """Sum the quantities in `MEASURES` over the pairs of a batch."""
        return self.task.measure(outputs, batch).tolist()
