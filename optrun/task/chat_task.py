"""What tasks on conversations share.

The template, the roles it knows, and rows of which nothing is learnt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import OverlongRows
from optrun.data.cache import key_of
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
from optrun.task.tokens import ids_below

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Sides = TypeVar("Sides", bound=tuple[Chat | Plain, ...])
_READ_KEYS = ("role", "content", "instruction", "input")
"""Keys of turns that every template reads, or that stand in the content as well."""
_LEARNT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of turns whose text the model would learn to write."""
_LONGEST_SHOWN = 4000
"""Characters of a training example that a person reads."""


class ChatTask(Task):
    """Conversations, written by a template, of which some tokens carry loss.

    Attributes:
        template: Writes them; None: the rows are plain texts.
        known_roles: That a row had, and the template writes.
        known_keys: Of turns of a row, which were looked for in the template.
        end: The token that ends an answer; None: the rows are plain texts, or several tokens do.
    """

    shift = True
    text_kind = TextKind.CHAT
    template: ChatTemplate | None
    known_roles: set[str]
    known_keys: set[str]
    end: int | None

    def use_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use `task.chat_template`, else the tokenizer's own template."""
        self.template = use_template(tokenizer, self.config.chat_template)
        self.known_roles = set()
        self.known_keys = set()

    @property
    def roles(self) -> frozenset[str]:
        """Roles allowed in rows."""
        if self.template is None:
            return ROLES
        return self.template.roles

    def check_alike(self, split: Split, rows: Iterable[Sides]) -> Iterator[Sides]:
        """Yield rows, checking that all are of one kind with roles known to the template.

        Raises:
            ConfigError: The first row of another kind; a role of which nothing is written.
        """
        first: Chat | Plain | None = None
        for number, row in enumerate(rows):
            first = row[0] if first is None else first
            if type(row[0]) is not type(first):
                raise ConfigError(
                    f"{split.where(number)} has {row_kind(row[0])}, row {split.number(0)}"
                    f" {row_kind(first)}. Write all of them alike."
                )
            for side in row:
                if isinstance(side, Chat) and self.template is not None:
                    self.expect_known_roles(split, side, self.template)
            yield row

    def encode_rows(
        self,
        part: Split,
        tokenizer: PreTrainedTokenizerBase,
        rows: Callable[[], Iterator[Chat | Plain]],
        *what: str,
    ) -> Examples:
        """Encode rows to ids and targets, once for the same rows, tokenizer, template and settings.

        Args:
            part: The rows: named in messages, and a part of the cache key.
            tokenizer: Of the model.
            rows: Yields the rows anew at each call.
            what: Settings that change what `rows` yields, for the cache key.
        """
        encoder = ChatEncoder(self.config, self.template, part, tokenizer, self.max_length)
        content_key = key_of(part.content, *what)
        size = ids_below(tokenizer)
        return encode(
            rows,
            encoder,
            encoder.key(),
            longest=self.max_length,
            content=content_key,
            ids_below=size,
        )

    def require_template(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> None:
        """Fall back to chatml if neither the configuration nor the tokenizer has a template.

        Only for a tokenizer with the tokens of chatml, as those that optrun trains.

        Raises:
            ConfigError: The tokenizer lacks these tokens.
        """
        if self.template is not None:
            return
        if not {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys():
            raise no_template_error(f"{split.key} has conversations")
        self.template = use_template(tokenizer, "chatml")
        self.notes.append(
            "task.chat_template=chatml: the tokenizer has its marks, and no template of its own"
        )

    def settle_ends(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the token behind an answer, and make it the tokenizer's end of text.

        The tokenizer's own end stays if its own template is in use, or writes it.

        Raises:
            ConfigError: The template writes nothing behind an answer.
        """
        self.end: int | None = None
        template = self.template
        if template is None:
            return
        if template.text_behind_answers() == "":
            raise ConfigError(
                f"{template.origin} writes nothing behind an answer: no end of it would be learnt,"
                " and the model would never stop. Give a template that ends a turn,"
                f" {KEY}={'|'.join(NAMES)}, or a jinja file of yours."
            )
        self.end = template.end_of_answers()
        if self.end in (None, tokenizer.eos_token_id) or template.is_own:
            return
        token = tokenizer.convert_ids_to_tokens(self.end)
        if "eos_token" in template.source:
            return
        before = tokenizer.eos_token
        tokenizer.eos_token = token
        self.notes.append(
            f"the tokenizer's end of text is now {token}, which ends an answer by"
            f" {template.origin}; it was {before}"
        )

    def adapt(self, model: PreTrainedModel) -> None:
        """Let `generate` of the trained model stop at the end of an answer."""
        generation: Any = getattr(model, "generation_config", None)
        if self.end is None or generation is None:
            return
        ends = generation.eos_token_id
        if not isinstance(ends, list):
            ends = [] if ends is None else [ends]
        if self.end in ends:
            return
        generation.eos_token_id = [self.end, *ends] if ends else self.end
        self.notes.append(
            f"generation_config.json of the trained model ends texts at token {self.end}, which"
            " ends an answer, too"
        )

    def note_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Note unknown control tokens of the template, and today's date in it."""
        template = self.template
        if template is None:
            return
        if strange := template.unknown_tokens():
            other_names = ", ".join(name for name in NAMES if name not in ("chatml", "llama3"))
            self.notes.append(
                f"warning: {template.origin}: {', '.join(strange)}: no tokens of this tokenizer,"
                f" which takes them apart; {other_names} end a turn with its own"
                f" {tokenizer.eos_token}"
            )
        if "strftime_now" in template.source:
            self.notes.append(
                f"warning: {template.origin} writes today's date: tomorrow the examples are others"
            )

    def expect_known_keys(self, split: Split, row: Chat, template: ChatTemplate) -> None:
        """Refuse a turn with trained content under a key that the template does not read.

        Other keys that it does not read get one note each. Reads each key in the first turn with
        it.
        """
        for number, turn in enumerate(row.turns, 1):
            for key, value in turn.items():
                if key in (*_READ_KEYS, *self.known_keys) or not value:
                    continue
                self.known_keys.add(key)
                if template.key_matters(key, row.turns[:number], row.tools):
                    continue
                if key in _LEARNT_KEYS:
                    raise ConfigError(
                        f"{template.origin} does not read {key} in {row_name(split, row)}: nothing"
                        " of"
                        f" it would be learnt. {OTHER_TEMPLATE} Or leave the key out."
                    )
                self.notes.append(f"{template.origin} does not read {key} of the turns")

    def expect_known_roles(self, split: Split, row: Chat, template: ChatTemplate) -> None:
        """Refuse a role whose turns the template does not write.

        Each role is tried once, in the first row with it.
        """
        self.expect_known_keys(split, row, template)
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
                    f"{template.origin} does not know the role {role!r} in {row_name(split, row)}:"
                    f" nothing of what it says is written. {OTHER_TEMPLATE} Or leave"
                    " such turns out."
                )

    def with_targets(
        self,
        sides: Sequence[Examples],
        split: Split,
        rows_of: Callable[[], Sequence[int]] | None = None,
    ) -> list[Examples | Selected]:
        """Refuse, or leave out, rows without a target on one of their sides.

        Args:
            sides: The same rows, each with targets of its own.
            split: The rows.
            rows_of: Lists the row of each example; None: each is one of its own.

        Raises:
            ConfigError: With the first of them, how many there are, and how long they are.
        """
        every = []

        def number(example: int) -> int:
            return split.number(example if rows_of is None else rows_of()[example])

        for side in sides:
            without_target = _rows_without_targets(side)
            every.append(without_target)
            assert side.lost is not None
            bare = without_target[side.lost[without_target] == 0]
            if not len(bare):
                continue
            row = int(bare[0])
            why = reason_for_no_target(int(side.lengths[row]))
            raise ConfigError(
                f"{split.key}: row {number(row)} has no token to learn: {why}."
                f"{_count_similar_rows(len(bare), len(side))} Leave such rows out."
            )
        empty = np.unique(np.concatenate(every))
        if not len(empty):
            return list(sides)
        row = int(empty[0])
        rows = len(sides[0])
        full_lengths = np.max(
            [side.lengths[empty] + side.lost[empty] for side in sides if side.lost is not None],
            axis=0,
        )
        if self.config.overlong_rows is OverlongRows.refuse:
            if len(empty) > 1:
                longest = f" The longest has {int(full_lengths.max()):,} tokens."
            else:
                longest = ""
            who = f"row {number(row)} of {split.key}"
            raise self.overlong(
                who, int(full_lengths[0]), f"{_count_similar_rows(len(empty), rows)}{longest}"
            )
        if len(empty) == rows:
            raise self.all_overlong(
                split, f"; the longest row has {int(full_lengths.max()):,} tokens."
            )
        self.notes.append(
            f"{len(empty):,} of {rows:,} rows of {split.key} left out:"
            f" data.max_length={self.max_length} cuts off all that carries loss"
            " (task.overlong_rows=drop)"
        )
        return [Selected(side, np.delete(np.arange(rows), empty)) for side in sides]

    def overlong(self, who: str, tokens: int, more: str = "") -> ConfigError:
        """Build the error for a row whose prompt leaves no room for an answer."""
        return ConfigError(
            f"data.max_length={self.max_length}: {who} has {tokens:,} tokens, and all that carry"
            f" loss are cut off: its prompt is longer.{more} Raise data.max_length, or leave such"
            " rows out: task.overlong_rows=drop."
        )

    def all_overlong(self, split: Split, more: str) -> ConfigError:
        """Build the error for a split without a short enough row."""
        return ConfigError(
            f"data.max_length={self.max_length}: every row of {split.key} has a longer prompt:"
            f" nothing is left. Raise data.max_length{more}"
        )


def _rows_without_targets(examples: Examples) -> np.ndarray:
    """List the rows without a target behind their first token.

    The first token cannot be predicted: no token is before it.
    """
    marks = examples.flat(TARGETS)
    offsets = examples.offsets
    key = key_of("no-targets-1", examples.origin)
    return cached_arrays("no-targets", key, lambda: {"rows": rows_without_marks(marks, offsets)})[
        "rows"
    ]


def row_kind(row: Chat | Plain | None) -> str:
    """Name the kind of a row for a message."""
    if isinstance(row, Plain):
        return "texts"
    return "turns"


def reason_for_no_target(tokens: int) -> str:
    """Explain why no token of an uncut row carries loss."""
    if tokens < 2:
        return "too short"
    return "the template writes nothing of its answer"


def _count_similar_rows(count: int, rows: int) -> str:
    """Write how many more rows have the same problem; empty if none has."""
    if count == 1:
        return ""
    return (
        f" {count - 1:,} more {'is' if count == 2 else 'are'} like it, {count:,} of {rows:,} in"
        " all."
    )


def marked_text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """Write a training example with its targets between « and »."""
    pieces = []
    marks = example[TARGETS].copy()
    marks[0] = 0
    for target, group in itertools.groupby(
        zip(marks, example["input_ids"], strict=True), key=lambda pair: pair[0]
    ):
        text = tokenizer.decode([int(number) for _, number in group])
        pieces.append(f"«{text}»" if target else text)
    text = "".join(pieces)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]} ..."
