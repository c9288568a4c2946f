"""Adapters: few new weights beside frozen ones; names as in peft."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from optrun.config.schema.checks import (
    Checked,
    expect,
    expect_count,
    expect_pattern,
    expect_positive,
)
from optrun.config.schema.ranges import Count, Fraction, Positive

_INITIALIZATIONS = r"gaussian|orthogonal|olora|pissa(_niter_\d+)?"


class Bias(Enum):
    """Biases trained beside the factors."""

    none = "none"
    all = "all"
    lora_only = "lora_only"
    """Those of the modules that have factors."""


@dataclass(kw_only=True)
class AdapterConfig(Checked):
    """Base class of the choices of this group."""

    GROUP = "adapter."
    package: ClassVar[str | None] = None
    """Package of Python's that it needs."""

    name: str


@dataclass(kw_only=True)
class NoAdapterConfig(AdapterConfig):
    """Every weight trains."""


@dataclass(kw_only=True)
class LoraConfig(AdapterConfig):
    """`adapter=lora`: W + s B A with a frozen W; s is `lora_alpha` / `r`."""

    package = "peft"

    r: Count
    """Rank of B A."""
    lora_alpha: Positive
    lora_dropout: Fraction
    target_modules: Any
    """Names of modules, or ends of names at a dot, or one regular expression that fits whole names.

    Null, or
    all-linear: every linear module (transformers' Conv1D among them) but the head."""
    exclude_modules: Any = None
    """Those of them that get no factors, by names, their ends, or one regular expression."""
    layers_to_transform: Any = None
    """Numbers of the layers that get factors, one or a list; null: all."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Name of a module, its end, or a regular expression for it, to a rank of its own."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Likewise to a `lora_alpha` of its own."""
    init_lora_weights: Any = True
    """How factors begin: true, gaussian (B at zero), false (both random), orthogonal, olora, pissa,
    pissa_niter_N."""
    modules_to_save: list[str] | None
    """Names, or ends of them, of modules that train whole, and are saved with the factors.

    Null: the head that the task
    puts on the model, unless it is one of language modelling, which comes with the weights."""
    bias: Bias
    use_rslora: bool
    use_dora: bool
    loraplus_lr_ratio: Positive | None
    """What the lr of B is multiplied by; null: 1."""
    default_lr_factor: Positive | None
    """Where the top-level `lr` is not set, it is the optimizer's `default_lr` times this, of
    any model; null: 1.
    """

    def __post_init__(self) -> None:
        """Refuse invalid ranks, initializations and module names."""
        super().__post_init__()
        _expect_names("adapter.target_modules", self.target_modules, pattern=True)
        _expect_names("adapter.modules_to_save", self.modules_to_save, pattern=False)
        _expect_names("adapter.exclude_modules", self.exclude_modules, pattern=True)
        layers = self.layers_to_transform
        if layers is not None:
            numbers = layers if isinstance(layers, list | tuple) else [layers]
            self.expect(
                bool(numbers) and all(type(number) is int and number >= 0 for number in numbers),
                "layers_to_transform",
                "the number of a layer, a list of them, or null",
            )
        for name, rank in self.rank_pattern.items():
            expect_count(f"adapter.rank_pattern.{name}", rank)
        for name, alpha in self.alpha_pattern.items():
            expect_positive(f"adapter.alpha_pattern.{name}", alpha)
        initialization = self.init_lora_weights
        self.expect(
            isinstance(initialization, bool)
            or re.fullmatch(_INITIALIZATIONS, str(initialization)) is not None,
            "init_lora_weights",
            "true, false, gaussian, orthogonal, olora, pissa or pissa_niter_N",
            "Not offered are those that read data or a quantised base first: eva, corda,"
            " lora_ga, loftq.",
        )
        self.expect(
            initialization != "orthogonal" or self.r % 2 == 0,
            "r",
            "an even rank with init_lora_weights=orthogonal",
        )

    @property
    def keeps_base(self) -> bool:
        """Whether the base weights stay unchanged; pissa and olora take a part out of them."""
        return not str(self.init_lora_weights).startswith(("pissa", "olora"))


@dataclass(kw_only=True)
class QloraConfig(LoraConfig):
    """`adapter=qlora`: a LoRA beside a base of 4 bits, Dettmers et al. 2023."""


def _expect_names(key: str, value: object, *, pattern: bool) -> None:
    """Refuse anything but a list of module names or None.

    Args:
        key: Dotted key, for messages.
        value: Its value.
        pattern: Whether a regular expression is allowed, too; an empty list then is not.
    """
    if value is None:
        return
    if pattern and isinstance(value, str):
        expect(value != "", key, "''", "module names, or null")
        expect_pattern(key, value)
        return
    expected = "a list of module names, or null"
    is_valid = isinstance(value, list | tuple) and all(
        isinstance(name, str) and name for name in value
    )
    if pattern:
        expected = "a list of module names, a regular expression, or null"
        is_valid = is_valid and bool(value)
    expect(is_valid, key, value, expected)


SCHEMAS: dict[str, type[AdapterConfig]] = {
    "none": NoAdapterConfig,
    "lora": LoraConfig,
    "qlora": QloraConfig,
}
