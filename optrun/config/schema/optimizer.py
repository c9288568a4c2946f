"""How weights move.

One dataclass per choice, with the default, the range and the meaning of each option.

Keywords of the classes, with defaults and checks, are read from here; the files in
`conf/optimizer/` show the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from optrun.config import registry
from optrun.config.schema.optimizer_base import (
    DecaysForward,
    HasDialects,
    OptimizerConfig,
    TwoMoments,
)
from optrun.config.schema.ranges import (
    Betas,
    Count,
    Finite,
    Fraction,
    NotNegative,
    Patterns,
    Positive,
    ThreeBetas,
    WholeNumber,
    fraction,
    inner_share,
    not_negative,
    number,
    one_of,
    optional,
    several,
    whole_number,
)

StepCount = StrEnum("StepCount", ["parameter", "optimizer"])
"""Whose steps bias correction counts."""

UnmatchedPatterns = StrEnum("UnmatchedPatterns", ["error", "ignore"])
"""What a pattern is that is found in no parameter name."""

WeightDecayMode = StrEnum("WeightDecayMode", ["l1", "l2", "decoupled"])
"""Coupled (`l1`, `l2`: part of the gradient) or decoupled."""

BiasCorrection = StrEnum("BiasCorrection", ["moments", "lr", "lr_first", "none"])
"""What LAMB corrects for moments that began at 0: them, the rate (by both or the first alone), or
nothing."""

DecoupledDecay = StrEnum("DecoupledDecay", ["decoupled", "fixed", "scheduled", "corrected"])
"""What AdamW's decay is multiplied with: lr, 1, lr / peak (the paper's), or lr^2 / base lr
(timm's)."""

AdamaxEps = StrEnum("AdamaxEps", ["decayed", "gradient", "denominator"])
"""Where Adamax adds eps: to the decayed maximum, to |g|, or to the maximum where it divides."""

LambDecay = StrEnum("LambDecay", ["adapted", "decoupled", "fixed", "scheduled", "corrected"])
"""Where LAMB decays: inside the trust ratio, or outside by lr, by 1, by lr / peak, or by lr^2 /
base lr."""

EpsForm = StrEnum("EpsForm", ["documented", "mindspore"])
"""Where LazyAdam adds eps."""

AdjustLr = StrEnum("AdjustLr", ["original", "match_rms_adamw"])
"""How Muon's lr depends on a matrix's shape."""

DECAY_FORMS = ("documented", "paddlenlp", "paddlenlp-2.2")


def _layer_names(name: str, value: object) -> Any:
    """Check for a mapping from parameter names to names with a layer number, or None.

    Args:
        name: Key or keyword of the mapping, for messages.
        value: Such as `{"backbone.3.weight": "encoder.layers.3.weight"}`.

    Returns:
        A copy of the mapping; None for None.

    Raises:
        TypeError: The value is no mapping, is empty, or has a name that is no text.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        expected = "a mapping from parameter names to names with encoder.layers.<number>"
        raise TypeError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}.")
    for param_name, layer_name in value.items():
        if not isinstance(param_name, str) or not isinstance(layer_name, str):
            raise TypeError(
                f"{name}[{param_name}]={layer_name!r}: expected a name with"
                " encoder.layers.<number>."
            )
    return dict(value)


@dataclass(kw_only=True)
class LambConfig(TwoMoments, HasDialects):
    """`optimizer=lamb`."""

    transfer = "lamb"

    DIALECTS_OF = "lamb"
    BOUNDS = (("min_trust", "max_trust"),)
    default_lr: Positive = 2e-2
    weight_decay: Finite = 0.01
    eps: NotNegative = 1e-6
    exclude_from_weight_decay: Patterns | None = None
    """Regular expressions searched in parameter names: no decay there."""
    exclude_from_layer_adaptation: Patterns | None = None
    """Likewise: trust ratio 1 there."""
    always_adapt: bool = False
    """Adapt tensors that are not decayed, too."""
    master_weights: bool = False
    """Float32 copy of 16-bit parameters in the state."""
    step_count: StepCount = StepCount.parameter
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    unmatched_patterns: UnmatchedPatterns = UnmatchedPatterns.error
    bias_correction: BiasCorrection = BiasCorrection.moments
    weight_decay_mode: LambDecay = LambDecay.adapted
    max_param_norm: Positive | None = None
    """Upper bound of the weights' norm in the trust ratio, the paper's phi; null: none."""
    min_trust: NotNegative = 0.0
    """Lower bound of the trust ratio."""
    max_trust: Positive | None = None
    """Upper bound of it; null: none."""
    eps_in_trust: bool = False
    """Add eps to the update's norm in the trust ratio, too."""


@dataclass(kw_only=True)
class AdamaxConfig(DecaysForward, TwoMoments, HasDialects):
    """`optimizer=adamax`."""

    transfer = "adam"

    DIALECTS_OF = "adamax"
    default_lr: Positive = 4e-3
    weight_decay_mode: WeightDecayMode = WeightDecayMode.l2
    eps_form: AdamaxEps = AdamaxEps.decayed


@dataclass(kw_only=True)
class AdamWDLConfig(TwoMoments):
    """`optimizer=adamwdl`."""

    transfer = "adam"

    default_lr: Positive = 2e-3
    weight_decay: Finite = 0.01
    layerwise_decay: Positive = 1.0
    """Factor from one layer to the next below; 1 leaves layers to param_groups."""
    n_layers: WholeNumber = 12
    name_dict: Annotated[Any, _layer_names] = None
    """A mapping (not typed as one, since Hydra cannot put a mapping in the place of a typed
    null) from parameter names to names of the form `encoder.layers.<number>`; null: the names
    themselves.
    """
    decay_form: Annotated[str, one_of(*DECAY_FORMS)] = "documented"
    """A word with a dash and a dot in it, hence no Enum."""
    lazy_mode: bool = False
    master_weights: bool = False


@dataclass(kw_only=True)
class LazyAdamConfig(DecaysForward, TwoMoments):
    """`optimizer=lazy_adam`."""

    transfer = "adam"
    COUPLED_DECAY = True

    default_lr: Positive = 2e-3
    exclude_from_weight_decay: Patterns | None = None
    """Regular expressions searched in parameter names: no decay there."""
    nesterov: bool = False
    loss_scale: Positive = 1.0
    eps_form: EpsForm = EpsForm.documented
    grad_centralization: bool = False
    unmatched_patterns: UnmatchedPatterns = UnmatchedPatterns.error


@dataclass(kw_only=True)
class AdamConfig(DecaysForward, TwoMoments):
    """`optimizer=adam`."""

    transfer = "adam"
    COUPLED_DECAY = True

    default_lr: Positive = 2e-3
    amsgrad: bool = False
    fused: bool | None = None
    """torch's fused kernel; null: where it exists."""


@dataclass(kw_only=True)
class AdamWConfig(AdamConfig, HasDialects):
    """`optimizer=adamw`."""

    COUPLED_DECAY = False

    DIALECTS_OF = "adamw"
    weight_decay: NotNegative = 0.01
    weight_decay_mode: DecoupledDecay = DecoupledDecay.decoupled


@dataclass(kw_only=True)
class SGDConfig(DecaysForward):
    """`optimizer=sgd`."""

    transfer = "sgd"

    default_lr: Positive = 0.2
    momentum: Fraction = 0.9
    dampening: Finite = 0.0
    nesterov: bool = False
    foreach: bool | None = None

    def __post_init__(self) -> None:
        """Nesterov needs a momentum and no dampening, as torch says."""
        super().__post_init__()
        wants = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        self.expect(wants, "nesterov", "a momentum above 0 and a dampening of 0 with it")


@dataclass(kw_only=True)
class AdafactorConfig(DecaysForward):
    """`optimizer=adafactor`; ranges as in torch's constructor."""

    default_lr: Positive = 8e-2
    beta2_decay: Annotated[float, number("a number of 0 or less", lambda x: x <= 0)] = -0.8
    """Exponent, at most 0: beta2 of step t is 1 - t ** beta2_decay."""
    eps: Annotated[
        tuple[float | None, float],
        several(
            "two numbers, 0 or more, the first may be null", optional(not_negative), not_negative
        ),
    ] = (None, 1e-3)
    """Of the update's denominator (null: the dtype's own) and of the parameter's scale."""
    d: Annotated[float, number("a number of 1 or more", lambda x: x >= 1)] = 1.0
    """Clipping threshold of the update's root mean square."""
    foreach: bool | None = None


@dataclass(kw_only=True)
class MuonConfig(DecaysForward):
    """`optimizer=muon`: hidden matrices by Muon, all else by AdamW."""

    transfer = "muon"

    default_lr: Positive = 8e-3
    weight_decay: NotNegative = 0.1
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, whole_number("a whole number, 1 to 99", lambda x: 1 <= x < 100)] = 5
    """Newton-Schulz iterations."""
    adjust_lr_fn: AdjustLr = AdjustLr.match_rms_adamw
    betas: Betas = (0.9, 0.999)
    """Of the AdamW companion."""
    eps: NotNegative = 1e-8
    """Of the AdamW companion."""
    companion_lr_scale: Positive = 1.0
    """The companion's lr over Muon's."""


