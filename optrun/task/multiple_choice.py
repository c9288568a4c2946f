"""Which of several texts goes with a text: `AutoModelForMultipleChoice`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.data.cache import digest, key_of
from optrun.data.columns import (
    cell_list,
    cell_text,
    choices_column,
    label_column,
    named,
    text_column,
    texts,
    values,
)
from optrun.data.encoded import Encoder
from optrun.data.examples import Example, Examples, chosen, encode
from optrun.data.kept import kept
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedRows, StreamRows
from optrun.task.base import ModelNeeds, Task, pad_inputs
from optrun.task.evaluation import MeanLoss, MetricAccumulator
from optrun.task.tokens import interleaved, rows_key, text_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput

Row = tuple[str, str]
"""Context and one choice, behind the question where there is one."""


class MultipleChoice(Task):
    """A text, a question where there is one, and a list of choices; the label says which is right.

    The label is the text of a choice, or its index from 0. Where a row has fewer choices than
    another one of its batch, places without a choice fill it up, which no probability goes to; all
    rows of a stream have as many.

    Raises:
        ConfigError: A missing column, a row with fewer than two choices, a label that is none of
            them.
    """

    columns = (
        "text_column",
        "eval_text_column",
        "text_pair_column",
        "choices_column",
        "label_column",
    )
    unit = "examples"
    predictor = "optrun.runner.prediction.choices:ChosenTexts"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield contexts, questions and choices."""
        split = source.train
        *sides, choices = filter(None, _columns(source, split))
        return chain(interleaved(split, sides), chain.from_iterable(_lists(split, choices)))

    @classmethod
    def inputs(cls, source: Source) -> list[str]:
        """List the columns of context, question and choices."""
        return list(filter(None, _columns(source, source.train)))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Look at the choices of each row, and find the number of the right one."""
        self.numbers: dict[Split, np.ndarray] = {}
        self.counts: dict[Split, np.ndarray] = {}
        self.size = 0
        for split in source.splits:
            if not len(split.rows):
                self.numbers[split] = self.counts[split] = np.zeros(0, dtype=np.int64)
                continue
            choices, label = choices_column(source, split), label_column(source, split)
            if isinstance(
                split.rows, StreamRows
            ):  # as many in all rows as in the first; each is looked at when read
                self.size = _expected(
                    split.rows.where(0), choices, split.rows[0].get(choices), None
                )
                continue
            self.counts[split], self.numbers[split] = _row_choices(split, choices, label)
        every = np.concatenate([*self.counts.values(), [self.size] if self.size else []])
        self.fewest_and_most = {int(every.min()), int(every.max())} if len(every) else set()
        self.unequal = len(self.fewest_and_most) > 1
        if self.unequal:
            self.notes.append(
                f"rows have from {every.min():g} to {every.max():g} choices: each is judged among"
                " its own"
            )

    def join(self, others: Sequence[Task]) -> None:
        """Join sources.

        Rows of two may differ in the number of choices even if those of each do not.
        """
        numbers = [one.fewest_and_most for one in others if isinstance(one, MultipleChoice)]
        self.unequal = len(set().union(*numbers)) > 1

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example a row."""
        text, pair, choices = _columns(source, split)
        longest = self.max_length
        encoder, key = text_encoder(tokenizer, longest), rows_key(tokenizer, "choices", longest)
        if isinstance(split.rows, StreamRows):
            return self._streamed(
                split.rows, (text, pair, choices, label_column(source, split)), encoder, key
            )
        indices = chosen(len(split.rows), limit, seed=seed)
        part = split.take(indices)
        known = key_of(part.content, "choices", text, str(pair), choices)
        examples = encode(
            lambda: pairs(part, text, pair, choices), encoder, key, longest=longest, content=known
        )
        labels, counts = self.numbers.pop(split), self.counts.pop(split)
        taken = slice(None) if indices is None else indices
        return Choices(examples, counts[taken], labels[taken])

    def _streamed(
        self,
        rows: StreamRows,
        columns: tuple[str, str | None, str, str],
        encoder: Encoder,
        key: str,
    ) -> StreamedRows:
        """Stream rows whose choices are looked at, and tokenised, when they are read."""
        text, pair, choices, label = columns

        def example(row: PlainMapping) -> Example:
            _expected("it", choices, row.get(choices), self.size)
            listed, context = cell_list(row, choices), cell_text(row, text)
            before = "" if pair is None else f"{cell_text(row, pair)} "
            found = encoder([(context, f"{before}{choice}") for choice in listed], True)
            ids: Example = {
                name: [np.asarray(one, dtype=np.int64) for one in rows]
                for name, rows in found.items()
            }
            return {**ids, "labels": np.int64(right_choice("it", label, listed, row.get(label)))}

        return StreamedRows(
            rows.select_columns([name for name in columns if name]),
            example,
            digest(key, str(columns)),
        )

    def needs(self) -> ModelNeeds:
        """Require a head with one output, which scores a choice."""
        return ModelNeeds({}, self.max_length)

    def collate(self, examples: list[Example]) -> Batch:
        """Collate ids, masks (and token types) of shape (batch, choices, longest).

        `labels` of shape (batch,).
        """
        labels = torch.tensor([int(example["labels"]) for example in examples])
        return {**pad_choices(examples, self.padding), "labels": labels}

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of all choices, and the examples."""
        filled = int(_filled(batch).sum()) if self.unequal else 0
        return int(batch["attention_mask"].sum()) - filled, len(batch["labels"])

    # Rows of unequal choices
    # --------------------------------------------------------------------------------------

    def logits(self, outputs: ModelOutput, batch: Batch) -> torch.Tensor:
        """Return the scores of the choices, shape (batch, choices).

        Minus infinity marks a missing one.
        """
        found: torch.Tensor = outputs.logits
        return found.masked_fill(_filled(batch), -torch.inf) if self.unequal else found

    def loss(self, outputs: ModelOutput, batch: Batch) -> torch.Tensor:
        """Compute every task's loss over a row's own choices; smoothing spreads over these, too."""
        if not self.unequal:
            return super().loss(outputs, batch)
        return self._losses(outputs, batch, self.label_smoothing).mean()

    def loss_by_example(
        self, outputs: ModelOutput, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum every task's loss by example, over a row's own choices."""
        losses = self._losses(outputs, batch, 0.0)
        return losses, torch.ones_like(losses, dtype=torch.int64)

    def predictions(self, outputs: ModelOutput, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the choices."""
        return self.logits(outputs, batch).argmax(-1).cpu().numpy(), batch["labels"].cpu().numpy()

    def running_metrics(self) -> MetricAccumulator:
        """Make the mean loss, over a row's own choices."""
        return _ChoicesLoss(self) if self.unequal else super().running_metrics()

    def _losses(self, outputs: ModelOutput, batch: Batch, smoothing: float) -> torch.Tensor:
        """Compute each row's cross-entropy, shape (batch,).

        `smoothing` of the target spreads over its choices.
        """
        logs = self.logits(outputs, batch)
        logs = (logs if logs.dtype is torch.float64 else logs.float()).log_softmax(-1)
        found = -logs.gather(1, batch["labels"][:, None]).squeeze(1)
        if not smoothing:
            return found
        there = logs > -torch.inf
        spread = -logs.masked_fill(~there, 0).sum(-1) / there.sum(-1)
        return (1 - smoothing) * found + smoothing * spread


class _ChoicesLoss(MeanLoss):
    """The mean loss of rows, each over its own choices.

    The model's own counts places that have none.
    """

    def __init__(self, task: MultipleChoice) -> None:
        super().__init__(task.count)
        self.task = task

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Add one batch's."""
        losses, _ = self.task.loss_by_example(outputs, batch)
        self.sums = [self.sums[0] + float(losses.sum()), self.sums[1] + len(losses)]


class Choices:
    """Examples of several rows of ids each.

    Args:
        examples: The choices of all rows, one after another.
        counts: How many each row has, shape (rows,), int64.
        right: Number of the right one, shape (rows,), int64; a place, and no label to count.
    """

    def __init__(self, examples: Examples, counts: np.ndarray, right: np.ndarray) -> None:
        self.examples = examples
        self.counts = counts
        self.borders = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.right = right

    def __len__(self) -> int:
        return len(self.right)

    def __getitem__(self, index: int) -> Example:
        rows = [
            self.examples[place]
            for place in range(int(self.borders[index]), int(self.borders[index + 1]))
        ]
        return {
            **{name: [row[name] for row in rows] for name in rows[0]},
            "labels": self.right[index],
        }

    def _summed(self, values: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.add.reduceat(values, self.borders[:-1]) if len(values) else values
        return found

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all choices of each row; shape (rows,), int64."""
        return self._summed(self.examples.lengths)

    @property
    def lost(self) -> np.ndarray | None:
        """Tokens that each row lost to its greatest length; shape (rows,), int64."""
        return None if self.examples.lost is None else self._summed(self.examples.lost)

    def fingerprint(self) -> str:
        """Digest of ids and labels."""
        alike = bool((self.counts == self.counts[:1]).all())
        counts = str(self.counts[0] if len(self.counts) else 0) if alike else self.counts.tobytes()
        return digest(
            self.examples.fingerprint(), counts, np.ascontiguousarray(self.right).tobytes()
        )


def pairs(split: Split, text: str, pair: str | None, choices: str) -> Iterator[Row]:
    """Yield context and choice for each choice of each row.

    A question stands before each choice.
    """
    questions = iter(()) if pair is None else texts(split, pair)
    for context, listed in zip(texts(split, text), _lists(split, choices), strict=True):
        before = "" if pair is None else f"{next(questions)} "
        for choice in listed:
            yield context, f"{before}{choice}"


def pad_choices(examples: list[Example], padding: int) -> Batch:
    """Pad ids, masks and, if the tokenizer makes them, token types.

    Shape (batch, choices, longest).

    A place without a choice is two padding tokens, of which the model reads the second: nothing to
    read would be 0/0, and the first one is what any choice has.
    """
    most = max(len(example["input_ids"]) for example in examples)
    empty = {"input_ids": np.array([padding, padding]), "token_type_ids": np.array([0, 0])}
    places = [(example, at) for example in examples for at in range(most)]
    rows: list[Example] = [
        {
            name: example[name][at] if at < len(example[name]) else empty[name]
            for name in empty
            if name in example
        }
        for example, at in places
    ]
    batch = pad_inputs(rows, padding)
    batch["attention_mask"][[at >= len(example["input_ids"]) for example, at in places], 0] = 0
    return {name: values.unflatten(0, (len(examples), -1)) for name, values in batch.items()}


def _filled(batch: Batch) -> torch.Tensor:
    """Mark places without a choice with True; shape (batch, choices)."""
    mask = batch["attention_mask"]
    return (mask[..., 0] == 0) & (mask.sum(-1) == 1)


def count_choices(split: Split, column: str) -> np.ndarray:
    """Count the choices of each row; shape (rows,), int64.

    Raises:
        ConfigError: The first row that has fewer than two, or a choice that is no text.
    """
    counts = np.empty(len(split.rows), dtype=np.int64)
    for row, listed in enumerate(values(split, column)):
        counts[row] = _expected(split.where(row), column, listed, None)
    return counts


def _row_choices(split: Split, choices: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Count the choices of each row, and number the right one; found once for the same rows."""

    def find() -> dict[str, np.ndarray]:
        counts = count_choices(split, choices)
        right = np.empty(len(counts), dtype=np.int64)
        rows = zip(_lists(split, choices), values(split, label), strict=True)
        for row, (listed, value) in enumerate(rows):
            right[row] = right_choice(split.where(row), label, listed, value)
        return {"counts": counts, "right": right}

    found = kept("labels", key_of("choices-1", split.content, choices, label), find)
    return found["counts"], found["right"]


def _expected(
    where: str, column: str, listed: Sequence[object] | None, expected: int | None
) -> int:
    """Count the choices of a row, which must be as many as in the others if a number is expected."""
    if listed is None or any(choice is None for choice in listed):
        raise ConfigError(f"{where} has no value, or a missing choice, in column {column}.")
    if len(listed) < 2:
        raise ConfigError(
            f"{where} has {len(listed)} choices in column {column}: expected two or more."
        )
    if expected is not None and len(listed) != expected:
        raise ConfigError(
            f"{where} has {len(listed)} choices in column {column}, and the rows before it have"
            f" {expected}. Expected as many in all rows of a stream; data.streaming=false takes any"
            " number."
        )
    return len(listed)


def _columns(source: Source, split: Split) -> tuple[str, str | None, str]:
    """Find the columns of contexts, questions and choices."""
    if not len(split.rows):
        split = source.train
    pair = named(source.columns, "text_pair_column", split)
    choices = choices_column(source, split)
    return (
        text_column(source, split, taken=(label_column(source, split), pair, choices)),
        pair,
        choices,
    )


def _lists(split: Split, column: str) -> Iterator[list[str]]:
    return (list(listed) for listed in values(split, column))


def right_choice(where: str, column: str, choices: list[str], value: Any) -> int:
    """Return the number of the right choice, from 0.

    Raises:
        ConfigError: It is no index of one, and no text of exactly one.
    """
    same = [number for number, choice in enumerate(choices) if choice == value]
    if len(same) == 1:
        return same[0]
    try:
        number = float(value) if not same and not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if 0 <= number < len(choices) and number.is_integer():
        return int(number)
    why = "stands there more than once" if same else "is none of them"
    raise ConfigError(
        f"{where} has the label {value!r} in column {column}, which {why}. Expected the "
        f"text of one of its {len(choices)} choices, or its index from 0 to {len(choices) - 1}."
    )
