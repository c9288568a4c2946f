"""Predict rows with a trained model: one class for each kind of prediction."""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, SupportsFloat

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.run import RunConfig
from optrun.data.chat import ROLES, question_columns, questions
from optrun.data.columns import (
    USUAL_LABELS,
    image_column,
    named_column,
    text_column,
    texts,
    words_column,
)
from optrun.data.images import Images
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.task.base import pad_inputs
from optrun.task.chat_encoder import row_name
from optrun.task.chat_template import TemplateFailed, no_template_error, use_template
from optrun.task.entities import entities, scheme_of
from optrun.task.pooling import Pooling
from optrun.task.tokens import (
    NO_TOKEN,
    encode_to_inputs,
    model_inputs_of,
    prompt_ids,
    tokenize_rows,
)
from optrun.training.failures import explain_out_of_memory_in_evaluation
from optrun.training.step import Precision

Inputs = dict[str, Any]
"""One encoded row: arrays of ids by name, and other values that its prediction needs."""
Values = dict[str, Any]
"""The prediction of one row: name of each new column -> plain value."""
DEFAULT_TOKENS = 64
"""`generation.max_new_tokens` if neither the model nor the task sets a length."""


@dataclass
class Predictor(ABC):
    """Predicts the rows of a file; `Task.predictor` names the class of a task.

    Attributes:
        columns: Keys of `data` that name its columns, such as `text_column`.
        generates: Whether it takes `generation.KEY`.
        cuts: Whether `data.max_length` cuts its texts.
        model: On its device, in evaluation mode.
        tokenizer: The model's tokenizer, or its image preparation.
        labels: Class names by class id; empty without classes.
        config: Configuration of the run, with the changes for this prediction.
        split: The rows.
        source: The same rows as its only evaluation set, and the names of their columns; its
            `notes` are shown to the user.
        generation: The typed `generation.KEY=VALUE`, without the prefix.
    """

    columns: ClassVar[tuple[str, ...]] = ("text_column",)
    generates: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    model: Any
    tokenizer: Any
    labels: list[str]
    config: RunConfig
    split: Split
    source: Source
    generation: Mapping[str, Any]

    @property
    def padding(self) -> int:
        """The token id of padding; 0 if the tokenizer has none."""
        return int(getattr(self.tokenizer, "pad_token_id", None) or 0)

    @abstractmethod
    def encode(self) -> list[Inputs]:
        """Encode all rows, in order, before anything is predicted.

        Raises:
            ConfigError: A column is missing, or a row or an option does not fit.
        """

    @abstractmethod
    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict a batch, in its order; draw from torch's seeded generators only."""

    def batch(self, inputs: list[Inputs]) -> Batch:
        """Collate encoded rows to the inputs of the model, on the CPU."""
        return pad_inputs(inputs, self.padding)

    def run(self, batch: Batch, call: Callable[..., Any] | None = None, **options: object) -> Any:
        """Call the model, or one of its methods, with a batch in the chosen precision.

        Args:
            batch: Inputs; moved to the device of the model.
            call: A method of the model, such as `generate`; None: its forward pass.
            **options: Further keyword arguments of the call.

        Returns:
            What the call returns, on the device of the model.

        Raises:
            OptrunError: Memory did not suffice.
        """
        precision = Precision(self.model.device, self.config.training.precision.value)
        with precision.autocast(), explain_out_of_memory_in_evaluation(batch, "prediction"):
            return (call or self.model)(**precision.to_device(batch), **options)

    def text_column(self, *others: str | None) -> str:
        """Find the text column of the rows: the configured one, or the only column of texts.

        Args:
            *others: Columns that are not considered, such as the second text of a pair; nor are
                labels and targets.

        Returns:
            Name of the column.

        Raises:
            ConfigError: No column holds texts, or several do.
        """
        columns = self.source.columns
        assert columns is not None
        # Columns with another meaning; None excludes nothing.
        excluded = [columns.label_column, columns.target_column or "target", *others]
        excluded += columns.label_columns or ()
        if columns.label_column is None:
            excluded += USUAL_LABELS
        return text_column(self.source, self.split, excluded)

    def encode_texts(self, *columns: str) -> list[Inputs]:
        """Tokenize one column of texts, or two columns as pairs, as in training.

        Returns:
            For each row its inputs of the model, such as `input_ids`.

        Raises:
            ConfigError: A value is not a text, or a row has no token.
        """
        sides = [list(texts(self.split, column)) for column in columns]
        rows = sides[0] if len(sides) == 1 else list(zip(*sides, strict=True))  # texts or pairs
        arrays = encode_to_inputs(self.tokenizer, rows, self.config.data.max_length)
        self.expect_tokens(arrays["input_ids"])
        return self.to_arrays(arrays)

    def to_arrays(self, columns: Mapping[str, list[list[int]]]) -> list[Inputs]:
        """Turn the columns of a tokenizer's output, such as `input_ids`, into one dict per row."""
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, map(np.asarray, row), strict=True)) for row in rows]

    def expect_tokens(self, rows: list[list[int]]) -> None:
        """Refuse a row without a token.

        Raises:
            ConfigError: The message names the first such row by number.
        """
        for row, ids in enumerate(rows):
            if not ids:
                raise ConfigError(f"{self.split.where(row)} has no token: {NO_TOKEN}")