@dataclass(kw_only=True)
class LionConfig(DecaysForward):
    """`optimizer=lion`."""

    transfer = "adam"

    default_lr: Positive = 8e-4
    weight_decay: NotNegative = 0.1
    betas: Betas = (0.9, 0.99)
    """Of the interpolation whose sign is taken, and decay of the moment; each in [0, 1)."""
    foreach: bool | None = None


@dataclass(kw_only=True)
class ScheduleFreeConfig(DecaysForward, TwoMoments):
    """`optimizer=schedule_free`."""

    transfer = "adam"

    SCHEDULE_FREE = True
    default_lr: Positive = 2.5e-3
    weight_decay: NotNegative = 0.01
    betas: Annotated[
        tuple[float, float],
        several("two numbers, each in [0, 1), the first above 0", inner_share, fraction),
    ] = (0.9, 0.999)
    """The weights to evaluate are found by dividing by the first."""
    r: NotNegative = 0.0
    """Power of the step in the weights of the average."""
    weight_lr_power: NotNegative = 2.0
    """Power of the lr in them."""
    master_weights: bool = False


@dataclass(kw_only=True)
class AdEMAMixConfig(DecaysForward):
    """`optimizer=ademamix`."""

    transfer = "adam"

    default_lr: Positive = 2e-3
    weight_decay: NotNegative = 0.01
    betas: ThreeBetas = (0.9, 0.999, 0.9999)
    """Decay of the fast moment, the second moment and the slow moment, each in [0, 1)."""
    eps: NotNegative = 1e-8
    alpha: NotNegative = 5.0
    """Weight of the slow moment."""
    alpha_warmup_steps: WholeNumber | None = None
    """Steps in which alpha climbs from 0; null: none."""
    beta3_warmup_steps: WholeNumber | None = None
    """Steps in which the slow decay climbs from the fast one; null: none."""
    foreach: bool | None = None


