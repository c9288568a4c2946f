"""What is learnt: how rows become examples, and which numbers judge the model."""

from dataclasses import dataclass
from enum import Enum

from optrun.config.schema.checks import expect, expect_not_negative


class ProblemType(Enum):
    """What a label column holds."""

    single_label_classification = "single_label_classification"
    regression = "regression"


@dataclass(kw_only=True)
class TaskConfig:
    """What every task has."""

    name: str


@dataclass(kw_only=True)
class CausalLmConfig(TaskConfig):
    """Next-token prediction."""

    packing: bool
    """True: documents are joined and cut into blocks of data.max_length. False: one row, one example."""
    prompt: str | None
    """Continued after training so that a person sees what was learnt; null: no sample."""
    sample_tokens: int
    """How many tokens the sample has at most."""

    def __post_init__(self) -> None:
        """Refuse a negative sample."""
        expect_not_negative("task.sample_tokens", self.sample_tokens)


@dataclass(kw_only=True)
class MaskedLmConfig(TaskConfig):
    """Prediction of masked tokens (Devlin et al. 2018): of the chosen, 80 % masked, 10 % random, 10 % kept."""

    packing: bool
    mlm_probability: float
    """Share of tokens chosen, in (0, 1)."""

    def __post_init__(self) -> None:
        """Refuse a share that chooses nothing or everything."""
        expect(0 < self.mlm_probability < 1, "task.mlm_probability", self.mlm_probability, "a number in (0, 1)")


@dataclass(kw_only=True)
class SequenceClassificationConfig(TaskConfig):
    """A label, or a number, for a text or a pair of texts."""

    problem_type: ProblemType


@dataclass(kw_only=True)
class TokenClassificationConfig(TaskConfig):
    """A label for each word; data.text_column holds lists of words, data.label_column lists of labels."""

    label_all_pieces: bool
    """False: only the first piece of a word carries its label."""


@dataclass(kw_only=True)
class Seq2SeqLmConfig(TaskConfig):
    """A text from a text: data.text_column to data.target_column."""

    max_target_length: int
    """Tokens of the target, at most."""

    def __post_init__(self) -> None:
        """Refuse an empty target."""
        expect(self.max_target_length > 1, "task.max_target_length", self.max_target_length, "2 or more")


@dataclass(kw_only=True)
class ImageClassificationConfig(TaskConfig):
    """A label for an image."""

    image_size: int | None
    """Side in pixels; null: what the model's image processor or configuration says."""


SCHEMAS: dict[str, type[TaskConfig]] = {
    "causal_lm": CausalLmConfig,
    "masked_lm": MaskedLmConfig,
    "sequence_classification": SequenceClassificationConfig,
    "token_classification": TokenClassificationConfig,
    "seq2seq_lm": Seq2SeqLmConfig,
    "image_classification": ImageClassificationConfig,
}
