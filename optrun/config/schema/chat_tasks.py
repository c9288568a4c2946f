"""Tasks on chats: supervised fine-tuning and preferences."""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, ClassVar

from optrun.config.schema.ranges import NotNegative, Positive, WholeNumber, number
from optrun.config.schema.task_base import TaskConfig

ChatLayout = StrEnum("ChatLayout", ["messages", "prompt_completion", "alpaca", "sharegpt"])
"""How rows hold chats."""

OverlongRows = StrEnum("OverlongRows", ["refuse", "drop"])
"""What becomes of rows of which no target is left within data.max_length."""


@dataclass(kw_only=True)
class SftConfig(TaskConfig):
    """Supervised fine-tuning on chats, or on prompts and completions."""

    CHUNKED_LOSS = True
    AUTO_CLASS = "AutoModelForCausalLM"
    TITLE = "chat"
    PIPELINE_TAG = "text-generation"
    READS_STREAMS = True
    PATHS = ("chat_template",)
    USAGE = (
        'chat = [{"role": "user", "content": "What is a generator?"}]',
        'asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}',
        "inputs = tokenizer.apply_chat_template(chat, **asked)",
        "made = model.generate(**inputs, max_new_tokens=50)[0, inputs.input_ids.shape[1] :]",
        "print(tokenizer.decode(made, skip_special_tokens=True))",
    )

    layout: ChatLayout | None
    """How the rows hold chats; null: by the names of their columns."""
    chat_template: str | None
    """A named template, or a jinja file; null: the tokenizer's own."""
    assistant_only_loss: bool
    """Loss on the assistant's turns alone: by the template's generation marks, or by prefix where
    it has none."""
    completion_only_loss: bool | None
    """Loss on completions alone; null: true where rows have prompt and completion."""
    packing: bool
    """Several rows in a block of data.max_length, none cut, by best fit; they see nothing of each
    other."""
    overlong_rows: OverlongRows
    """Rows of which no target is left within data.max_length: refuse the data, or leave them out
    and say how many."""
    sample_tokens: WholeNumber
    """Tokens, at most, of the answer that is shown after training; 0: none."""

    @property
    def joins_documents(self) -> bool:
        """Rows are chats, packed or not."""
        return False

    @property
    def document_masking_key(self) -> str | None:
        """The key, if positions begin anew with each document."""
        if self.packing:
            return "task.packing=true"
        return None


class PreferenceLoss(Enum):
    """Losses of pairs, by their names in TRL's `loss_type`.

    Orpo and simpo are losses of trainers of their own.
    """

    sigmoid = "sigmoid"
    hinge = "hinge"
    ipo = "ipo"
    robust = "robust"
    nca_pair = "nca_pair"
    bco_pair = "bco_pair"
    sppo_hard = "sppo_hard"
    apo_zero = "apo_zero"
    apo_down = "apo_down"
    sigmoid_norm = "sigmoid_norm"
    orpo = "orpo"
    simpo = "simpo"

    @property
    def has_reference(self) -> bool:
        """Whether the loss uses ratios to the initial model."""
        return self not in (PreferenceLoss.orpo, PreferenceLoss.simpo)


@dataclass(kw_only=True)
class PreferenceConfig(TaskConfig):
    """Preference tuning on pairs of answers: DPO and its kin."""

    CHUNKED_LOSS = True
    AUTO_CLASS = "AutoModelForCausalLM"
    LABEL_SMOOTHING = False
    TITLE = "preference tuning"
    PIPELINE_TAG = "text-generation"
    PATHS = ("chat_template",)
    USAGE = SftConfig.USAGE
    assistant_only_loss: ClassVar[bool] = False
    completion_only_loss: ClassVar[bool] = True

    loss_type: PreferenceLoss
    """The formula, by its name in TRL."""
    beta: Positive
    """How far the model may move from where it started; the weight of the odds ratio in orpo, tau
    in ipo."""
    label_smoothing: Annotated[float, number("a number in [0, 0.5)", lambda x: 0 <= x < 0.5)]
    """Probability that a preference is the wrong way round; robust and simpo take it."""
    simpo_gamma: NotNegative
    """Margin between the rewards of the two answers that simpo asks for."""
    disable_dropout: bool
    """Dropout off: two log-probabilities of one answer differ by the weights alone."""
    chat_template: str | None
    """A named template, or a jinja file; null: the tokenizer's own."""
    overlong_rows: OverlongRows
    """Pairs of which no answer is left within data.max_length: refuse the data, or leave them out
    and say how many."""

    def __post_init__(self) -> None:
        """Refuse label smoothing for losses without it."""
        super().__post_init__()
        self.expect(
            self.label_smoothing == 0
            or self.loss_type in (PreferenceLoss.robust, PreferenceLoss.simpo),
            "label_smoothing",
            f"0 with task.loss_type={self.loss_type.value}",
            "task.loss_type=robust is sigmoid for labels that may be wrong; simpo takes it, too.",
        )