def shortest_decimal(number: SupportsFloat) -> float:
    """Round a number to the shortest decimal with the same float32 value.

    Example:
        >>> shortest_decimal(np.float32(0.1))
        0.1
    """
    return float(str(np.float32(float(number))))


class TextClasses(Predictor):
    """Predicts a label, several labels or a number from a text or a pair of texts."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")

    def encode(self) -> list[Inputs]:
        """Encode as in training."""
        pair = named_column(self.source.columns, "text_pair_column", self.split)
        text = self.text_column(pair)
        if pair is None:
            return self.encode_texts(text)
        return self.encode_texts(text, pair)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass: a number, the likeliest label, or all labels above 0.5."""
        logits = self.run(self.batch(inputs)).logits.float().cpu()
        # of_numbers: a row has one number; of_sets: it may have several labels, or none.
        if self.config.task.of_numbers:
            return [{"prediction": shortest_decimal(number)} for number in logits.reshape(-1)]
        shares = logits.sigmoid() if self.config.task.of_sets else logits.softmax(-1)
        return [self._row_prediction(row) for row in shares]

    def _row_prediction(self, shares: torch.Tensor) -> Values:
        """Build the prediction of one row: the likeliest label, or all labels above 0.5.

        Of equally likely labels the first one wins.

        Args:
            shares: Probabilities, shape (classes,).

        Returns:
            Such as {"prediction": "pos", "probability": 0.75, "probabilities": {"neg": 0.25, "pos":
            0.75}}; of several labels a row, "prediction" is a list and "probability" is missing.
        """
        by_label = dict(zip(self.labels, map(shortest_decimal, shares), strict=True))
        if self.config.task.of_sets:
            labels = [label for label, share in by_label.items() if share > 0.5]
            return {"prediction": labels, "probabilities": by_label}
        label = max(by_label, key=by_label.__getitem__)
        return {"prediction": label, "probability": by_label[label], "probabilities": by_label}


class ImageClasses(TextClasses):
    """Predicts a label from an image."""

    columns: ClassVar[tuple[str, ...]] = ("image_column",)
    cuts: ClassVar[bool] = False

    def encode(self) -> list[Inputs]:
        """Return the images unopened; `predict` opens them."""
        images = Images(self.split, image_column(self.source, self.split))
        return [{"image": images[row]} for row in range(len(self.split.rows))]

    def batch(self, inputs: list[Inputs]) -> Batch:
        """Open images, and prepare them as in training."""
        size = getattr(self.config.task, "image_size", None)
        prepare = self.tokenizer if size is None else self.tokenizer.resized(size)
        pixels = np.stack([prepare(row["image"].decoded()) for row in inputs])
        return {"pixel_values": torch.from_numpy(pixels)}


