"""Encode chats, and plain prompts with completions, to token ids and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import PreferenceConfig, SftConfig
from optrun.data.cache import digest
from optrun.data.chat import Chat, Plain
from optrun.data.source import Split
from optrun.task.chat_template import (
    OTHER_TEMPLATE,
    ChatTemplate,
    Span,
    TemplateFailed,
    common_prefix_length,
)
from optrun.task.tokens import (
    encode_to_inputs,
    ids_around_text,
    prompt_ids,
    tokenize_rows,
    tokenizer_key,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TARGETS = "targets"
"""1 where a token carries loss, else 0."""


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes rows to `input_ids` and `targets`.

    Args:
        config: Its `assistant_only_loss` and `completion_only_loss` say which tokens carry loss.
        template: The chat template; None: the rows are plain texts.
        split: The rows, for messages.
        tokenizer: The tokenizer, with the template.
        max_length: Tokens after which rows are truncated.
    """

    config: SftConfig | PreferenceConfig
    template: ChatTemplate | None
    split: Split
    tokenizer: PreTrainedTokenizerBase
    max_length: int

    def key(self) -> str:
        """Digest everything that decides the tokens of a row: tokenizer, template and settings."""
        config = self.config
        template = self.template
        settings = (
            f"{config.assistant_only_loss} {config.completion_only_loss} {self.tokenizer.eos_token}"
        )
        written = "" if template is None else template.key()
        return digest(
            "sft-3", tokenizer_key(self.tokenizer), written, settings, str(self.max_length)
        )

    def __call__(self, batch: list[Chat | Plain], cut: bool) -> dict[str, list[Any]]:
        """Encode rows, all of them chats or all plain texts.

        Args:
            batch: The rows.
            cut: Whether rows are truncated to `max_length`.

        Returns:
            `input_ids`, and `targets` with 1 for each token that carries loss, else 0.

        Raises:
            ConfigError: The template cannot write a row, or the tokenizer does not say which
                characters its tokens are.
        """
        if isinstance(batch[0], Plain):
            ids, targets = self._encode_plain(batch)
        else:
            ids, targets = self._encode_chats(batch)
        length = self.max_length if cut else None
        return {
            "input_ids": [row[:length] for row in ids],
            TARGETS: [row[:length] for row in targets],
        }

    def _encode_plain(self, batch: Sequence[Any]) -> tuple[list[list[int]], list[np.ndarray]]:
        """Encode prompts with completions, each row with one end-of-text token.

        All tokens are targets; those of the prompt are not, unless `completion_only_loss` is false.
        """
        # 1. Encode prompt and completion as one text, which ends once; `prompt_ids` adds nothing
        # behind it.
        end = self.tokenizer.eos_token or ""
        texts = [f"{row.prompt}{row.completion.removesuffix(end)}{end}" for row in batch]
        row_ids = prompt_ids(self.tokenizer, texts)
        if not end:  # the tokenizer may put another token behind a text, such as [SEP]
            _, after = ids_around_text(self.tokenizer)
            row_ids = [ids + after for ids in row_ids]

        # 2. Mark all tokens as targets, and unmark those of prompts.
        targets = [np.ones(len(row), dtype=np.int64) for row in row_ids]
        if self.config.completion_only_loss is not False:
            prompts = prompt_ids(self.tokenizer, [row.prompt for row in batch])
            _mask_prompts(targets, row_ids, prompts)
        return row_ids, targets

    def _encode_chats(self, batch: Sequence[Any]) -> tuple[list[list[int]], list[np.ndarray]]:
        """Encode conversations, written by the template.

        With `assistant_only_loss` the targets are the tokens of answers, else all tokens. If the
        rows are prompts with completions, the tokens of prompts are no targets, unless
        `completion_only_loss` is false.
        """
        template = self.template
        assert template is not None
        config = self.config

        # 1. Render each row; with `assistant_only_loss` also find the spans of its answers in
        # characters. Render its prompt, with the opening of an answer, if that is to be no target:
        # either all rows have one, or none has.
        texts: list[str] = []
        answer_spans: list[list[Span]] = []
        prompts: list[str] = []
        for row in batch:
            try:
                if not config.assistant_only_loss:
                    text = template.text(row.turns, row.tools)
                elif row.only_last_trained:
                    text, spans = template.find_last_answer(row.turns, row.tools)
                    answer_spans.append(spans)
                else:
                    text, spans = template.find_answers(row.turns, row.tools)
                    answer_spans.append(spans)
                texts.append(text)
                if row.prompt_turns is not None and config.completion_only_loss is not False:
                    prompt = row.turns[: row.prompt_turns]
                    prompts.append(template.text(prompt, row.tools, generation_prompt=True))
            except TemplateFailed as error:
                raise unwritable_row_error(template, self.split, row, error) from error

        # 2. Encode the texts, and mark the targets: 1 for each target, an array for each row.
        if config.assistant_only_loss:
            row_ids, targets = self._encode_with_spans(texts, answer_spans)
        else:
            row_ids = self._token_ids(texts)
            targets = [np.ones(len(row), dtype=np.int64) for row in row_ids]

        # 3. Unmark the prompts; the arrays are changed.
        if prompts:
            _mask_prompts(targets, row_ids, self._token_ids(prompts))
        return row_ids, targets

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        """Encode rendered texts, without adding special tokens: the template has written them."""
        return encode_to_inputs(self.tokenizer, texts, None, add_special_tokens=False)["input_ids"]

    def _encode_with_spans(
        self, texts: list[str], spans: list[list[Span]]
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Encode texts; a token with at least one character inside a span is a target.

        Args:
            texts: Rendered conversations.
            spans: For each text, the spans of its answers in characters.

        Raises:
            ConfigError: The tokenizer is a slow one, which does not return offsets of tokens.
        """
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"task.assistant_only_loss=true: {type(self.tokenizer).__name__} does not say which"
                " characters of a text its tokens are. Take a fast tokenizer, or rows of prompt"
                " and completion."
            )
        encoding = tokenize_rows(
            self.tokenizer, texts, None, add_special_tokens=False, return_offsets_mapping=True
        )
        targets = []
        for offsets, answer_spans in zip(encoding["offset_mapping"], spans, strict=True):
            # The first character of each token, and the one after its last.
            token_begins, token_ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
            is_target = np.zeros(len(token_begins), dtype=np.int64)
            for begin, end in answer_spans:
                is_target[(token_begins < end) & (token_ends > begin)] = 1  # they overlap
            targets.append(is_target)
        return encoding["input_ids"], targets


def _mask_prompts(
    targets: list[np.ndarray], rows: list[list[int]], prompts: list[list[int]]
) -> None:
    """Set the targets of each row to 0 as far as it equals its prompt, in place.

    That may be less than the prompt: the last token of a prompt may be another with the answer.

    Example: the row [1, 2, 7, 8] with the prompt [1, 2, 3] gets the targets [0, 0, 1, 1].
    """
    for row_targets, row, prompt in zip(targets, rows, prompts, strict=True):
        row_targets[: common_prefix_length(prompt, row)] = 0


def unwritable_row_error(
    template: ChatTemplate, split: Split, row: Chat, error: TemplateFailed
) -> ConfigError:
    """Build the error for a row with a failed template.

    It cannot be written, or its answers cannot be found.
    """
    return ConfigError(f"{template.origin}: {row_name(split, row)} {error}. {OTHER_TEMPLATE}")


def row_name(split: Split, row: Chat | Plain) -> str:
    """Name a row in a message; for a stream "this row": its reader adds file and number."""
    if row.row is None:
        return "this row"
    return f"row {split.number(row.row)} of {split.key}"
