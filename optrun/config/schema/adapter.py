"""Few new weights that train beside frozen ones; names as in peft."""

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

_BEGINNINGS = r"gaussian|orthogonal|olora|pissa(_niter_\d+)?"


class Bias(Enum):
    """Biases that train beside the factors."""

    none = "none"
    all = "all"
    lora_only = "lora_only"
    """Those of the modules that have factors."""


@dataclass(kw_only=True)
class AdapterConfig(Checked):
    """What every choice has."""

    GROUP = "adapter."
    package: ClassVar[str | None] = None
    """Package of Python's that it needs."""

    name: str


@dataclass(kw_only=True)
class NoAdapterConfig(AdapterConfig):
    """Every weight trains."""


@dataclass(kw_only=True)
class LoraConfig(AdapterConfig):
    """`adapter=lora`: W + s B A, where W is frozen; s is `lora_alpha` over `r`."""

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
    target_parameters: list[str] | None = None
    """Names of parameters with two or three axes, or ends of names at a dot, that get factors
    by themselves, such as the experts stacked in mlp.experts.gate_up_proj; each expert has its
    own, of rank `r`.
    """
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
        """Refuse ranks and beginnings that are none, and names that cannot be names."""
        super().__post_init__()
        if self.target_modules != [] or self.target_parameters is None:
            _expect_names("adapter.target_modules", self.target_modules, pattern=True)
        _expect_names("adapter.modules_to_save", self.modules_to_save, pattern=False)
        _expect_names("adapter.exclude_modules", self.exclude_modules, pattern=True)
        if self.target_parameters is not None:
            self._expect_plain_factors()
        layers, given = self.layers_to_transform, self.init_lora_weights
        listed = [layers] if isinstance(layers, int) and not isinstance(layers, bool) else layers
        numbers = isinstance(listed, list | tuple) and bool(listed)
        self.expect(
            layers is None or (numbers and all(type(one) is int and one >= 0 for one in listed)),
            "layers_to_transform",
            "the number of a layer, a list of them, or null",
        )
        for name, rank in self.rank_pattern.items():
            expect_count(f"adapter.rank_pattern.{name}", rank)
        for name, alpha in self.alpha_pattern.items():
            expect_positive(f"adapter.alpha_pattern.{name}", alpha)
        self.expect(
            isinstance(given, bool) or bool(re.fullmatch(_BEGINNINGS, str(given))),
            "init_lora_weights",
            "true, false, gaussian, orthogonal, olora, pissa or pissa_niter_N",
            "Not offered are those that look at data or a quantised base first: eva, corda,"
            " lora_ga, loftq.",
        )
        self.expect(
            given != "orthogonal" or self.r % 2 == 0,
            "r",
            "an even rank with init_lora_weights=orthogonal",
        )

    def _expect_plain_factors(self) -> None:
        """Refuse beside parameters what needs the module that a matrix belongs to, as peft does."""
        self.expect(
            bool(self.target_parameters), "target_parameters", "a list of parameter names, or null"
        )
        alone = "with adapter.target_parameters"
        self.expect(
            self.lora_dropout == 0,
            "lora_dropout",
            f"0 {alone}",
            "Factors are added to the parameter itself.",
        )
        self.expect(
            not self.use_dora, "use_dora", f"false {alone}", "DoRA scales what a module computes."
        )
        self.expect(
            self.layers_to_transform is None,
            "layers_to_transform",
            f"null {alone}",
            "It tells modules apart alone: name the parameters with their layers, such as"
            " 0.mlp.experts.down_proj.",
        )
        self.expect(
            isinstance(self.init_lora_weights, bool) or self.init_lora_weights == "gaussian",
            "init_lora_weights",
            f"true, false or gaussian {alone}",
            "The others read the weight of a module.",
        )

    @property
    def keeps_base(self) -> bool:
        """Whether the base stays what it was when factors are put beside it.

        Pissa and olora take a part out of it.
        """
        return not str(self.init_lora_weights).startswith(("pissa", "olora"))


@dataclass(kw_only=True)
class QloraConfig(LoraConfig):
    """`adapter=qlora`: a LoRA beside a base of 4 bits, Dettmers et al. 2023."""


def _expect_names(key: str, value: object, *, pattern: bool) -> None:
    if value is None:
        return
    if pattern and isinstance(value, str):
        expect(bool(value), key, "''", "module names, or null")
        expect_pattern(key, value)
        return
    either = (
        "a list of module names, a regular expression, or null"
        if pattern
        else "a list of module names, or null"
    )
    names = isinstance(value, list | tuple) and all(
        isinstance(name, str) and name for name in value
    )
    expect(names and (bool(value) or not pattern), key, value, either)


SCHEMAS: dict[str, type[AdapterConfig]] = {
    "none": NoAdapterConfig,
    "lora": LoraConfig,
    "qlora": QloraConfig,
}
