"""The base class of tasks on conversations: chat template, encoding, rows without a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import OverlongRows
from optrun.data.cache import digest_if_known
from optrun.data.cached_arrays import cached_arrays, rows_without_marks
from optrun.data.chat import ROLES, Chat, Plain
from optrun.data.examples import Example, Examples, Selected, encode
from optrun.data.source import Split
from optrun.task.base import Task, TextKind
from optrun.task.chat_encoder import TARGETS, ChatEncoder, row_name, unwritable_row_error
from optrun.task.chat_template import (
    KEY,
    NAMES,
    OTHER_TEMPLATE,
    ChatTemplate,
    TemplateFailed,
    no_template_error,
    use_template,
)
from optrun.task.tokens import largest_id_plus_one

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Chats = TypeVar("Chats", bound=tuple[Chat | Plain, ...])
"""A row: one chat or plain text, or the chosen and the rejected one of a pair."""
_READ_KEYS = ("role", "content", "instruction", "input")
"""Keys of turns that are not checked: every template reads them, or `content` repeats them."""
_LEARNT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of turns whose text the model would learn to write, if the template read it."""
_MAX_SHOWN = 4000
"""Characters of a training example that are shown."""


class ChatTask(Task):
    """A task on conversations or plain texts in which some tokens carry loss.

    Attributes:
        template: The chat template; None: the rows are plain texts.
        known_roles: Roles that were found in rows, and that the template writes.
        known_keys: Keys of turns that were found in rows, and checked against the template.
        end: The token that ends an answer; None: the rows are plain texts, or it is no single
            token.
    """

    shift = True
    text_kind = TextKind.CHAT
    template: ChatTemplate | None
    known_roles: set[str]
    known_keys: set[str]
    end: int | None

    def use_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set `template` to `task.chat_template`, else to the tokenizer's own.

        None if there is neither. A configured template is put into the tokenizer. Clears
        `known_roles` and `known_keys`.
        """
        self.template = use_template(tokenizer, self.config.chat_template)
        self.known_roles = set()
        self.known_keys = set()

    @property
    def roles(self) -> frozenset[str]:
        """The roles that rows may have."""
        if self.template is None:
            return ROLES
        return self.template.roles

    def check_rows(self, split: Split, rows: Iterable[Chats]) -> Iterator[Chats]:
        """Yield rows unchanged, after a check of each: its kind, its roles, the keys of its turns.

        Raises:
            ConfigError: A row of another kind than the first one (chats or plain texts); a role
                that the template does not write; a key that it does not read.
        """
        first: Chat | Plain | None = None
        for number, row in enumerate(rows):
            # 1. All rows are chats, or all are plain texts; both sides of a pair are alike.
            if first is None:
                first = row[0]
            if type(row[0]) is not type(first):
                raise ConfigError(
                    f"{split.where(number)} has {row_kind(row[0])}, row {split.number(0)}"
                    f" {row_kind(first)}. Write all rows alike."
                )

            # 2. The template writes the roles of a chat, and reads its keys.
            for chat in row:
                if isinstance(chat, Chat) and self.template is not None:
                    self.check_roles_and_keys(split, chat, self.template)
            yield row

    def encode_rows(
        self,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        rows: Callable[[], Iterator[Chat | Plain]],
        *rows_key: str,
    ) -> Examples:
        """Encode rows to `input_ids` and `targets`, or map them from the cache.

        Args:
            split: Where the rows are from, for messages and the cache key.
            tokenizer: Of the model.
            rows: Yields the rows anew at each call; not called if they are cached.
            rows_key: Everything else that decides what `rows` yields, for the cache key.
        """
        encoder = ChatEncoder(self.config, self.template, split, tokenizer, self.max_length)
        return encode(
            rows,
            encoder,
            encoder.key(),
            longest=self.max_length,
            content=digest_if_known(split.content, *rows_key),
            ids_below=largest_id_plus_one(tokenizer),
        )

    def require_template(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set `template` to chatml if there is none, with a note.

        Only if the tokenizer has the tokens of chatml, as every chat tokenizer has that optrun
        trains.

        Raises:
            ConfigError: There is no template, and the tokenizer lacks these tokens.
        """
        if self.template is not None:
            return
        if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
            raise no_template_error(f"{split.key} has conversations")
        self.template = use_template(tokenizer, "chatml")
        self.notes.append(
            "task.chat_template=chatml: the tokenizer has its tokens, and no template of its own"
        )

    def set_end_of_answers(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set `end` to the token behind an answer, and make it the tokenizer's `eos_token`.

        `end` is None if that is not a single token, or without a template. `eos_token` stays if the
        template is the tokenizer's own, or writes `eos_token` itself. A note names a change.

        Raises:
            ConfigError: The template writes nothing behind an answer.
        """
        self.end: int | None = None
        template = self.template
        if template is None:
            return
        # 1. Find the token. (The text is None if the template fails on the probe, which has a
        # question and an answer: then nothing is known, and `end` stays None.)
        if template.text_behind_answers() == "":
            raise ConfigError(
                f"{template.origin} writes nothing behind an answer, so the model would never learn"
                " to stop. Give a template that ends a turn,"
                f" {KEY}={'|'.join(NAMES)}, or a jinja file of yours."
            )
        self.end = template.end_of_answers()

        # 2. Make it the tokenizer's `eos_token`, unless there is none, or they are the same; or the
        # template goes with this tokenizer: it is the tokenizer's own, or writes its `eos_token`.
        if self.end in (None, tokenizer.eos_token_id) or template.is_own:
            return
        if "eos_token" in template.source:
            return
        before = tokenizer.eos_token
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(self.end)
        self.notes.append(
            f"the tokenizer's end of text is now {tokenizer.eos_token}, which ends an answer in"
            f" {template.origin}; it was {before}"
        )

    def adapt(self, model: PreTrainedModel) -> None:
        """Let `generate` stop at the end of an answer, with a note.

        Adds its token to `generation_config.eos_token_id`, unless it is there already.
        """
        generation: Any = getattr(model, "generation_config", None)
        if self.end is None or generation is None:
            return
        # An id, a list of ids, or None in a generation config; here always a list.
        end_ids = generation.eos_token_id
        if end_ids is None:
            end_ids = []
        elif not isinstance(end_ids, list):
            end_ids = [end_ids]
        if self.end in end_ids:
            return
        generation.eos_token_id = [self.end, *end_ids] if end_ids else self.end
        self.notes.append(
            f"generation_config.json of the trained model also ends texts at token {self.end},"
            " which ends an answer"
        )

    def note_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Add warnings about unknown control tokens of the template, and a date in it, to `notes`.

        The tokenizer splits control tokens that it does not know. Does nothing without a template.
        """
        template = self.template
        if template is None:
            return
        unknown = template.unknown_tokens()
        if unknown:
            # These two end a turn with a control token of their own.
            other_names = ", ".join(name for name in NAMES if name not in ("chatml", "llama3"))
            self.notes.append(
                f"warning: {template.origin}: the tokenizer does not know {', '.join(unknown)} and"
                f" splits them; {other_names} end a turn with its own {tokenizer.eos_token}"
            )
        if "strftime_now" in template.source:
            self.notes.append(
                f"warning: {template.origin} writes today's date, so that other days give other"
                " examples"
            )

    def check_keys(self, split: Split, row: Chat, template: ChatTemplate) -> None:
        """Check that the template reads each key of a row's turns.

        A key is checked once, in the first turn that has a value for it. A note names a key that
        the template does not read.

        Raises:
            ConfigError: The template does not read `tool_calls` or a key for reasoning, whose text
                the model would have to learn.
        """
        for number, turn in enumerate(row.turns, 1):
            for key, value in turn.items():
                # 1. Keys that need no check, or no other one.
                is_empty = value in (None, "", [], {})
                if is_empty or key in (*_READ_KEYS, *self.known_keys):
                    continue
                self.known_keys.add(key)

                # 2. A key that the template reads.
                if template.key_changes_text(key, row.turns[:number], row.tools):
                    continue

                # 3. A key that it does not read.
                if key in _LEARNT_KEYS:
                    raise ConfigError(
                        f"{template.origin} does not read {key} in {row_name(split, row)}, so the"
                        f" model would learn nothing of it. {OTHER_TEMPLATE} Or leave the key out."
                    )
                self.notes.append(f"{template.origin} does not read {key} of the turns")

    def check_roles_and_keys(self, split: Split, row: Chat, template: ChatTemplate) -> None:
        """Check that the template writes each role of a row, and reads each key of its turns.

        A role is checked once, in the first row that has it.

        Raises:
            ConfigError: The template does not write the role, does not read a key, or fails.
        """
        self.check_keys(split, row, template)
        for role in dict.fromkeys(turn["role"] for turn in row.turns):
            if role in self.known_roles:
                continue
            self.known_roles.add(role)
            try:
                writes_role = template.writes_role(row.turns, row.tools, role)
            except TemplateFailed as error:
                raise unwritable_row_error(template, split, row, error) from error
            if not writes_role:
                raise ConfigError(
                    f"{template.origin} does not know the role {role!r} in"
                    f" {row_name(split, row)} and writes nothing for it. {OTHER_TEMPLATE} Or leave"
                    " such turns out."
                )

    def drop_rows_without_target(
        self,
        encoded: Sequence[Examples],
        split: Split,
        list_rows: Callable[[], Sequence[int]] | None = None,
    ) -> list[Examples | Selected]:
        """Refuse untruncated examples without a target; refuse or drop truncated ones.

        Args:
            encoded: The examples; for pairs those of the chosen and those of the rejected answers.
                A pair needs a target in both.
            split: The rows.
            list_rows: Lists the row of each example, for messages; None: one example for each row.

        Returns:
            `encoded`, without the examples that were dropped; a note says how many.

        Raises:
            ConfigError: An untruncated example has no target; a truncated one has none and
                `task.overlong_rows=refuse`; or no example is left.
        """

        def name_row(example: int) -> str:
            """Name the row of an example, such as `row 3`."""
            row = example if list_rows is None else list_rows()[example]
            return f"row {split.number(row)}"

        # 1. Refuse an example that was not truncated: it has no target with any max_length. For
        # pairs this is done for each side.
        count = len(encoded[0])
        without_target = [_rows_without_targets(examples) for examples in encoded]
        full_lengths = []
        for examples, targetless in zip(encoded, without_target, strict=True):
            assert examples.lost is not None  # the tokens that were cut off each example
            full_lengths.append(examples.lengths + examples.lost)
            uncut = targetless[examples.lost[targetless] == 0]
            if len(uncut):
                reason = reason_for_no_target(int(examples.lengths[uncut[0]]))
                raise ConfigError(
                    f"{split.key}: {name_row(int(uncut[0]))} has no token to learn:"
                    f" {reason}.{_similar_rows_sentence(len(uncut), count)} Leave such rows out."
                )

        # 2. Truncation left the others without a target. A pair is one of them if one side is.
        overlong = np.unique(np.concatenate(without_target))
        if not len(overlong):
            return list(encoded)
        if self.config.overlong_rows is OverlongRows.refuse:
            first = int(overlong[0])
            tokens = int(max(lengths[first] for lengths in full_lengths))
            similar = _similar_rows_sentence(len(overlong), count)
            raise self.overlong_row_error(f"{name_row(first)} of {split.key}", tokens, similar)
        if len(overlong) == count:
            raise self.all_rows_overlong_error(split)

        # 3. Drop them, from both sides of a pair.
        self.notes.append(
            f"{len(overlong):,} of {count:,} rows of {split.key} left out:"
            f" data.max_length={self.max_length} cuts off all that carries loss"
            " (task.overlong_rows=drop)"
        )
        remaining = np.delete(np.arange(count), overlong)
        return [Selected(examples, remaining) for examples in encoded]

    def overlong_row_error(self, row: str, tokens: int, more: str = "") -> ConfigError:
        """Build the error for a row without a target after truncation.

        Args:
            row: Names the row, such as `row 3 of data.train`.
            tokens: Its length before truncation.
            more: A sentence on similar rows, with a space before it.
        """
        return ConfigError(
            f"data.max_length={self.max_length}: {row} has {tokens:,} tokens, and its prompt is"
            f" longer than that, so that all tokens with loss are cut off.{more} Raise"
            " data.max_length, or leave such rows out: task.overlong_rows=drop."
        )

    def all_rows_overlong_error(self, split: Split) -> ConfigError:
        """Build the error for a split without any target after truncation."""
        return ConfigError(
            f"data.max_length={self.max_length}: every row of {split.key} has a longer prompt:"
            " nothing is left. Raise data.max_length."
        )


def _rows_without_targets(examples: Examples) -> np.ndarray:
    """List the examples without a target behind their first token, in order; cached.

    The first token is never predicted, since no token is before it.

    Example: examples with the targets [1, 0], [0, 1] and [0, 0] give [0, 2].
    """
    targets = examples.flat(TARGETS)  # those of all examples, one after another
    offsets = examples.offsets  # where each example begins among them
    key = digest_if_known("no-targets-1", examples.origin)
    # `rows_without_marks` leaves out the first token of each row, too.
    arrays = cached_arrays(
        "no-targets", key, lambda: {"rows": rows_without_marks(targets, offsets)}
    )
    return arrays["rows"]


def row_kind(row: Chat | Plain | None) -> str:
    """Name the kind of a row for a message: texts or turns."""
    if isinstance(row, Plain):
        return "texts"
    return "turns"


def reason_for_no_target(tokens: int) -> str:
    """Explain why no token of an untruncated row with this number of tokens carries loss."""
    if tokens < 2:
        return "too short"
    return "the template writes nothing of its answer"


def _similar_rows_sentence(count: int, rows: int) -> str:
    """Write a sentence on how many rows have the same problem; empty if only one has it.

    Example:
        >>> _similar_rows_sentence(1, 9), _similar_rows_sentence(3, 9)
        ('', ' 3 of 9 rows are like it.')
    """
    if count == 1:
        return ""
    return f" {count:,} of {rows:,} rows are like it."


def marked_text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Decode a training example with its targets between « and »; at most 4,000 characters.

    The first token is never a target, since no token is before it. Example: tokens of "a", "b",
    "c", "d" with the targets 0, 1, 1, 0 become `a«bc»d`.
    """
    is_target = example[TARGETS] != 0
    is_target[0] = False
    # Split at each change: all tokens of a part are targets, or none is.
    changes = np.flatnonzero(np.diff(is_target)) + 1
    parts = np.split(example["input_ids"], changes)
    texts = []
    for ids, begin in zip(parts, [0, *changes], strict=True):
        text = tokenizer.decode(ids.tolist())
        texts.append(f"«{text}»" if is_target[begin] else text)
    joined = "".join(texts)
    if len(joined) <= _MAX_SHOWN:
        return joined
    return f"{joined[:_MAX_SHOWN]} ..."
