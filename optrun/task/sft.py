"""Supervised fine-tuning on chats, or on prompts with completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import OverlongRows
from optrun.data.chat import (
    Chat,
    ChatColumns,
    Plain,
    Unreadable,
    chat_columns,
    chat_texts,
    chats,
    read_chat,
)
from optrun.data.examples import Example, Examples, chosen
from optrun.data.loader import LEFT_OUT, Batch, ExampleSource
from optrun.data.mixture import MixedExamples
from optrun.data.packing import DOCUMENT_LENGTHS, Packed
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedRows, StreamRows
from optrun.task.base import join_to_one_row, pad, pad_inputs
from optrun.task.chat_encoder import TARGETS, ChatEncoder, unwritable_row_error
from optrun.task.chat_task import ChatTask, marked_text, reason_for_no_target, row_kind
from optrun.task.chat_template import ChatTemplate, TemplateFailed, ending_ids
from optrun.task.evaluation import IGNORED, MetricAccumulator
from optrun.task.generation import continue_prompt
from optrun.task.tokens import encode_to_inputs, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FIRST_ROWS = 100
"""First rows that are read ahead for notes: of a stream, and for answers and examples to show."""


class Sft(ChatTask):
    """Next-token prediction on chats, with loss on all tokens, on answers or on the completion.

    Masks, the end of a plain completion and truncation are those of TRL's `SFTTrainer`: a
    completion begins at the first token in which the prompt with its completion differs from the
    prompt alone with the opening of an answer.

    Raises:
        ConfigError: No chats, rows that cannot be read, a template that fails, or a split in which
            truncation leaves nothing to learn.
    """

    columns = ("messages_column", "text_column", "target_column")
    predictor = "optrun.runner.predictors:ChatAnswers"
    chunks_loss = True

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield every text of the training rows."""
        return chat_texts(source, source.train)

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the columns and the template, and check the keys for the loss.

        Sets `columns_of` and `kinds` (chats or plain texts) by the key of the split, and empties
        `sample_prompt`, which `read` sets. May change the tokenizer's template and end of text,
        with notes.

        Raises:
            ConfigError: `assistant_only_loss` for plain texts, `completion_only_loss` for whole
                chats, or chats without a template.
        """
        self.use_template(tokenizer)
        self.columns_of: dict[str, ChatColumns] = {}
        self.kinds: dict[str, type[Chat | Plain]] = {}
        self.sample_prompt: tuple[list[int], str] | None = None
        # 1. The columns of each split, and the kind of its rows, which the first row shows.
        for split in source.splits:
            self.columns_of[split.key] = chat_columns(source, split, self.config.layout)
            first = next(self._rows(split), None) if len(split.rows) else None
            if first is None:
                continue
            self.kinds[split.key] = type(first)
            if isinstance(first, Chat):
                self.require_template(split, tokenizer)
            self._refuse_wrong_loss_key(split, first)

        # 2. The template, the token that ends an answer in it, and notes on it.
        if Chat not in self.kinds.values():
            self.template = None  # a tokenizer's template that no row needs is not rendered
        self.set_end_of_answers(tokenizer)
        self.note_template(tokenizer)
        if not isinstance(source.train.rows, StreamRows):
            self._note_answer_spans(source.train)

    def _refuse_wrong_loss_key(self, split: Split, first: Chat | Plain) -> None:
        """Refuse a loss on answers of plain texts, or on completions of whole chats.

        The first row shows the kind of all rows of the split.

        Raises:
            ConfigError: With the key, and the one that fits.
        """
        if isinstance(first, Plain):
            if self.config.assistant_only_loss:
                raise ConfigError(
                    f"task.assistant_only_loss=true: prompts and completions of {split.key} are"
                    " plain texts, without an assistant. Leave it false: task.completion_only_loss"
                    " puts the loss on completions."
                )
        elif first.prompt_turns is None and self.config.completion_only_loss:
            raise ConfigError(
                f"task.completion_only_loss=true: the rows of {split.key} are whole chats, without"
                " a completion. task.assistant_only_loss=true puts the loss on the assistant's"
                " turns."
            )

    # Examples
    # ----------------------------------------------------------------------------------------------

    def _rows(self, split: Split) -> Iterator[Chat | Plain]:
        """Yield the rows of a split, checked by `check_rows`."""
        rows = ((row,) for row in chats(split, self.columns_of[split.key], self.roles))
        return (row for (row,) in self.check_rows(split, rows))

    @property
    def _template_without_marks(self) -> ChatTemplate | None:
        """The template if answers have to be found by comparing renderings; else None.

        None if the template has generation marks, or the loss is not on answers alone.
        """
        template = self.template
        if template is None or template.marked or not self.config.assistant_only_loss:
            return None
        return template

    def _chats_of_examples(self, split: Split) -> Iterator[Chat | Plain]:
        """Yield one chat for each example.

        A row is one example, unless the template writes an earlier answer differently once another
        turn follows: then each answer is an example that ends with it.

        Raises:
            ConfigError: The template cannot write a row.
        """
        template = self._template_without_marks
        for row in self._rows(split):
            # 1. No comparison of renderings is needed to find the answers: one example.
            if template is None or isinstance(row, Plain):
                yield row
                continue

            # 2. A conversation up to each answer; an empty list if earlier answers stay the same.
            try:
                conversations = template.split_behind_answers(
                    row.turns, row.tools, row.prompt_turns or 0
                )
            except TemplateFailed as error:
                raise unwritable_row_error(template, split, row, error) from error
            if not conversations:
                yield row
            else:
                for turns in conversations:
                    yield replace(row, turns=[*turns], only_last_trained=True)

    def _keep_single_answer(self, chat: Chat, template: ChatTemplate) -> Chat:
        """Cut a streamed chat behind its only answer, and mark this answer as the one to train on.

        The result has the turns up to the answer, and `only_last_trained`; turns behind it are
        dropped. This is done only if the template has no generation marks and writes an earlier
        answer differently once another turn follows; any other chat is returned unchanged.

        Raises:
            ConfigError: Such a chat has several answers.
        """
        if self._template_without_marks is None:
            return chat
        # The turns up to each answer; empty if later turns do not change how answers are written.
        conversations = template.split_behind_answers(
            chat.turns, chat.tools, chat.prompt_turns or 0
        )
        if not conversations:
            return chat
        if len(conversations) > 1:
            raise ConfigError(
                f"it has {len(conversations)} answers, and {template.origin}, which has no"
                " generation marks, writes an answer differently once another turn follows. So"
                " each answer is an example of its own, and a row of a stream is one example."
                " Take data.streaming=false, or a template with marks, such as"
                " task.chat_template=chatml."
            )
        return replace(chat, turns=[*conversations[0]], only_last_trained=True)

    def _note_answer_spans(self, split: Split) -> None:
        """Note how answers are found, and warn if the template drops a part of them.

        Does nothing if the template has generation marks, or without `assistant_only_loss`. The
        first 100 rows are read.
        """
        template = self._template_without_marks
        if template is None:
            return
        # 1. The chats of the first rows of which each answer is an example of its own.
        first_rows = np.arange(min(len(split.rows), _FIRST_ROWS), dtype=np.int64)
        chats_of_answers = [
            chat
            for chat in self._chats_of_examples(split.take(first_rows))
            if isinstance(chat, Chat) and chat.only_last_trained
        ]

        # 2. How answers are found.
        note = (
            f"{template.origin} has no generation marks: answers are found by comparing the text up"
            " to each turn"
        )
        if chats_of_answers:
            note += "; each is an example, since later turns change how earlier ones are written"
        if note not in self.notes:
            self.notes.append(note)

        # 3. Count answers that the template does not write whole: their text is not in the rendered
        # chat, which ends with the answer.
        cut_count = 0
        for chat in chats_of_answers:
            answer = chat.turns[-1]["content"].strip()
            cut_count += answer not in template.text(chat.turns, chat.tools)
        if cut_count:
            self.notes.append(
                f"warning: {template.origin} leaves out a part of {cut_count:,} of the first"
                f" {len(chats_of_answers):,} answers of {split.key}, such as their thinking; a"
                " template with {% generation %} marks may keep it"
            )

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read examples with `input_ids` and `targets`; with packing a block holds several of them.

        The first evaluation split also sets `sample_prompt`, the prompt of `sample`. Notes say how
        many rows became several examples or were dropped.

        Raises:
            ConfigError: A row that the template cannot write, or without a target.
        """
        # 1. A stream, and a split without rows.
        if isinstance(split.rows, StreamRows):
            return self._stream(split, split.rows, tokenizer)
        part = split.take(chosen(len(split.rows), limit, seed=seed))
        if not len(part.rows):
            return Examples(np.zeros(1, dtype=np.int64), {})  # none
        if split is not source.train and self.sample_prompt is None:
            self.sample_prompt = self._prompt_to_sample(part, tokenizer)

        # 2. Encode the rows; the key of the cache has all that decides which examples they give.
        columns = str(self.columns_of[split.key])
        template = self._template_without_marks
        template_key = template.key() if template else ""
        rows = partial(self._chats_of_examples, part)
        examples = self.encode_rows(part, tokenizer, rows, "sft", columns, template_key)
        if len(examples) > len(part.rows):
            self.notes.append(
                f"{part.key}: {len(part.rows):,} chats are {len(examples):,} examples, one an"
                " answer"
            )

        # 3. Leave out examples without a target; join the others to blocks with packing. For a
        # message the rows are read again, to find the one of an example.
        (with_target,) = self.drop_rows_without_target(
            [examples], part, lambda: [row.row or 0 for row in rows()]
        )
        if self.config.packing:
            return Packed(with_target, self.max_length)
        return with_target

    def _stream(
        self, split: Split, rows: StreamRows, tokenizer: PreTrainedTokenizerBase
    ) -> StreamedRows:
        """Stream a split: each row is checked and encoded when a batch needs it.

        A bad row raises ConfigError at that moment. A row without a target is refused, or, if
        truncation removed its targets and `task.overlong_rows=drop`, marked for its batch to skip.
        """
        columns = self.columns_of[split.key]
        encoder = ChatEncoder(self.config, self.template, split, tokenizer, self.max_length)

        def encode_row(row: Row) -> Example:
            # 1. Read and check the row. Its number is not known here (None): the reader of the
            # stream puts the row in place of "it".
            try:
                chat = read_chat(row, columns, self.roles, None)
            except Unreadable as error:
                raise ConfigError(f"it {error}") from None
            chat = self._check_streamed(split, chat)

            # 2. Encode it, truncated.
            example = {}
            for name, values in encoder([chat], True).items():
                example[name] = np.asarray(values[0], dtype=np.int64)

            # 3. If it has no target: raise, unless it was truncated and such rows are dropped. Then
            # mark it, for its batch to skip.
            has_target = example[TARGETS][1:].any()  # the first token is never predicted
            if not has_target:
                full_row = encoder([chat], False)["input_ids"][0]
                self._refuse_without_target(len(full_row))
                example[LEFT_OUT] = np.ones(1, dtype=np.int64)
            return example

        examples = StreamedRows(rows.select_columns(columns.all), encode_row, encoder.key())
        if self.config.overlong_rows is OverlongRows.drop:
            self._note_left_out(split, examples)
        return examples

    def _check_streamed(self, split: Split, row: Chat | Plain) -> Chat | Plain:
        """Check the kind, roles and keys of a streamed row; a chat is returned with one answer.

        Raises:
            ConfigError: See `check_rows` and `_keep_single_answer`.
        """
        if type(row) is not self.kinds[split.key]:
            raise ConfigError(
                f"it has {row_kind(row)}, unlike the first row. Write all rows alike."
            )
        if isinstance(row, Plain):
            return row
        assert self.template is not None
        self.check_roles_and_keys(split, row, self.template)
        return self._keep_single_answer(row, self.template)

    def _refuse_without_target(self, tokens: int) -> None:
        """Refuse a streamed row without a target, unless truncated rows may be dropped.

        Args:
            tokens: Length of the row before truncation.

        Raises:
            ConfigError: The row was not truncated, or `task.overlong_rows=refuse`.
        """
        if tokens <= self.max_length:
            raise ConfigError(
                f"it has no token to learn: {reason_for_no_target(tokens)}. Leave such rows out."
            )
        if self.config.overlong_rows is OverlongRows.refuse:
            raise self.overlong_row_error("it", tokens)

    def _note_left_out(self, split: Split, examples: StreamedRows) -> None:
        """Note how many of the first 100 rows have no target and are left out of their batches.

        The other rows are only read during training. The note is written for 0 rows as well, since
        later ones may be left out without a word.

        Raises:
            ConfigError: The split has rows, at most 100, and all are left out.
        """
        first = min(len(examples), _FIRST_ROWS)
        count = sum(LEFT_OUT in examples[index] for index in range(first))
        if 0 < count == len(examples):  # all of them
            raise self.all_rows_overlong_error(split)
        self.notes.append(
            f"{split.key}: a row is left out of its batch if data.max_length={self.max_length} cuts"
            f" off all that carries loss: {count:,} of the first {first:,} rows"
            " (task.overlong_rows=drop)"
        )

    # Batches
    # ----------------------------------------------------------------------------------------------

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to `input_ids`, `attention_mask` and `labels`, shape (batch, longest).

        Packed blocks have `position_ids` instead of a mask, from 0 in each document, by which
        models of transformers separate documents; with `one_row` they are joined to shape
        (1, tokens). The first token of a document has no label. Each padding token is a document of
        its own, at position 0.

        Example: a block of two documents, [5, 6, 7] with the targets [0, 1, 1] and [8, 9] with
        [1, 1], has the labels [-100, 6, 7, -100, 9] and the positions [0, 1, 2, 0, 1].
        """
        # 1. A label for each target.
        rows = [example["input_ids"] for example in examples]
        row_labels = []
        for example, row in zip(examples, rows, strict=True):
            row_labels.append(np.where(example[TARGETS] != 0, row, IGNORED))
        labels = pad(row_labels, IGNORED)
        if DOCUMENT_LENGTHS not in examples[0]:
            return {**pad_inputs(examples, self.padding), "labels": labels}

        # 2. Packed blocks: DOCUMENT_LENGTHS has the number of tokens of each document of a block.
        row_positions = [
            np.concatenate([np.arange(size) for size in example[DOCUMENT_LENGTHS]])
            for example in examples
        ]
        positions = pad(row_positions, 0)
        labels[positions == 0] = IGNORED  # a first token is not predicted from the document before
        batch = {"input_ids": pad(rows, self.padding), "labels": labels, "position_ids": positions}
        if self.one_row:
            return join_to_one_row(batch, map(len, rows))
        return batch

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of a batch without padding, and its rows.

        In packed blocks the documents are counted instead of rows. Example: the positions
        [0, 1, 2, 0, 1, 0, 0] are two documents of 3 and 2 tokens and two padding tokens: (5, 2).
        """
        if "position_ids" not in batch:
            return super().count_tokens_and_examples(batch)
        # Each document has two tokens or more, so that exactly one is at position 1. At position 0
        # are the first token of each document, and padding.
        positions = batch["position_ids"]
        documents = int((positions == 1).sum())
        behind_first = int((positions > 0).sum())
        return behind_first + documents, documents

    def running_metrics(self) -> MetricAccumulator:
        """Construct loss, perplexity and accuracy over target tokens."""
        return self.token_metrics()

    # For people
    # ----------------------------------------------------------------------------------------------

    def _prompt_to_sample(
        self, split: Split, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[int], str]:
        """Return ids and text of the first row before its last answer, the prompt of `sample`."""
        # 1. A plain text.
        row = next(self._rows(split))
        if isinstance(row, Plain):
            (ids,) = prompt_ids(tokenizer, [row.prompt])
            return ids, row.prompt

        # 2. A chat, with the opening of an answer.
        assert self.template is not None
        try:
            text = self.template.text(row.turns_before_answer(), row.tools, generation_prompt=True)
        except TemplateFailed as error:
            raise unwritable_row_error(self.template, split, row, error) from error
        (ids,) = encode_to_inputs(tokenizer, [text], None, add_special_tokens=False)["input_ids"]
        return ids, text

    def sample(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,  # noqa: ARG002
    ) -> tuple[str, str] | None:
        """Answer the first evaluation row, with the most probable token each time.

        None without an evaluation row, for a stream, and with `task.sample_tokens=0`.
        """
        if self.sample_prompt is None or not self.config.sample_tokens:
            return None
        ids, text = self.sample_prompt
        ends = ending_ids(tokenizer, self.end)
        return text, continue_prompt(model, tokenizer, ids, self.config.sample_tokens, ends=ends)

    def shown(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Decode the first training example, with its targets between « and ».

        Examples that are left out are passed over; None if the first 100 are. In a mixture it is
        from the first source.
        """
        examples: Any = self.train
        if isinstance(examples, MixedExamples):
            examples = next(iter(examples.sources.values()))
        if isinstance(examples, Packed):
            examples = examples.documents
        for index in range(min(len(examples), _FIRST_ROWS)):
            example = examples[index]
            if LEFT_OUT not in example:
                return marked_text(tokenizer, example)
        return None
