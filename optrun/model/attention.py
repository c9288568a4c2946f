"""Attention implementations: their devices, and how they keep the documents of a block apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "model.attn_implementation"
_FLEX = "flex_attention"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Names of the dropout of attention in configurations of transformers."""
_INSTEAD = f"Take {KEY}=sdpa, or leave it null."


def device_type(name: str) -> str:
    """Return the device type of `training.device`, without starting the device.

    `auto` is cuda if there is one, else mps, else cpu.
    """
    if name != "auto":
        return name.partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def refuse_attention(config: ModelConfig, device: str, precision: str) -> None:
    """Refuse an unknown attention implementation, or one without its device or precision.

    Args:
        config: The model choice.
        device: `training.device`.
        precision: `training.precision`.

    Raises:
        ConfigError: It does not exist, its kernels do not run on the device, or they compute in 16
            bits only.
    """
    chosen = config.attn_implementation
    if chosen is None or "/" in chosen:  # OWNER/NAME is code of the hub, refused elsewhere
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    implementations = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if chosen not in implementations:
        raise ConfigError(
            f"{KEY}={chosen}: transformers has no attention of this name."
            f" {did_you_mean(chosen, implementations)}"
        )
    kind = device_type(device)
    if chosen in (_FLEX, *_FLASH) and kind != "cuda":
        raise ConfigError(
            f"{KEY}={chosen}: its kernels train only on CUDA devices, and training.device={device}"
            f" is {kind} here. {_INSTEAD}"
        )
    if chosen in _FLASH and precision == "fp32":
        raise ConfigError(
            f"{KEY}={chosen}: its kernels compute in 16 bits, and training.precision=fp32. Take"
            f" training.precision=bf16, or {KEY}=sdpa."
        )


def attention_of(model: PreTrainedModel) -> str:
    """Return the transformers name of a model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", None) or "eager")


def refuse_attention_dropout(model: PreTrainedModel) -> None:
    """Refuse attention dropout with FlexAttention, since its kernels have none.

    Raises:
        ConfigError: With the key of the dropout and its value.
    """
    if attention_of(model) != _FLEX:
        return
    values = model.config.get_text_config()
    for name in _DROPOUTS:
        probability = getattr(values, name, 0)
        if probability:
            raise ConfigError(
                f"{KEY}={_FLEX}: it has no dropout, and this model's configuration has"
                f" {name}={probability}. Take model.config.{name}=0, or {KEY}=sdpa."
            )


def needs_device(model: PreTrainedModel) -> bool:
    """Tell whether the attention implementation needs a GPU."""
    return attention_of(model) in (_FLEX, *_FLASH)


def needs_one_row_batch(model: PreTrainedModel) -> bool:
    """Tell whether documents are kept apart only if a batch is a single row.

    So it is in flash attention.
    """
    return attention_of(model) in _FLASH


def describe_document_masking(model: PreTrainedModel, key: str) -> str:
    """Describe for the user how attention stays within each document of a packed block.

    A packed block is an example of several documents, one behind the other.

    Args:
        model: A built model.
        key: The option that asks for it, such as `task.packing=true`.
    """
    chosen = attention_of(model)
    if chosen in _FLASH:
        how = f"the variable lengths of {chosen}; a batch is one row without padding"
    elif chosen == _FLEX:
        how = f"{chosen} with a mask of documents, which leaves out whole blocks of it"
    else:
        how = f"a block-diagonal mask ({chosen})"
    return f"{key}: documents of a block are kept apart by {how}"


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Use eager attention in place of flash and flex attention inside this context.

    Eager attention runs on every device. The configurations are restored at the end.

    Args:
        model: A transformers model; its submodules may have configurations of their own.
    """
    configs: dict[int, Any] = {}  # by identity: modules share them
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in (_FLEX, *_FLASH):
            configs[id(config)] = config
    before = {number: config._attn_implementation for number, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for number, config in configs.items():
            config._attn_implementation = before[number]
