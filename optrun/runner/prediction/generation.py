"""Texts that a model writes: after a prompt, from a text, or as the answer in a chat."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.chat import ROLES, question_columns, questions
from optrun.data.columns import texts
from optrun.runner.prediction.base import Inputs, Predictor, Values
from optrun.task.base import pad_inputs
from optrun.task.chat_encoder import row_name
from optrun.task.chat_template import TemplateFailed, no_template_error, use_template
from optrun.task.tokens import prompt_ids

DEFAULT_TOKENS = 64
"""`generation.max_new_tokens` where neither the model nor the task says how long a text may be."""


class TextGeneration(Predictor):
    """Continues prompts with `model.generate`; other tasks override `prompts`."""

    generates: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    is_decoder: ClassVar[bool] = True
    """Whether prompt and continuation share the model's positions: there is no encoder."""

    def encode(self) -> list[Inputs]:
        """Settle the generation options, and encode prompts; long ones are cut on the left.

        Raises:
            ConfigError: The model cannot generate, an option does not fit, or no room is left for a
                prompt.
        """
        model: Any = self.model
        if not model.can_generate():
            raise ConfigError(
                f"task={self.task.name}: {type(model).__name__} of transformers cannot generate."
            )
        self.options = self._options(copy.deepcopy(model.generation_config))
        prompts = self.prompts()
        if self.positions is not None:
            longest = self._longest_prompt(self.positions)
            prompts = [ids[-longest:] for ids in prompts]
        for row, ids in enumerate(prompts):
            self.expect_tokens(row, ids)
        return [{"input_ids": np.asarray(ids, dtype=np.int64)} for ids in prompts]

    @property
    def positions(self) -> int | None:
        """Largest number of tokens of prompt and continuation together; None: no limit."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if self.is_decoder:
            return positions
        return None

    def _options(self, options: Any) -> Any:
        """Override the model's generation options by `generation.KEY`, and add defaults.

        Raises:
            ConfigError: A value does not fit, or has no effect.
        """
        if "max_new_tokens" in self.generation:
            options.max_length = None
        try:
            type(options)(**self.generation).validate(strict=True)
        except (ValueError, TypeError) as error:
            raise self._refused(error) from error
        options.update(**self.generation)
        if options.pad_token_id is None:
            options.pad_token_id = self.padding
        if options.eos_token_id is None:
            options.eos_token_id = self.tokenizer.eos_token_id
        if options.num_return_sequences not in (None, 1):
            raise ConfigError(
                f"generation.num_return_sequences={options.num_return_sequences}: expected 1, since"
                " one text is written for each row."
            )
        if options.max_new_tokens is None and options.max_length is None:
            options.max_new_tokens = getattr(self.task, "max_target_length", DEFAULT_TOKENS)
            if self.positions is not None:
                options.max_new_tokens = min(options.max_new_tokens, self.positions // 2)
        return options

    def _longest_prompt(self, positions: int) -> int:
        """Count the tokens that the continuation leaves for the prompt.

        Raises:
            ConfigError: No token is left.
        """
        new = self.options.max_new_tokens
        if new is None:
            new = max(1, positions - self.options.max_length + 1)
        if new >= positions:
            raise ConfigError(
                f"generation.max_new_tokens={new}: the model has {positions:,} positions for prompt"
                f" and continuation together. Expected {positions - 1:,} or fewer."
            )
        return positions - int(new)

    def _refused(self, error: Exception) -> ConfigError:
        """Build the error for options that transformers refused, with its message."""
        line = " ".join(str(error).replace("`", "").split())
        options = [f"generation.{name}={value}" for name, value in self.generation.items()]
        return ConfigError(f"{', '.join(options)}: {line[:400]}")

    def prompts(self) -> list[list[int]]:
        """Encode prompts, with the tokenizer's initial special tokens but no final ones.

        Their column is the configured one, else `prompt`, else the only text column.
        """
        columns = self.source.columns
        is_named = columns is not None and columns.text_column
        usual = "prompt" in self.split.rows.column_names
        column = "prompt" if usual and not is_named else self.text_column()
        prompts = prompt_ids(self.tokenizer, texts(self.split, column))
        # An empty prompt is the beginning of a text: what stood between documents in training.
        usual_begins = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        empty = [token for token in usual_begins if token is not None][:1]
        return [ids or empty for ids in prompts]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Continue a batch of prompts, padded on the left if there is no encoder."""
        batch = pad_inputs(inputs, self.padding, left=self.is_decoder)
        model: Any = self.model
        try:
            ids = self.run(
                batch, model.generate, generation_config=self.options, tokenizer=self.tokenizer
            )
        except (TypeError, ValueError, AttributeError) as error:
            if not self.generation:
                raise
            raise self._refused(error) from error
        begin = batch["input_ids"].shape[1] if self.is_decoder else 0
        written = self.tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
        return [{"generation": text} for text in written]


class TextToText(TextGeneration):
    """Generates a text from a text, by an encoder-decoder model."""

    cuts: ClassVar[bool] = True
    is_decoder: ClassVar[bool] = False

    def prompts(self) -> list[list[int]]:
        """Encode as in training."""
        return [row["input_ids"].tolist() for row in self.encode_texts(self.text_column())]


class ChatAnswers(TextGeneration):
    """Generates the last assistant turn of a chat, in the run's chat template.

    A row needs no completion. A row with a plain text is continued without a template.
    """

    columns: ClassVar[tuple[str, ...]] = ("messages_column", "text_column")

    def prompts(self) -> list[list[int]]:
        """Encode each chat with an open assistant turn, a text as in training.

        Raises:
            ConfigError: A row is no chat, or the template refuses it.
        """
        template = use_template(self.tokenizer, None)
        columns = question_columns(self.source, self.split, getattr(self.task, "layout", None))
        prompts = []
        for row in questions(self.split, columns, template.roles if template else ROLES):
            if isinstance(row, str):
                prompts += prompt_ids(self.tokenizer, [row])
                continue
            if template is None:
                raise no_template_error(f"{self.split.key} has conversations")
            try:
                text = template.text(row.turns, row.tools, opening=True)
            except TemplateFailed as error:
                raise ConfigError(f"{row_name(self.split, row)} {error}.") from error
            encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
            prompts.append(encoding["input_ids"])
        return prompts
