"""Texts that a model writes: after a prompt, or from a text.

The options are those of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optrun.base.errors import ConfigError, did_you_mean
from optrun.data.columns import text_column
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values
from optrun.task.language_model import around

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_TOKENS = 64
"""`generation.max_new_tokens` where nothing says how long a text may be."""
_OF_OTHERS = (
    "output_",
    "return_dict",
    "_",
    "transformers_version",
    "is_assistant",
    "compile_config",
    "cache_config",
    "continuous_batching",
    "watermarking",
    "assistant_",
)
"""What names of transformers begin with that say nothing of the text, or hold objects."""
_KINDS = {"a whole number": (int,), "a number": (int, float), "true or false": (bool,)}
_KEYS = {
    "a whole number": (
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "min_length",
        "num_beams",
        "top_k",
        "num_return_sequences",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
    ),
    "a number": (
        "temperature",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "max_time",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "length_penalty",
        "guidance_scale",
    ),
    "true or false": ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"),
}
"""Types of options: transformers looks at few of them before a value meets a comparison."""
OPTIONS = [name for names in _KEYS.values() for name in names]
"""The options most used, by transformers' names."""


def generation_config(given: Mapping[str, object], base: GenerationConfig) -> GenerationConfig:
    """Make the generation options of a model with changes.

    Args:
        given: Names of transformers to values.
        base: Of the model.

    Raises:
        ConfigError: A name that transformers does not have, a value that does not fit, or one
            without effect.
    """
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if not name.startswith(_OF_OTHERS)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"generation.{name}: no such option of transformers' generation."
                f" {did_you_mean(name, known)}"
            )
    for kind, names in _KEYS.items():
        for name in names:
            value = given.get(name)
            if value is not None and type(value) not in _KINDS[kind]:
                raise ConfigError(f"generation.{name}={value}: expected {kind}.")
    made = copy.deepcopy(base)
    try:
        alone = GenerationConfig(**given)
        alone.validate(strict=True)
        made.update(**given)
        made.validate()
    except (ValueError, TypeError) as error:
        raise _refused(given, error) from error
    return made


def _refused(given: Mapping[str, object], error: Exception) -> ConfigError:
    """Make the refusal of options from what transformers says of them."""
    line = " ".join(str(error).replace("`", "").split())
    shown = ", ".join(f"generation.{name}={value}" for name, value in given.items()) or "generation"
    return ConfigError(f"{shown}: {line if len(line) <= 400 else line[:400] + ' ...'}")


class TextGeneration(Predictor):
    """Prompts to continuations, by `model.generate`.

    `find_column` and `prompts` are what a task with other rows overrides.
    """

    generates: ClassVar[bool] = True
    cuts: ClassVar[bool] = False
    side_by_side: ClassVar[bool] = True
    """Whether prompt and continuation share the model's positions: there is no encoder."""

    def inspect(self) -> None:
        """Find the prompts, and make the options of the generation."""
        self.column = self.find_column()
        model = self.predicting.model
        base = getattr(model, "generation_config", None)
        if base is None or not model.can_generate():
            raise ConfigError(
                f"task={self.predicting.task.name}: {type(model).__name__} of transformers cannot"
                " generate."
            )
        given = dict(self.given)
        room = getattr(model.config, "max_position_embeddings", None) if self.side_by_side else None
        self.options_of_generation = generation_config(given, base)
        config = self.options_of_generation
        if given.get("max_new_tokens") is None and given.get("max_length") is None:
            most = getattr(self.predicting.task, "max_target_length", DEFAULT_TOKENS)
            config.max_new_tokens = most if room is None else min(most, room // 2)
        if config.max_new_tokens is not None:
            config.max_length = None
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(self.tokenizer, name, None))
        if config.pad_token_id is None:
            config.pad_token_id = self.padding
        self.several = config.num_return_sequences or 1
        self.room = self._room_for_prompts(room)

    def find_column(self) -> str:
        """Find the column of prompts.

        As named, else the only column of texts, or the one called `prompt` or `text`.

        Raises:
            ConfigError: There is none, or several; a row that is no text.
        """
        own, columns = self.rows.columns, self.split.rows.column_names
        if own.text_column is None and own.eval_text_column is None and "prompt" in columns:
            column = "prompt"
        else:
            column = text_column(self.rows.source, self.split, taken=self.rows.taken())
        self.read(column)
        return column

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode each prompt, begun as the tokenizer begins a text.

        Args:
            numbers: Indices of rows.
        """
        start, _ = around(self.tokenizer)
        encoded = self.tokenizer(
            self.texts(self.column, numbers), add_special_tokens=False, verbose=False
        )["input_ids"]
        # Nothing to go on from is the begin of a text: what stood between the documents of the
        # training.
        empty = [
            id_
            for id_ in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            if id_ is not None
        ][:1]
        return [start + ids or empty for ids in encoded]

    def _room_for_prompts(self, room: int | None) -> int | None:
        """Count the positions that the continuation leaves; None: as many as one likes.

        Raises:
            ConfigError: None are left.
        """
        config = self.options_of_generation
        if room is None:
            return None
        left = (
            room - config.max_new_tokens
            if config.max_new_tokens is not None
            else min(config.max_length - 1, room - 1)
        )
        if left < 1:
            raise ConfigError(
                f"generation.max_new_tokens={config.max_new_tokens}: the model has {room:,}"
                f" positions for prompt and continuation together. Expected {room - 1:,} or fewer."
            )
        return int(left)

    @property
    def shape(self) -> Shape:
        """A text, or several."""
        return {"generation": str if self.several == 1 else [str]}

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode prompts; of one that leaves no room only its end."""
        kept = None if self.room is None else -self.room
        return self.expect_tokens(
            [
                {"input_ids": np.asarray(ids[kept:], dtype=np.int64)}
                for ids in self.prompts(numbers)
            ],
            numbers,
        )

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Continue a batch of prompts, padded on the left."""
        batch = self.predicting.to_device(self.pad_inputs(inputs, left=self.side_by_side))
        try:
            with self.predicting.autocast():
                made = self.predicting.model.generate(
                    **batch, generation_config=self.options_of_generation, tokenizer=self.tokenizer
                )
        except (
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # of options that do not go together
            if not self.given:
                raise
            raise _refused(self.given, error) from error
        begin = batch["input_ids"].shape[1] if self.side_by_side else 0
        found = self.tokenizer.batch_decode(made[:, begin:], skip_special_tokens=True)
        if self.several == 1:
            return [{"generation": text} for text in found]
        return [
            {"generation": found[at : at + self.several]}
            for at in range(0, len(found), self.several)
        ]


class TextToText(TextGeneration):
    """Texts to texts, by encoder and decoder."""

    cuts: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = False

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode as in training."""
        encoded: list[list[int]] = self.tokenize(self.texts(self.column, numbers))["input_ids"]
        return encoded
