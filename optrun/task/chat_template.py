"""Render conversations to text by a chat template: the tokenizer's, a named one, or a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.reading import expand_home, read_text
from optrun.data.cache import digest
from optrun.data.chat import ASSISTANT, ROLES, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FOLDER = Path(__file__).parent / "templates"
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))
"""Templates that come with optrun, each with generation marks."""
KEY = "task.chat_template"
OTHER_TEMPLATE = f"Give another: {KEY}={'|'.join(NAMES)}, or a jinja file of your own."
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTROL = re.compile(r"<\|[\w-]+\|>")
_QUOTED = re.compile(r"""['"](\w+)['"]""")
_PROBE = "zqxprobe"

Tools = list[dict[str, Any]] | None
"""JSON schemas of functions; None: there are none."""
Span = tuple[int, int]
"""First character and the one after the last."""


class TemplateFailed(Exception):
    """A template cannot render a conversation, or the answers in its text cannot be found."""


class UnmarkedAnswers(TemplateFailed):
    """A template without generation marks writes earlier turns differently once more follow."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: Has it as `chat_template`.
        origin: Names it in messages, such as `task.chat_template=chatml`.
        is_own: Whether it came with the tokenizer.
    """

    tokenizer: PreTrainedTokenizerBase
    origin: str
    is_own: bool = False

    @property
    def source(self) -> str:
        """The template as JSON; with their names if the tokenizer has several."""
        return json.dumps(self.tokenizer.chat_template, sort_keys=True)

    @cached_property
    def marked(self) -> bool:
        """Whether it has generation marks (`{% generation %}`) around answers."""
        return bool(_MARK.search(self._template_text(None)))

    @property
    def roles(self) -> frozenset[str]:
        """Roles allowed in rows: the usual ones, and every quoted word of the template."""
        return ROLES | frozenset(_QUOTED.findall(self._template_text(None)))

    def key(self) -> str:
        """Digest everything that decides the text of a conversation: template, special tokens."""
        special_tokens = self.tokenizer.special_tokens_map
        return digest(
            self.source, json.dumps({key: str(token) for key, token in special_tokens.items()})
        )

    def unknown_tokens(self) -> list[str]:
        """List control tokens of the template, such as `<|im_end|>`, unknown to the tokenizer."""
        vocabulary = self.tokenizer.get_vocab()
        control_tokens = dict.fromkeys(_CONTROL.findall(self._template_text(None)))
        return [token for token in control_tokens if token not in vocabulary]

    def text(
        self, turns: Sequence[Message], tools: Tools = None, *, generation_prompt: bool = False
    ) -> str:
        """Render a conversation.

        Args:
            turns: Messages of the conversation.
            tools: JSON schemas of functions; None: there are none.
            generation_prompt: Whether the opening of an answer is appended, for the model to
                continue.

        Raises:
            TemplateFailed: The template refuses it, or fails.
        """
        return self._render(turns, tools, generation_prompt=generation_prompt)[0]

    def find_answers(self, turns: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """Render a conversation, and find the spans of the assistant's answers.

        The template's generation marks say where they are. Without marks, an answer is the text
        that its turn adds to the turns before it, rendered with the generation prompt.

        Example: a template without marks renders two turns to `<user>Hi</s><bot>Hello</s>`, and the
        first one with the generation prompt to `<user>Hi</s><bot>`, 17 characters. The answer is
        `Hello</s>`, with the span (17, 26).

        Returns:
            The text, and the span of each answer in characters.

        Raises:
            TemplateFailed: The template refuses the conversation, or fails.
            UnmarkedAnswers: Without marks, if a later turn changes the text before it.
        """
        # 1. With marks.
        if self.marked:  # the template has {% generation %} blocks, whose spans jinja returns
            return self._render(turns, tools, marks=True)

        # 2. Without marks: compare the text before each answer with the text through it. Both must
        # be beginnings of the whole text, the second one longer.
        rendered = self.text(turns, tools)
        spans = list[Span]()
        for index, turn in enumerate(turns):
            if turn["role"] != ASSISTANT:
                continue
            before = self.text(turns[:index], tools, generation_prompt=True)
            is_last = index + 1 == len(turns)
            through = rendered if is_last else self.text(turns[: index + 1], tools)
            are_prefixes = rendered.startswith(before) and rendered.startswith(through)
            if not are_prefixes or len(before) >= len(through):
                raise UnmarkedAnswers(
                    f"reads otherwise up to turn {index + 1} than as a whole, and the template has"
                    " no {% generation %} marks, so nothing says which of its tokens are the"
                    " assistant's"
                )
            spans.append((len(before), len(through)))
        return rendered, spans

    def find_last_answer(
        self, turns: Sequence[Message], tools: Tools = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation with its last turn as the answer, and find its span.

        The answer begins where the whole text diverges from the text before the answer, rendered
        with the generation prompt. That is usually behind this prompt; earlier if the template
        opens with a thinking block that this answer lacks.

        Raises:
            TemplateFailed: The template fails, or writes nothing of the answer.
        """
        before = self.text(turns[:-1], tools, generation_prompt=True)
        rendered = self.text(turns, tools)
        begin = common_prefix_length(before, rendered)
        if begin == len(rendered):
            raise TemplateFailed("has an answer that the chat template leaves out")
        return rendered, [(begin, len(rendered))]

    def split_behind_answers(
        self, turns: Sequence[Message], tools: Tools = None, first: int = 0
    ) -> list[Sequence[Message]]:
        """Split a conversation into one per answer if later turns change how answers are written.

        Only templates without generation marks do so, such as one that leaves out the thinking of
        all answers but the last. Example: user, answer A, user, answer B become [user, A] and
        [user, A, user, B].

        Args:
            turns: Messages of the conversation.
            tools: JSON schemas of functions; None: there are none.
            first: The index of the first turn that may carry loss.

        Returns:
            For each answer the turns up to it; empty if the conversation can stay one example.

        Raises:
            TemplateFailed: The template refuses it, or fails.
        """
        try:
            self.find_answers(turns, tools)
        except UnmarkedAnswers:
            conversations = []
            for index, turn in enumerate(turns):
                if turn["role"] == ASSISTANT and index >= first:
                    conversations.append(turns[: index + 1])
            return conversations
        return []

    def text_behind_answers(self) -> str | None:
        """Render what the template writes behind an answer, such as `<|im_end|>`.

        None if the template cannot write a question with an answer.
        """
        try:
            text = self.text(
                [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _PROBE}]
            )
        except TemplateFailed:
            return None
        return text.rpartition(_PROBE)[2].strip()

    def end_of_answers(self) -> int | None:
        """Return the id of the token behind an answer; None if it is not exactly one token."""
        behind = self.text_behind_answers()
        if not behind:
            return None
        ids = self.tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) == 1:
            return int(ids[0])
        return None

    def writes_role(self, turns: Sequence[Message], tools: Tools, role: str) -> bool:
        """Tell whether the template writes the content of a role's turns, by rendering a probe.

        The content of these turns is replaced by a word that no template has; a turn without it in
        the text is left out by the template. False if no turn has the role.

        Raises:
            TemplateFailed: The template refuses the conversation, or fails.
        """
        probed_turns = []
        for turn in turns:
            # A template may write these keys of Alpaca's rows in place of the content.
            probed = {key: turn[key] for key in turn if key not in ("instruction", "input")}
            if turn["role"] == role:
                probed["content"] = _PROBE
            probed_turns.append(probed)
        return _PROBE in self.text(probed_turns, tools)

    def key_changes_text(self, key: str, turns: Sequence[Message], tools: Tools) -> bool:
        """Tell whether the rendered text changes if a key of the last turn is left out.

        False if the template does not mention the key; True if it fails. The turn has to be the
        last one: Qwen 3 leaves out the reasoning of earlier answers.
        """
        if re.search(rf"\b{re.escape(key)}\b", self._template_text(tools)) is None:
            return False
        last_without_key = dict(turns[-1])
        del last_without_key[key]
        try:
            return self.text(turns, tools) != self.text([*turns[:-1], last_without_key], tools)
        except TemplateFailed:  # some refuse a chat that ends with such a turn
            return True

    def _template_text(self, tools: Tools) -> str:
        """Return the template text.

        A tokenizer may have one template for chats with tools, and one for chats without.
        """
        source: str = self.tokenizer.get_chat_template(None, tools)
        return source

    def _render(
        self,
        turns: Sequence[Message],
        tools: Tools,
        *,
        generation_prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Render a conversation by transformers, with the spans of answers if `marks` is true.

        If the template fails on tool calls whose arguments are mappings, or writes them as Python
        does, it is rendered again with the arguments as JSON text.

        Returns:
            The text, and the spans in characters; empty without `marks`.

        Raises:
            TemplateFailed: The template refuses the conversation, or fails.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        # 1. Render the turns as they are. For one conversation there is one text, and one list of
        # spans.
        try:
            texts, spans = render_jinja_template(
                conversations=[list(turns)],
                tools=tools,
                chat_template=self._template_text(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            # It failed. A template that joins the arguments to a text raises TypeError for a
            # mapping: try 2. Any other error, or a TypeError without such arguments, is final.
            if not isinstance(error, TypeError) or _with_json_arguments(turns) == list(turns):
                message = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
                raise TemplateFailed(
                    f"cannot be written by the chat template: {message}"
                ) from error
        else:
            if not _has_python_arguments(texts[0], turns):
                begins_and_ends = spans[0] if marks else ()
                return texts[0], [(int(begin), int(end)) for begin, end in begins_and_ends]

        # 2. Render them with JSON text for each mapping; there is no third time.
        turns = _with_json_arguments(turns)
        return self._render(turns, tools, generation_prompt=generation_prompt, marks=marks)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Count how many tokens, or characters, two sequences share at their beginning.

    Example:
        >>> common_prefix_length("tokenize", "tokens"), common_prefix_length([1, 2], [1, 2, 3])
        (5, 2)
    """
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _has_python_arguments(text: str, turns: Sequence[Message]) -> bool:
    """Tell whether a text has a tool call's arguments as a Python dict, not as JSON.

    Such as `{'city': None}` for `{"city": null}`. The first call whose dict is in the text decides.
    """
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            arguments = call.get("function", {}).get("arguments")
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return str(arguments) != json.dumps(arguments, ensure_ascii=False)
    return False


def _with_json_arguments(turns: Sequence[Message]) -> list[Message]:
    """Copy turns; the arguments of tool calls become JSON text.

    For templates that write the arguments as they are. Example: `{"city": "Rome"}` becomes
    `'{"city": "Rome"}'`; arguments that are texts already stay.
    """

    def with_json(call: Any) -> Any:
        function = call.get("function", {})
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    copies = []
    for turn in turns:
        if turn.get("tool_calls"):
            turn = turn | {"tool_calls": [with_json(call) for call in turn["tool_calls"]]}
        copies.append(turn)
    return copies


def use_template(tokenizer: PreTrainedTokenizerBase, configured: str | None) -> ChatTemplate | None:
    """Put the configured chat template into a tokenizer.

    The tokenizer is saved with it.

    Args:
        tokenizer: Changed in place if a template is configured.
        configured: `task.chat_template`: a name or a file; None: the tokenizer's own.

    Returns:
        The template; None if none is configured and the tokenizer has none.

    Raises:
        ConfigError: There is no template of this name and no such file, or it is no jinja.
    """
    # 1. The tokenizer's own.
    if configured is None:
        if tokenizer.chat_template:
            return ChatTemplate(tokenizer, "the tokenizer's chat template", is_own=True)
        return None
    from jinja2 import TemplateSyntaxError

    # 2. The configured one. It is rendered once, only to find errors of syntax.
    tokenizer.chat_template = _read_template(configured)
    template = ChatTemplate(tokenizer, f"{KEY}={configured}")
    try:
        template.text([{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}])
    except TemplateFailed as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            where = f"line {error.__cause__.lineno}: {error.__cause__.message}"
            raise ConfigError(
                f"{KEY}={configured}: this is no valid jinja template: {where}."
            ) from error
    return template


def _read_template(name_or_file: str) -> str:
    """Read a template that comes with optrun, else a file.

    Raises:
        ConfigError: It is neither a name of a template nor a file with text.
    """
    if name_or_file in NAMES:
        return read_text(_FOLDER / f"{name_or_file}.jinja", follow=True).removesuffix("\n")
    try:
        return read_text(expand_home(name_or_file), follow=True)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            problem = "no such file"
        else:
            problem = f"no text can be read from it ({error})"
        raise ConfigError(
            f"{KEY}={name_or_file}: no template of this name, and {problem}."
            f" {did_you_mean(name_or_file, NAMES)} Or give a jinja file."
        ) from error


def ending_ids(tokenizer: PreTrainedTokenizerBase, end: int | None) -> list[int]:
    """List the ids at which an answer ends: `eos_token`, and the template's own token.

    end: The template's token; None: it has none.
    """
    ends = [tokenizer.eos_token_id, end]
    return list(dict.fromkeys(int(token) for token in ends if token is not None))


def no_template_error(why: str) -> ConfigError:
    """Build the error for conversations without a chat template."""
    return ConfigError(
        f"{KEY}=null: {why}, and the tokenizer has no chat template. Name one:"
        f" {KEY}={'|'.join(NAMES)}, or a jinja file: {KEY}=FILE.jinja."
    )
