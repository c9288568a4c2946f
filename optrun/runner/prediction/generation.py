"""Texts that a model writes: after a prompt, from a text, or as the answer in a chat."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optrun.base.errors import ConfigError, did_you_mean
from optrun.data.chat import ROLES, question_columns, questions
from optrun.data.columns import text_column
from optrun.runner.prediction.base import Inputs, Predictor, Values
from optrun.task.chat_encoder import place
from optrun.task.chat_template import TemplateFailed, no_template, use_template
from optrun.task.language_model import around
from optrun.task.tokens import begin_of_text

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_TOKENS = 64
"""`generation.max_new_tokens` where neither the model nor the task says how long a text may be."""


class TextGeneration(Predictor):
    """Prompts to continuations, by `model.generate`.

    `find_column` and `prompts` are what a task with other rows overrides.
    """

    generates: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    is_decoder: ClassVar[bool] = True
    """Whether prompt and continuation share the model's positions: there is no encoder."""

    def inspect(self) -> None:
        """Find the prompts, and make the options of the generation."""
        self.column = self.find_column()
        model: Any = self.predicting.model
        if not model.can_generate():
            raise ConfigError(
                f"task={self.predicting.task.name}: {type(model).__name__} of transformers cannot"
                " generate."
            )
        positions = getattr(model.config, "max_position_embeddings", None)
        room = positions if self.is_decoder else None
        self.generation = generation_config(self.predicting.generation, model.generation_config)
        if self.generation.max_new_tokens is None and self.generation.max_length is None:
            longest = getattr(self.predicting.task, "max_target_length", DEFAULT_TOKENS)
            self.generation.max_new_tokens = longest if room is None else min(longest, room // 2)
        if self.generation.pad_token_id is None:
            self.generation.pad_token_id = self.padding
        if self.generation.eos_token_id is None:
            self.generation.eos_token_id = self.tokenizer.eos_token_id
        self.longest_prompt = None if room is None else self._longest_prompt(room)

    def find_column(self) -> str:
        """Find the column of prompts: as named, else `prompt`, else the only one of texts.

        Raises:
            ConfigError: There is none, or several; a row that is no text.
        """
        columns = self.predicting.columns
        if columns.text_column or columns.eval_text_column:
            column = text_column(self.predicting.source, self.split, taken=self.taken())
        elif "prompt" in self.split.rows.column_names:
            column = "prompt"
        else:
            column = text_column(self.predicting.source, self.split, taken=self.taken())
        self.check_texts(column)
        return column

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode the prompts of some rows, begun as the tokenizer begins a text."""
        start, _ = around(self.tokenizer)
        begin = begin_of_text(self.tokenizer)
        texts = [text.removeprefix(begin) for text in self.texts(self.column, numbers)]
        encoding = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        # An empty prompt is the beginning of a text: what stood between documents in training.
        usual = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        empty = [token for token in usual if token is not None][:1]
        return [start + ids or empty for ids in encoding["input_ids"]]

    def _longest_prompt(self, room: int) -> int:
        """Count the positions that the continuation leaves.

        Raises:
            ConfigError: None are left.
        """
        new, length = self.generation.max_new_tokens, self.generation.max_length
        left = room - new if new is not None else min(length, room) - 1
        if left < 1:
            raise ConfigError(
                f"generation.max_new_tokens={new}: the model has {room:,} positions for prompt and"
                f" continuation together. Expected {room - 1:,} or fewer."
            )
        return int(left)

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode prompts; of one that leaves no room only its end."""
        begin = None if self.longest_prompt is None else -self.longest_prompt
        rows: list[Inputs] = [
            {"input_ids": np.asarray(ids[begin:], dtype=np.int64)} for ids in self.prompts(numbers)
        ]
        return self.expect_tokens(rows, numbers)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Continue a batch of prompts, padded on the left if there is no encoder."""
        batch = self.predicting.to_device(self.pad_inputs(inputs, left=self.is_decoder))
        model: Any = self.predicting.model
        try:
            with self.predicting.autocast():
                ids = model.generate(
                    **batch, generation_config=self.generation, tokenizer=self.tokenizer
                )
        except (TypeError, ValueError, AttributeError) as error:
            if not self.predicting.generation:
                raise
            raise _refused(self.predicting.generation, error) from error
        begin = batch["input_ids"].shape[1] if self.is_decoder else 0
        texts = self.tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
        return [{"generation": text} for text in texts]


class TextToText(TextGeneration):
    """Texts to texts, by encoder and decoder."""

    cuts: ClassVar[bool] = True
    is_decoder: ClassVar[bool] = False

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode as in training."""
        ids: list[list[int]] = self.tokenize(self.texts(self.column, numbers))["input_ids"]
        return ids


class ChatAnswers(TextGeneration):
    """Turns up to the last of the assistant, written by the run's template, to what it says then.

    A row needs no completion. A text is continued as it stands, as the prompts of plain rows are.
    """

    columns: ClassVar[tuple[str, ...]] = ("messages_column", "text_column")

    def find_column(self) -> str:
        """Find the column of what is to be answered, and write every row once."""
        self.template = use_template(self.tokenizer, None)
        layout = getattr(self.predicting.task, "layout", None)
        self.places = question_columns(self.predicting.source, self.split, layout)
        self._texts(range(len(self.split.rows)))
        return self.places.names[0]

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode each conversation with the opening of an answer; a text as in training."""
        return [
            self.tokenizer(text, add_special_tokens=is_plain, verbose=False)["input_ids"]
            for text, is_plain in self._texts(numbers)
        ]

    def _texts(self, numbers: Sequence[int]) -> list[tuple[str, bool]]:
        """Write what the model reads of some rows, and whether it is a plain text.

        Raises:
            ConfigError: A row that cannot be read or written.
        """
        roles = ROLES if self.template is None else self.template.roles
        part = self.part(numbers)
        texts = []
        for row in questions(part, self.places, roles):
            if isinstance(row, str):
                texts.append((row.removeprefix(begin_of_text(self.tokenizer)), True))
                continue
            if self.template is None:
                raise no_template(f"{self.split.key} has conversations")
            try:
                texts.append((self.template.text(row.turns, row.tools, opening=True), False))
            except TemplateFailed as error:
                raise ConfigError(f"{place(part, row)} {error}.") from error
        return texts


def generation_config(given: Mapping[str, object], base: GenerationConfig) -> GenerationConfig:
    """Return the generation options of a model with changes.

    Args:
        given: Names of transformers to values.
        base: Of the model.

    Raises:
        ConfigError: A name that transformers does not have, a value that does not fit, or one
            without effect.
    """
    from transformers import GenerationConfig

    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name in given:
        if name not in names:
            raise ConfigError(
                f"generation.{name}: no such option of transformers' generation."
                f" {did_you_mean(name, names)}"
            )
    if (given.get("num_return_sequences") or 1) != 1:
        raise ConfigError(
            f"generation.num_return_sequences={given['num_return_sequences']}: one text is written"
            " for each row. Leave it out."
        )
    config = copy.deepcopy(base)
    config.num_return_sequences = None
    if given.get("max_new_tokens") is not None:
        config.max_length = None
    try:
        GenerationConfig(**given).validate(strict=True)
        config.update(**given)
        config.validate()
    except (ValueError, TypeError) as error:
        raise _refused(given, error) from error
    return config


def _refused(given: Mapping[str, object], error: Exception) -> ConfigError:
    """Make the refusal of options from what transformers says of them."""
    line = " ".join(str(error).replace("`", "").split())
    options = ", ".join(f"generation.{name}={value}" for name, value in given.items())
    return ConfigError(f"{options or 'generation'}: {line[:400]}")