class WordLabels(Predictor):
    """Predicts a label for each word of a row, and whole entities if labels are IOB tags.

    The first token of a word decides, as in training. A word without a token, or beyond
    `data.max_length`, gets null.
    """

    def encode(self) -> list[Inputs]:
        """Encode as in training; `word_ids` holds the word of each token, None for special ones."""
        rows = self.split.rows[words_column(self.source, self.split, "")]
        for row, words in enumerate(rows):
            if words is None or None in words:
                raise ConfigError(f"{self.split.where(row)} has no words, or a missing word.")
        # A row without words gets one, "-", since a model needs a token; its label is left out.
        encoding = tokenize_rows(
            self.tokenizer,
            [words or ["-"] for words in rows],
            self.config.data.max_length,
            is_split_into_words=True,
        )
        inputs = self.to_arrays(model_inputs_of(encoding))
        for row, words in enumerate(rows):
            inputs[row] |= {"words": words, "word_ids": encoding.word_ids(row)}
        return inputs

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        shares = self.run(self.batch(inputs)).logits.float().softmax(-1).cpu()
        return [self._row_prediction(row, shares[at]) for at, row in enumerate(inputs)]

    def _row_prediction(self, row: Inputs, shares: torch.Tensor) -> Values:
        """Build the prediction of one row: the label of each word, and its entities.

        A word has the label of its first token, as in training; None if it was cut off. There are
        entities only if the labels have a scheme such as BIO.

        Args:
            row: Its `words`, and `word_ids`: the word of each token, None for special tokens.
            shares: Probabilities, shape (tokens, classes); padding at the end is not read.

        Returns:
            `prediction` and `probability`, one a word; `entities` with type, start, end (exclusive,
            in words) and words.
        """
        words = row["words"]
        labels: list[str | None] = [None] * len(words)
        probabilities: list[float | None] = [None] * len(words)
        for position, word in enumerate(row["word_ids"]):
            if word is None or not words:  # a special token, or the stand-in for no words
                continue
            if labels[word] is None:  # the first token of the word
                labels[word] = self.labels[int(shares[position].argmax())]
                probabilities[word] = shortest_decimal(shares[position].max())
        values: Values = {"prediction": labels, "probability": probabilities}
        if scheme_of(self.labels):
            values["entities"] = [
                {"type": kind, "start": start, "end": end, "words": words[start:end]}
                for kind, start, end in entities([label or "O" for label in labels])
            ]
        return values