@dataclass(kw_only=True)
class MarsConfig(DecaysForward, TwoMoments):
    """`optimizer=mars`."""

    transfer = "adam"

    default_lr: Positive = 3e-3
    weight_decay: NotNegative = 0.01
    betas: Betas = (0.95, 0.99)
    gamma: NotNegative = 0.025
    """Strength of the correction."""
    optimize_1d: bool = False
    betas_1d: Betas = (0.9, 0.95)
    """Decays for vectors and numbers that are not corrected, each in [0, 1)."""


@dataclass(kw_only=True)
class SoapConfig(DecaysForward):
    """`optimizer=soap`."""

    default_lr: Positive = 1.2e-2
    weight_decay: NotNegative = 0.01
    betas: Betas = (0.95, 0.95)
    """Decay of first and second moment, each in [0, 1)."""
    shampoo_beta: Fraction | None = None
    """Decay of the preconditioners; null: that of the second moment."""
    eps: NotNegative = 1e-8
    precondition_frequency: Count = 10
    """Steps from one eigenbasis to the next."""
    max_precondition_dim: WholeNumber = 10000
    """A longer dimension is left as it is."""
    precondition_1d: bool = False


@dataclass(kw_only=True)
class PytorchOptimizerConfig(OptimizerConfig):
    """An optimizer of the library pytorch-optimizer."""

    class_name: str
    """Its class there; case does not matter."""
    DEFAULT_WARMUP = False
    default_lr: Positive = 1e-3
    weight_decay: Finite = 0.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its own keywords; an unknown one is an error."""


SCHEMAS: Mapping[str, type[OptimizerConfig]] = registry.add_builtin(
    "optimizer",
    {
        "lamb": (LambConfig, "optrun.optimizer.lamb:Lamb"),
        "adamw": (AdamWConfig, "optrun.optimizer.torch_named:AdamW"),
        "adamwdl": (AdamWDLConfig, "optrun.optimizer.adamwdl:AdamWDL"),
        "adamax": (AdamaxConfig, "optrun.optimizer.adamax:Adamax"),
        "lazy_adam": (LazyAdamConfig, "optrun.optimizer.lazy_adam:LazyAdam"),
        "adam": (AdamConfig, "optrun.optimizer.torch_named:Adam"),
        "sgd": (SGDConfig, "optrun.optimizer.torch_named:SGD"),
        "adafactor": (AdafactorConfig, "optrun.optimizer.torch_named:Adafactor"),
        "muon": (MuonConfig, "optrun.optimizer.torch_named:Muon"),
        "lion": (LionConfig, "optrun.optimizer.lion:Lion"),
        "schedule_free": (ScheduleFreeConfig, "optrun.optimizer.schedule_free:ScheduleFreeAdamW"),
        "ademamix": (AdEMAMixConfig, "optrun.optimizer.ademamix:AdEMAMix"),
        "mars": (MarsConfig, "optrun.optimizer.mars:Mars"),
        "soap": (SoapConfig, "optrun.optimizer.soap:Soap"),
        "pytorch_optimizer": (
            PytorchOptimizerConfig,
            "optrun.optimizer.other_libraries:build_pytorch_optimizer",
        ),
    },
)
