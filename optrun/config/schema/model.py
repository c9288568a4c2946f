"""Which transformers model, and with which tokenizer."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from optrun.base.errors import refuse_url
from optrun.config.schema.checks import expect, expect_count


class WeightDtype(Enum):
    """Floating types of weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(kw_only=True)
class ModelConfig:
    """What every model choice has."""

    name: str
    config: dict[str, Any]
    """Values for the transformers configuration, by its own names; an unknown one is an error."""
    tokenizer: str | None
    """Hub name or local folder of a tokenizer; null: the model's own, or one trained on the training text."""
    attn_implementation: str | None
    """By transformers' name; null: what transformers picks."""
    dtype: WeightDtype
    """Of the weights. Of `bfloat16` those that an adapter trains are float32 all the same."""

    def __post_init__(self) -> None:
        """Refuse what is no name and no folder."""
        refuse_url("model.tokenizer", self.tokenizer)


@dataclass(kw_only=True)
class PretrainedConfig(ModelConfig):
    """A model with weights, from the hub or a local folder."""

    path: str
    """Hub name or local folder."""
    default_lr_factor: float | None = None
    """Where the top-level `lr` is not set, it is the optimizer's `default_lr` times this: weights that were trained
    before are moved in smaller steps. Null, as in configurations saved before it existed: 1."""
    revision: str | None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Counts only when it stands on the command line."""
    quantization: str | None = None
    """`4bit` or `8bit`: linear modules of a base that an adapter stands beside, by bitsandbytes. This and the next two
    have defaults: older runs have no such keys."""
    bnb_4bit_quant_type: str = "nf4"
    """`nf4`, whose 16 values are quantiles of a normal distribution, or `fp4`, which are floating-point numbers."""
    bnb_4bit_use_double_quant: bool = False
    """Of each 64 weights in 4 bits the constant is in 8 bits, too, not in 32."""

    def __post_init__(self) -> None:
        """Refuse an empty path and a factor without a sense."""
        super().__post_init__()
        refuse_url("model.path", self.path)
        expect(bool(self.path.strip()), "model.path", repr(self.path), "a hub name or a local folder")
        factor = self.default_lr_factor
        expect(
            factor is None or 0 < factor < math.inf,
            "model.default_lr_factor",
            factor,
            "a number above 0, or null",
        )
        bits, kind = self.quantization, self.bnb_4bit_quant_type
        expect(bits in (None, "4bit", "8bit"), "model.quantization", bits, "4bit, 8bit or null")
        expect(kind in ("nf4", "fp4"), "model.bnb_4bit_quant_type", kind, "nf4 or fp4")
        twice, beside = self.bnb_4bit_use_double_quant, "It has an effect with model.quantization=4bit alone."
        expect(bits == "4bit" or kind == "nf4", "model.bnb_4bit_quant_type", kind, "nf4, its default", beside)
        expect(bits == "4bit" or not twice, "model.bnb_4bit_use_double_quant", "true", "false, its default", beside)


@dataclass(kw_only=True)
class FromConfigConfig(ModelConfig):
    """Any transformers architecture, from scratch."""

    model_type: str
    """transformers' name of the architecture: `gpt2`, `bert`, `llama`, `t5`, `vit`, ..."""
    vocab_size: int
    """Size of the byte-level BPE vocabulary trained on the training text, where no tokenizer is named."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary that cannot hold the 256 bytes and the special tokens."""
        super().__post_init__()
        expect(self.vocab_size >= 300, "model.vocab_size", self.vocab_size, "300 or more: 256 bytes and special tokens")
        expect_count("model.vocab_size", self.vocab_size)


SCHEMAS: dict[str, type[ModelConfig]] = {
    "gpt_tiny": FromConfigConfig,
    "bert_tiny": FromConfigConfig,
    "vit_tiny": FromConfigConfig,
    "from_config": FromConfigConfig,
    "pretrained": PretrainedConfig,
}
