"""Which transformers model, and with which tokenizer."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from optrun.base.errors import refuse_url
from optrun.config.schema.checks import Checked, expect
from optrun.config.schema.ranges import Positive, at_least, one_of

WeightDtype = StrEnum("WeightDtype", ["float32", "bfloat16"])
"""Floating types of weights."""


@dataclass(kw_only=True)
class ModelConfig(Checked):
    """What every model choice has."""

    GROUP = "model."
    name: str
    config: dict[str, Any]
    """Values for the transformers configuration, by its own names; an unknown one is an error."""
    tokenizer: str | None
    """Hub name or local folder of a tokenizer; null: the model's own, or one trained on the
    training text."""
    attn_implementation: str | None
    """By transformers' name; null: what transformers picks."""
    dtype: WeightDtype
    """Of the weights. Of `bfloat16` those that an adapter trains are float32 all the same."""

    def __post_init__(self) -> None:
        """Refuse a URL as `model.tokenizer`."""
        super().__post_init__()
        refuse_url("model.tokenizer", self.tokenizer)


@dataclass(kw_only=True)
class PretrainedConfig(ModelConfig):
    """A model with weights, from the hub or a local folder."""

    path: str
    """Hub name or local folder."""
    default_lr_factor: Positive | None = None
    """Where the top-level `lr` is not set, it is the optimizer's `default_lr` times this: weights
    that were trained before are moved in smaller steps. Null: 1."""
    revision: str | None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Counts only when it stands on the command line."""
    quantization: Annotated[str, one_of("4bit")] | None = None
    """`4bit`: linear modules of a base that an adapter stands beside, nf4 by bitsandbytes."""

    def __post_init__(self) -> None:
        """Refuse an empty path and a URL."""
        super().__post_init__()
        refuse_url("model.path", self.path)
        expect(
            bool(self.path.strip()), "model.path", repr(self.path), "a hub name or a local folder"
        )


@dataclass(kw_only=True)
class FromConfigConfig(ModelConfig):
    """Any transformers architecture, from scratch."""

    model_type: str
    """transformers' name of the architecture: `gpt2`, `bert`, `llama`, `t5`, `vit`, ..."""
    vocab_size: Annotated[int, at_least(300, ": 256 bytes and special tokens")]
    """Size of the byte-level BPE vocabulary trained on the training text, where no tokenizer is
    named."""


SCHEMAS: dict[str, type[ModelConfig]] = {
    "gpt_tiny": FromConfigConfig,
    "bert_tiny": FromConfigConfig,
    "vit_tiny": FromConfigConfig,
    "from_config": FromConfigConfig,
    "pretrained": PretrainedConfig,
}