class Embeddings(Predictor):
    """Computes the vector of a text, pooled and normalised as in training."""

    def encode(self) -> list[Inputs]:
        """Encode as in training."""
        return self.encode_texts(self.text_column())

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Compute the embedding of each text in one forward pass, pooled as in training."""
        batch = self.batch(inputs)
        outputs = self.run(batch)
        mask = batch["attention_mask"].to(outputs.last_hidden_state.device)
        vectors = Pooling.from_config(self.model.config)(outputs, mask).cpu()
        return [{"embedding": list(map(shortest_decimal, vector))} for vector in vectors]


class TextGeneration(Predictor):
    """Continues prompts with `model.generate`; other tasks override `prompts`."""

    generates: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    is_decoder: ClassVar[bool] = True
    """Whether prompt and continuation share the model's positions, as without an encoder."""

    def prompts(self) -> list[list[int]]:
        """Encode prompts, with the tokenizer's initial special tokens but no final ones.

        Their column is the configured one, else `prompt`, else the only text column.
        """
        columns = self.source.columns
        is_named = columns is not None and columns.text_column
        if "prompt" in self.split.rows.column_names and not is_named:
            column = "prompt"
        else:
            column = self.text_column()
        return prompt_ids(self.tokenizer, texts(self.split, column))

    def encode(self) -> list[Inputs]:
        """Set `self.options`, the generation options, and encode the prompts.

        A prompt that leaves no room for the new tokens is cut on the left, to the positions of a
        decoder minus these. Models with an encoder have no such limit here.

        Raises:
            ConfigError: The model cannot generate, an option does not fit, or no room is left for a
                prompt.
        """
        model = self.model
        if not model.can_generate():
            name = type(model).__name__
            raise ConfigError(f"{self.config.task.name}: {name} of transformers cannot generate.")
        # Positions for prompt and continuation together; no limit if there is an encoder, or if the
        # model names none.
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is None or not self.is_decoder:
            positions = sys.maxsize
        self.options = self._options(copy.deepcopy(model.generation_config), positions)
        longest = positions - (self.options.max_new_tokens or 0)  # of a prompt, in tokens
        if longest < 1:
            raise ConfigError(
                f"generation.max_new_tokens={self.options.max_new_tokens}: the model has"
                f" {positions:,} positions for prompt and continuation together. Expected"
                f" {positions - 1:,} or fewer."
            )
        prompts = [ids[-longest:] for ids in self.prompts()]
        self.expect_tokens(prompts)
        return self.to_arrays({"input_ids": prompts})

    def _options(self, options: Any, positions: int) -> Any:
        """Override the model's GenerationConfig by `generation.KEY`, and add defaults.

        Defaults: the tokenizer's end of text, and `max_target_length` of the task new tokens, else
        64, at most half of the positions.

        Args:
            options: GenerationConfig of the model; changed in place and returned. The `max_length`
                of a decoder is dropped, since it counts the prompt, too.
            positions: Largest number of tokens of prompt and continuation together.

        Raises:
            ConfigError: A value does not fit, or has no effect.
        """
        # 1. What was typed: checked alone, so that an error is about it, and then taken over.
        with self._option_errors():
            type(options)(**self.generation).validate(strict=True)
        options.update(**self.generation, num_return_sequences=1)
        # 2. One limit of the length: `max_new_tokens`, or else `max_length`, which in a decoder
        # counts the prompt, too.
        if self.is_decoder or "max_new_tokens" in self.generation:
            options.max_length = None
        # 3. Defaults.
        if options.eos_token_id is None:
            options.eos_token_id = self.tokenizer.eos_token_id
        if options.max_new_tokens is None and options.max_length is None:
            default = getattr(self.config.task, "max_target_length", DEFAULT_TOKENS)
            options.max_new_tokens = min(default, positions // 2)
        return options

    @contextmanager
    def _option_errors(self) -> Iterator[None]:
        """Turn errors of transformers in the block into a ConfigError with the typed options.

        Without typed options (`generation.KEY=VALUE`) they are raised unchanged.
        """
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            if not self.generation:
                raise
            options = [f"generation.{name}={value}" for name, value in self.generation.items()]
            reason = " ".join(str(error).replace("`", "").split())
            raise ConfigError(f"{', '.join(options)}: {reason[:400]}") from error

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Continue a batch of prompts, padded on the left if there is no encoder."""
        batch = pad_inputs(inputs, self.padding, left=self.is_decoder)
        tokenizer = self.tokenizer
        options = {"generation_config": self.options, "tokenizer": tokenizer}
        with self._option_errors():
            ids = self.run(batch, self.model.generate, **options)
        if self.is_decoder:  # its output begins with the prompt
            ids = ids[:, batch["input_ids"].shape[1] :]
        continuations = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [{"generation": text} for text in continuations]


class TextToText(TextGeneration):
    """Generates a text from a text, by an encoder-decoder model."""

    cuts: ClassVar[bool] = True
    is_decoder: ClassVar[bool] = False

    def prompts(self) -> list[list[int]]:
        """Encode as in training."""
        return [row["input_ids"].tolist() for row in self.encode_texts(self.text_column())]


class ChatAnswers(TextGeneration):
    """Generates the last assistant turn of a chat, in the run's chat template.

    A row needs no completion. A row that is a plain text is continued without a template.
    """

    columns: ClassVar[tuple[str, ...]] = ("messages_column", "text_column")

    def prompts(self) -> list[list[int]]:
        """Encode each row, a chat or a text, as a prompt.

        A chat is encoded up to where the assistant's answer begins. Chats are rendered by the
        tokenizer's template, with its mark for the assistant's turn; a text is encoded without
        final special tokens.

        Raises:
            ConfigError: A row is no chat, or the template refuses it.
        """
        template = use_template(self.tokenizer, None)  # the tokenizer's own; None: it has none
        layout = getattr(self.config.task, "layout", None)
        columns = question_columns(self.source, self.split, layout)
        prompts = []
        for row in questions(self.split, columns, template.roles if template else ROLES):
            if isinstance(row, str):  # a plain text; any other row is a chat
                prompts += prompt_ids(self.tokenizer, [row])
                continue
            if template is None:
                raise no_template_error(f"{self.split.key} has conversations")
            try:
                text = template.text(row.turns, row.tools, generation_prompt=True)
            except TemplateFailed as error:
                raise ConfigError(f"{row_name(self.split, row)} {error}.") from error
            encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
            prompts.append(encoding["input_ids"])
        return prompts
