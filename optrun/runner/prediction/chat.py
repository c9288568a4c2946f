"""Answers of a model that was trained on chats, or on prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from optrun.base.errors import ConfigError
from optrun.data.chat import ROLES, question_columns, questions
from optrun.runner.prediction.generation import TextGeneration
from optrun.task.chat_encoder import place
from optrun.task.chat_template import TemplateFailed, ending_ids, no_template, use_template


class ChatAnswers(TextGeneration):
    """Turns up to the last of the assistant, written by the template of the run, to what the assistant says then.

    A row needs no completion. A text is continued as it stands, as the prompts of plain rows are.
    """

    columns: ClassVar[tuple[str, ...]] = ("messages_column", "text_column")

    def inspect(self) -> None:
        """Find the rows and the template, and what ends an answer."""
        super().inspect()
        if "eos_token_id" not in self.given:
            self.options_of_generation.eos_token_id = (
                ending_ids(self.tokenizer, self.template) or None
            )

    def find_column(self) -> str:
        """Find the column of what is to be answered; every row is looked at, and written once."""
        self.template = use_template(self.tokenizer, None)
        self.places = question_columns(
            self.rows.source, self.split, getattr(self.predicting.task, "layout", None)
        )
        for number in range(0, len(self.split.rows), 1000):
            self._texts(range(number, min(number + 1000, len(self.split.rows))))
        return self.places.names[0]

    def prompts(self, numbers: Sequence[int]) -> list[list[int]]:
        """Encode each conversation with the opening of an answer; a text as in training."""
        texts = self._texts(numbers)
        return [
            self.tokenizer(text, add_special_tokens=not own, verbose=False)["input_ids"]
            for text, own in texts
        ]

    def _texts(self, numbers: Sequence[int]) -> list[tuple[str, bool]]:
        """Write what the model reads of some rows, and whether a template wrote it.

        Raises:
            ConfigError: A row that cannot be read or written.
        """
        roles = ROLES if self.template is None else self.template.roles
        part = self.part(numbers)
        found = []
        for asked in questions(part, self.places, roles):
            if isinstance(asked, str):
                found.append((asked, False))
                continue
            if self.template is None:
                raise no_template(f"{self.split.key} has conversations")
            try:
                found.append((self.template.text(asked.turns, asked.tools, opening=True), True))
            except TemplateFailed as error:
                raise ConfigError(f"{place(part, asked)} {error}.") from error
        return found
