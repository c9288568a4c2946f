"""Texts that a model writes: after a prompt, from a text, or as the answer in a chat."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optrun.base.errors import ConfigError, did_you_mean
from optrun.data.chat import ROLES, question_columns, questions
from optrun.data.columns import texts
from optrun.runner.prediction.base import Inputs, Predictor, Values
from optrun.task.base import pad_inputs
from optrun.task.chat_encoder import row_name
from optrun.task.chat_template import TemplateFailed, no_template, use_template
from optrun.task.language_model import ids_around_text
from optrun.task.tokens import begin_of_text

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_TOKENS = 64
"""`generation.max_new_tokens` where neither the model nor the task says how long a text may be."""


class TextGeneration(Predictor):
    """Prompts to continuations, by `model.generate`; `prompts` is what another task overrides."""

    generates: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    is_decoder: ClassVar[bool] = True
    """Whether prompt and continuation share the model's positions: there is no encoder."""

    def encode(self) -> list[Inputs]:
        """Settle the options of the generation, and encode prompts; a long one is cut on the left.

        Raises:
            ConfigError: The model cannot generate, or has no room for a prompt.
        """
        model: Any = self.predicting.model
        if not model.can_generate():
            raise ConfigError(
                f"task={self.predicting.task.name}: {type(model).__name__} of transformers cannot"
                " generate."
            )
        options = generation_config(self.predicting.generation, model.generation_config)
        positions = getattr(model.config, "max_position_embeddings", None)
        room = positions if self.is_decoder else None
        if options.max_new_tokens is None and options.max_length is None:
            longest = getattr(self.predicting.task, "max_target_length", DEFAULT_TOKENS)
            options.max_new_tokens = longest if room is None else min(longest, room // 2)
        if options.pad_token_id is None:
            options.pad_token_id = self.padding
        if options.eos_token_id is None:
            options.eos_token_id = self.tokenizer.eos_token_id
        self.options = options
        prompts = self.prompts()
        if room is not None:
            begin = -_longest_prompt(options, room)
            prompts = [ids[begin:] for ids in prompts]
        for row, ids in enumerate(prompts):
            self.expect_tokens(row, ids)
        return [{"input_ids": np.asarray(ids, dtype=np.int64)} for ids in prompts]

    def prompts(self) -> list[list[int]]:
        """Encode prompts, begun as the tokenizer begins a text.

        They stand in the column that is named, else in `prompt`, else in the only one of texts.
        """
        columns = self.predicting.source.columns
        is_named = columns is not None and (columns.text_column or columns.eval_text_column)
        usual = "prompt" in self.split.rows.column_names
        column = "prompt" if usual and not is_named else self.text_column()
        start, _ = ids_around_text(self.tokenizer)
        begin = begin_of_text(self.tokenizer)
        prompts = [text.removeprefix(begin) for text in texts(self.split, column)]
        encoding = self.tokenizer(prompts, add_special_tokens=False, verbose=False)
        # An empty prompt is the beginning of a text: what stood between documents in training.
        usual_begins = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        empty = [token for token in usual_begins if token is not None][:1]
        return [start + ids or empty for ids in encoding["input_ids"]]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Continue a batch of prompts, padded on the left if there is no encoder."""
        batch = pad_inputs(inputs, self.padding, left=self.is_decoder)
        try:
            ids = self.predicting.run(
                batch,
                self.predicting.model.generate,  # type: ignore[operator,unused-ignore]
                generation_config=self.options,
                tokenizer=self.tokenizer,
            )
        except (TypeError, ValueError, AttributeError) as error:
            if not self.predicting.generation:
                raise
            raise _refused(self.predicting.generation, error) from error
        begin = batch["input_ids"].shape[1] if self.is_decoder else 0
        written = self.tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
        return [{"generation": text} for text in written]


class TextToText(TextGeneration):
    """Texts to texts, by encoder and decoder."""

    cuts: ClassVar[bool] = True
    is_decoder: ClassVar[bool] = False

    def prompts(self) -> list[list[int]]:
        """Encode as in training."""
        return [row["input_ids"].tolist() for row in self.encode_texts(self.text_column())]


class ChatAnswers(TextGeneration):
    """Turns up to the last of the assistant, written by the run's template, to what it says then.

    A row needs no completion. A text is continued as it stands, as the prompts of plain rows are.
    """

    columns: ClassVar[tuple[str, ...]] = ("messages_column", "text_column")

    def prompts(self) -> list[list[int]]:
        """Encode each conversation with the opening of an answer; a text as in training.

        Raises:
            ConfigError: A row that cannot be read or written.
        """
        template = use_template(self.tokenizer, None)
        layout = getattr(self.predicting.task, "layout", None)
        columns = question_columns(self.predicting.source, self.split, layout)
        begin = begin_of_text(self.tokenizer)
        prompts = []
        for row in questions(self.split, columns, template.roles if template else ROLES):
            is_plain = isinstance(row, str)
            if isinstance(row, str):
                text = row.removeprefix(begin)
            elif template is None:
                raise no_template(f"{self.split.key} has conversations")
            else:
                try:
                    text = template.text(row.turns, row.tools, opening=True)
                except TemplateFailed as error:
                    raise ConfigError(f"{row_name(self.split, row)} {error}.") from error
            encoding = self.tokenizer(text, add_special_tokens=is_plain, verbose=False)
            prompts.append(encoding["input_ids"])
        return prompts


def _longest_prompt(options: GenerationConfig, room: int) -> int:
    """Count the positions left for a prompt.

    Raises:
        ConfigError: None are left.
    """
    new = options.max_new_tokens
    longest = min(options.max_length, room) - 1 if new is None else room - new
    if longest < 1:
        raise ConfigError(
            f"generation.max_new_tokens={new}: the model has {room:,} positions for prompt and"
            f" continuation together. Expected {room - 1:,} or fewer."
        )
    return int(longest)


def generation_config(changes: Mapping[str, object], base: GenerationConfig) -> GenerationConfig:
    """Return the generation options of a model with changes.

    Args:
        changes: Names of transformers to values.
        base: Of the model.

    Raises:
        ConfigError: A name that transformers does not have, a value that does not fit, or one
            without effect.
    """
    config = copy.deepcopy(base)
    if changes.get("max_new_tokens") is not None:
        config.max_length = None
    try:
        type(base)(**changes).validate(strict=True)
        unknown = config.update(**changes)
    except (ValueError, TypeError) as error:
        raise _refused(changes, error) from error
    for name in unknown:
        near = did_you_mean(name, vars(config))
        raise ConfigError(f"generation.{name}: transformers has no such option. {near}")
    if config.num_return_sequences not in (None, 1):
        raise ConfigError(
            f"generation.num_return_sequences={config.num_return_sequences}: expected 1, since one"
            " text is written for each row."
        )
    return config


def _refused(changes: Mapping[str, object], error: Exception) -> ConfigError:
    """Build the error for refused options from transformers' message."""
    line = " ".join(str(error).replace("`", "").split())
    options = ", ".join(f"generation.{name}={value}" for name, value in changes.items())
    return ConfigError(f"{options or 'generation'}: {line[:400]}")
