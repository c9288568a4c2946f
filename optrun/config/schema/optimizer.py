"""How weights move: one dataclass per choice; values and what they are for stand in `conf/optimizer/`."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.config.dialects import ADAMAX, ADAMW, LAMB, Preset, expect_dialect
from optrun.config.schema.checks import (
    expect,
    expect_count,
    expect_fraction,
    expect_not_negative,
    expect_one_of,
    expect_positive,
)


class StepCount(Enum):
    """Whose steps bias correction counts."""

    parameter = "parameter"
    optimizer = "optimizer"


class UnmatchedPatterns(Enum):
    """What a pattern is that is found in no parameter name."""

    error = "error"
    ignore = "ignore"


class WeightDecayMode(Enum):
    """Coupled (`l1`, `l2`: part of the gradient) or decoupled."""

    l1 = "l1"
    l2 = "l2"
    decoupled = "decoupled"


class BiasCorrection(Enum):
    """What LAMB corrects for moments that began at 0: them, the rate (by both or the first alone), or nothing."""

    moments = "moments"
    lr = "lr"
    lr_first = "lr_first"
    none = "none"


class DecoupledDecay(Enum):
    """What AdamW's decay is multiplied with: lr, 1, lr / peak (the paper's), or lr^2 / base lr (timm's)."""

    decoupled = "decoupled"
    fixed = "fixed"
    scheduled = "scheduled"
    corrected = "corrected"


class AdamaxEps(Enum):
    """Where Adamax adds eps: to the decayed maximum, to |g|, or to the maximum where it divides."""

    decayed = "decayed"
    gradient = "gradient"
    denominator = "denominator"


class LambDecay(Enum):
    """Where LAMB decays: inside the trust ratio, or outside by lr, by 1, by lr / peak, or by lr^2 / base lr."""

    adapted = "adapted"
    decoupled = "decoupled"
    fixed = "fixed"
    scheduled = "scheduled"
    corrected = "corrected"


class EpsForm(Enum):
    """Where LazyAdam adds eps."""

    documented = "documented"
    mindspore = "mindspore"


class AdjustLr(Enum):
    """How Muon's lr depends on a matrix's shape."""

    original = "original"
    match_rms_adamw = "match_rms_adamw"


DECAY_FORMS = ("documented", "paddlenlp", "paddlenlp-2.2")


def _betas(value: Sequence[float], count: str = "two", key: str = "betas") -> tuple[Any, ...]:
    right = len(value) == {"two": 2, "three": 3}[count] and all(0 <= beta < 1 for beta in value)
    expect(right, f"optimizer.{key}", list(value), f"{count} numbers, each in [0, 1)")
    return tuple(value)


@dataclass(kw_only=True)
class OptimizerConfig:
    """What every optimizer choice has."""

    name: str
    default_lr: float
    """Peak learning rate where the top-level `lr` is not set."""
    weight_decay: float
    """Decay of the parameters that param_groups does not exempt; what it does is the optimizer's."""
    SCHEDULE_FREE: ClassVar[bool] = False
    """Whether something else takes the place of a schedule, so that one is worth a word."""
    DEFAULT_WARMUP: ClassVar[bool] = True
    """Whether a run that asks for no warm-up gets one, whose first step has lr 0."""
    transfer: ClassVar[str | None] = None
    """How lr goes with the width under `parametrization=mup`: as that of `adam`, `sgd`, `lamb` or `muon`; None: it is
    not known, and refused. `optrun certify transfer` finds out."""
    COUPLED_DECAY: ClassVar[bool] = False
    """Whether weight decay is always part of the gradient."""

    def __post_init__(self) -> None:
        """Ranges that hold for all."""
        expect(0 < self.default_lr < math.inf, "optimizer.default_lr", self.default_lr, "a number above 0")
        expect(math.isfinite(self.weight_decay), "optimizer.weight_decay", self.weight_decay, "a finite number")


@dataclass(kw_only=True)
class _DecaysForward(OptimizerConfig):
    def __post_init__(self) -> None:
        super().__post_init__()
        expect_not_negative("optimizer.weight_decay", self.weight_decay)


@dataclass(kw_only=True)
class _TwoMoments(OptimizerConfig):
    betas: tuple[float, float]
    """Decay of first and second moment, each in [0, 1)."""
    eps: float
    """Keeps the denominator from 0."""
    foreach: bool | None
    """Fused kernels; null: wherever they are the faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.betas = _betas(self.betas)
        expect_not_negative("optimizer.eps", self.eps)


@dataclass(kw_only=True)
class _HasDialects(OptimizerConfig):
    DIALECTS: ClassVar[Mapping[str, Preset]] = {}
    """Presets by the name of a package."""
    dialect: str | None
    """Package whose numbers these are: it sets the defaults of options that it has otherwise; null: optrun's own."""


@dataclass(kw_only=True)
class LambConfig(_TwoMoments, _HasDialects):
    """`optimizer=lamb`."""

    transfer = "lamb"

    DIALECTS: ClassVar[Mapping[str, Preset]] = LAMB
    exclude_from_weight_decay: list[str] | None
    """Regular expressions searched in parameter names: no decay there."""
    exclude_from_layer_adaptation: list[str] | None
    """Likewise: trust ratio 1 there."""
    always_adapt: bool
    """Adapt tensors that are not decayed, too."""
    master_weights: bool
    """Float32 copy of 16-bit parameters in the state."""
    step_count: StepCount
    l1: float
    l2: float
    unmatched_patterns: UnmatchedPatterns
    bias_correction: BiasCorrection
    grad_averaging: bool
    """False: the gradient comes into the first moment whole, not times 1 - beta1."""
    normalize_grad: bool
    """Each tensor's gradient is divided by its norm, as LANS does."""
    eps_root: float
    """Added under the square root."""
    caution: bool
    """Entries of the direction against the sign of the gradient are dropped, the others scaled up."""
    weight_decay_mode: LambDecay
    min_param_norm: float
    """Lower bound of the weights' norm in the trust ratio, the paper's phi."""
    max_param_norm: float | None
    """Upper bound of it; null: none."""
    min_trust: float
    """Lower bound of the trust ratio."""
    max_trust: float | None
    """Upper bound of it; null: none."""
    eps_in_trust: bool
    """Add eps to the update's norm in the trust ratio, too."""

    def __post_init__(self) -> None:
        """Coefficients and lower bounds are not negative, upper ones are above them."""
        super().__post_init__()
        expect_dialect("lamb", self.dialect)
        for name in ("l1", "l2", "eps_root", "min_param_norm", "min_trust"):
            expect_not_negative(f"optimizer.{name}", getattr(self, name))
        for low, high in (("min_param_norm", "max_param_norm"), ("min_trust", "max_trust")):
            least, most = getattr(self, low), getattr(self, high)
            right = most is None or (0 < most < math.inf and least <= most)
            expect(right, f"optimizer.{high}", most, f"a number above 0 that optimizer.{low} ({least}) is not above")


@dataclass(kw_only=True)
class AdamaxConfig(_DecaysForward, _TwoMoments, _HasDialects):
    """`optimizer=adamax`."""

    transfer = "adam"

    DIALECTS: ClassVar[Mapping[str, Preset]] = ADAMAX
    weight_decay_mode: WeightDecayMode
    eps_form: AdamaxEps

    def __post_init__(self) -> None:
        """The dialect is one that exists."""
        super().__post_init__()
        expect_dialect("adamax", self.dialect)


@dataclass(kw_only=True)
class AdamWDLConfig(_TwoMoments):
    """`optimizer=adamwdl`."""

    transfer = "adam"

    layerwise_decay: float
    """Factor from one layer to the next below; 1 leaves layers to param_groups."""
    n_layers: int
    name_dict: Any
    """A mapping (not typed as one, since Hydra cannot put a mapping in the place of a typed null) from parameter names
    to names of the form `encoder.layers.<number>`; null: the names themselves."""
    decay_form: str
    """A word with a dash and a dot in it, hence no Enum."""
    lazy_mode: bool
    master_weights: bool

    def __post_init__(self) -> None:
        """The decay form is one that exists, the layers are counted."""
        super().__post_init__()
        expect_positive("optimizer.layerwise_decay", self.layerwise_decay)
        expect_not_negative("optimizer.n_layers", self.n_layers)
        expect_one_of("optimizer.decay_form", self.decay_form, DECAY_FORMS)
        if self.name_dict is not None:
            right = isinstance(self.name_dict, dict) and bool(self.name_dict)
            expected = "a mapping from parameter names to names with encoder.layers.<number>, or null"
            expect(right, "optimizer.name_dict", self.name_dict, expected)
            for key, value in self.name_dict.items():
                both = isinstance(key, str) and isinstance(value, str)
                expect(both, f"optimizer.name_dict[{key}]", value, "a name with encoder.layers.<number>")


@dataclass(kw_only=True)
class LazyAdamConfig(_DecaysForward, _TwoMoments):
    """`optimizer=lazy_adam`."""

    transfer = "adam"
    COUPLED_DECAY = True

    exclude_from_weight_decay: list[str] | None
    """Regular expressions searched in parameter names: no decay there."""
    nesterov: bool
    loss_scale: float
    eps_form: EpsForm
    grad_centralization: bool
    unmatched_patterns: UnmatchedPatterns

    def __post_init__(self) -> None:
        """The loss scale divides."""
        super().__post_init__()
        expect_positive("optimizer.loss_scale", self.loss_scale)


@dataclass(kw_only=True)
class AdamConfig(_DecaysForward, _TwoMoments):
    """`optimizer=adam`."""

    transfer = "adam"
    COUPLED_DECAY = True

    amsgrad: bool
    fused: bool | None
    """torch's fused kernel; null: where it exists."""


@dataclass(kw_only=True)
class AdamWConfig(AdamConfig, _HasDialects):
    """`optimizer=adamw`."""

    COUPLED_DECAY = False
    DIALECTS: ClassVar[Mapping[str, Preset]] = ADAMW
    SINCE_KINDS: ClassVar[frozenset[str]] = frozenset({"dialect", "weight_decay_mode"})
    """Keys that no run has whose kind was not saved: by the others it may as well be Adam's."""
    weight_decay_mode: DecoupledDecay

    def __post_init__(self) -> None:
        """The dialect is one that exists."""
        super().__post_init__()
        expect_dialect("adamw", self.dialect)


@dataclass(kw_only=True)
class SGDConfig(_DecaysForward):
    """`optimizer=sgd`."""

    transfer = "sgd"

    momentum: float
    dampening: float
    nesterov: bool
    foreach: bool | None

    def __post_init__(self) -> None:
        """Nesterov needs a momentum and no dampening, as torch says."""
        super().__post_init__()
        expect_fraction("optimizer.momentum", self.momentum)
        wants = not self.nesterov or (self.momentum > 0 and self.dampening == 0)
        expect(wants, "optimizer.nesterov", self.nesterov, "a momentum above 0 and a dampening of 0 with it")


@dataclass(kw_only=True)
class RMSpropConfig(_DecaysForward):
    """`optimizer=rmsprop`."""

    alpha: float
    eps: float
    momentum: float
    centered: bool
    foreach: bool | None

    def __post_init__(self) -> None:
        """Decays lie in [0, 1)."""
        super().__post_init__()
        expect_fraction("optimizer.alpha", self.alpha)
        expect_fraction("optimizer.momentum", self.momentum)
        expect_not_negative("optimizer.eps", self.eps)


@dataclass(kw_only=True)
class NAdamConfig(_DecaysForward, _TwoMoments):
    """`optimizer=nadam`."""

    transfer = "adam"

    momentum_decay: float
    decoupled_weight_decay: bool

    def __post_init__(self) -> None:
        """The momentum schedule falls."""
        super().__post_init__()
        expect_not_negative("optimizer.momentum_decay", self.momentum_decay)


@dataclass(kw_only=True)
class RAdamConfig(_DecaysForward, _TwoMoments):
    """`optimizer=radam`."""

    transfer = "adam"

    decoupled_weight_decay: bool


@dataclass(kw_only=True)
class AdafactorConfig(_DecaysForward):
    """`optimizer=adafactor`."""

    beta2_decay: float
    """Exponent, at most 0: beta2 of step t is 1 - t ** beta2_decay."""
    eps: tuple[float | None, float]
    """Of the update's denominator (null: the dtype's own) and of the parameter's scale."""
    d: float
    """Clipping threshold of the update's root mean square."""
    foreach: bool | None

    def __post_init__(self) -> None:
        """As torch's constructor."""
        super().__post_init__()
        right = len(self.eps) == 2 and self.eps[1] is not None and all(e is None or e >= 0 for e in self.eps)
        expect(right, "optimizer.eps", list(self.eps), "two numbers, 0 or more, the first may be null")
        self.eps = (self.eps[0], self.eps[1])
        expect(self.beta2_decay <= 0, "optimizer.beta2_decay", self.beta2_decay, "0 or less")
        expect(self.d >= 1, "optimizer.d", self.d, "1 or more")


@dataclass(kw_only=True)
class MuonConfig(_DecaysForward):
    """`optimizer=muon`: hidden matrices by Muon, all else by AdamW."""

    transfer = "muon"

    momentum: float
    nesterov: bool
    ns_steps: int
    """Newton-Schulz iterations."""
    adjust_lr_fn: AdjustLr
    betas: tuple[float, float]
    """Of the AdamW companion."""
    eps: float
    """Of the AdamW companion."""
    companion_lr_scale: float
    """The companion's lr over Muon's."""

    def __post_init__(self) -> None:
        """Both halves' ranges."""
        super().__post_init__()
        self.betas = _betas(self.betas)
        expect_fraction("optimizer.momentum", self.momentum)
        expect_not_negative("optimizer.eps", self.eps)
        expect(1 <= self.ns_steps < 100, "optimizer.ns_steps", self.ns_steps, "1 to 99")
        expect_positive("optimizer.companion_lr_scale", self.companion_lr_scale)


@dataclass(kw_only=True)
class LionConfig(_DecaysForward):
    """`optimizer=lion`."""

    transfer = "adam"

    betas: tuple[float, float]
    """Of the interpolation whose sign is taken, and decay of the moment; each in [0, 1)."""
    foreach: bool | None

    def __post_init__(self) -> None:
        """Decays lie in [0, 1)."""
        super().__post_init__()
        self.betas = _betas(self.betas)


@dataclass(kw_only=True)
class ScheduleFreeConfig(_DecaysForward, _TwoMoments):
    """`optimizer=schedule_free`."""

    transfer = "adam"

    SCHEDULE_FREE: ClassVar[bool] = True
    r: float
    """Power of the step in the weights of the average."""
    weight_lr_power: float
    """Power of the lr in them."""
    master_weights: bool

    def __post_init__(self) -> None:
        """The weights to evaluate are found by dividing by the first beta."""
        super().__post_init__()
        expect(self.betas[0] > 0, "optimizer.betas", list(self.betas), "two numbers, the first above 0")
        expect_not_negative("optimizer.r", self.r)
        expect_not_negative("optimizer.weight_lr_power", self.weight_lr_power)


@dataclass(kw_only=True)
class AdEMAMixConfig(_DecaysForward):
    """`optimizer=ademamix`."""

    transfer = "adam"

    betas: tuple[float, float, float]
    """Decay of the fast moment, the second moment and the slow moment, each in [0, 1)."""
    eps: float
    alpha: float
    """Weight of the slow moment."""
    alpha_warmup_steps: int | None
    """Steps in which alpha climbs from 0; null: none."""
    beta3_warmup_steps: int | None
    """Steps in which the slow decay climbs from the fast one; null: none."""
    foreach: bool | None

    def __post_init__(self) -> None:
        """Decays lie in [0, 1), nothing else is negative."""
        super().__post_init__()
        self.betas = _betas(self.betas, "three")
        for key in ("eps", "alpha", "alpha_warmup_steps", "beta3_warmup_steps"):
            expect_not_negative(f"optimizer.{key}", getattr(self, key))


@dataclass(kw_only=True)
class MarsConfig(_DecaysForward, _TwoMoments):
    """`optimizer=mars`."""

    transfer = "adam"

    gamma: float
    """Strength of the correction."""
    optimize_1d: bool
    betas_1d: tuple[float, float]
    """Decays for vectors and numbers that are not corrected, each in [0, 1)."""

    def __post_init__(self) -> None:
        """Decays lie in [0, 1), the correction is none or forward."""
        super().__post_init__()
        self.betas_1d = _betas(self.betas_1d, key="betas_1d")
        expect_not_negative("optimizer.gamma", self.gamma)


@dataclass(kw_only=True)
class SoapConfig(_DecaysForward):
    """`optimizer=soap`."""

    betas: tuple[float, float]
    """Decay of first and second moment, each in [0, 1)."""
    shampoo_beta: float | None
    """Decay of the preconditioners; null: that of the second moment."""
    eps: float
    precondition_frequency: int
    """Steps from one eigenbasis to the next."""
    max_precondition_dim: int
    """A longer dimension is left as it is."""
    precondition_1d: bool

    def __post_init__(self) -> None:
        """Decays lie in [0, 1), steps and lengths are counted."""
        super().__post_init__()
        self.betas = _betas(self.betas)
        expect_fraction("optimizer.shampoo_beta", self.shampoo_beta)
        expect_not_negative("optimizer.eps", self.eps)
        expect_count("optimizer.precondition_frequency", self.precondition_frequency)
        expect_not_negative("optimizer.max_precondition_dim", self.max_precondition_dim)


@dataclass(kw_only=True)
class PytorchOptimizerConfig(OptimizerConfig):
    """`optimizer=pytorch_optimizer optimizer.name=...`: an optimizer of that library, by its name there."""

    named_by_library: ClassVar[bool] = True
    """So that its name may be that of one of our choices."""
    DEFAULT_WARMUP: ClassVar[bool] = False
    kwargs: dict[str, Any]
    """Its own keywords; an unknown one is an error."""


SCHEMAS: dict[str, type[OptimizerConfig]] = registry.own(
    "optimizer",
    {
        "lamb": (LambConfig, "optrun.optimizer.lamb:Lamb"),
        "adamw": (AdamWConfig, "optrun.optimizer.torch_named:AdamW"),
        "adamwdl": (AdamWDLConfig, "optrun.optimizer.adamwdl:AdamWDL"),
        "adamax": (AdamaxConfig, "optrun.optimizer.adamax:Adamax"),
        "lazy_adam": (LazyAdamConfig, "optrun.optimizer.lazy_adam:LazyAdam"),
        "adam": (AdamConfig, "optrun.optimizer.torch_named:Adam"),
        "sgd": (SGDConfig, "optrun.optimizer.torch_named:SGD"),
        "rmsprop": (RMSpropConfig, "optrun.optimizer.torch_named:RMSprop"),
        "nadam": (NAdamConfig, "optrun.optimizer.torch_named:NAdam"),
        "radam": (RAdamConfig, "optrun.optimizer.torch_named:RAdam"),
        "adafactor": (AdafactorConfig, "optrun.optimizer.torch_named:Adafactor"),
        "muon": (MuonConfig, "optrun.optimizer.torch_named:Muon"),
        "lion": (LionConfig, "optrun.optimizer.lion:Lion"),
        "schedule_free": (ScheduleFreeConfig, "optrun.optimizer.schedule_free:ScheduleFreeAdamW"),
        "ademamix": (AdEMAMixConfig, "optrun.optimizer.ademamix:AdEMAMix"),
        "mars": (MarsConfig, "optrun.optimizer.mars:Mars"),
        "soap": (SoapConfig, "optrun.optimizer.soap:Soap"),
        "pytorch_optimizer": (PytorchOptimizerConfig, "optrun.optimizer.foreign:build_pytorch_optimizer"),
    },
)

_FEW_BITS = re.compile(r"[48]_?bit|^paged|bnb|bitsandbytes|torchao|fp8", re.IGNORECASE)


def refuse_few_bits(key: str, name: str) -> None:
    """Refuse the optimizers of bitsandbytes and torchao by the names they have in other programs.

    Raises:
        ConfigError: With the reason and what to take instead.
    """
    if _FEW_BITS.search(name):
        raise ConfigError(
            f"{key}={name}: not offered: the optimizers of bitsandbytes and torchao, with a state of few bits or in "
            "pages, are not proved here to go on from a checkpoint bit for bit, and torchao's state are tensors that a "
            "checkpoint cannot hold. Less state than AdamW's: optimizer=lion, optimizer=adafactor, "
            "optimizer=muon or optimizer=sgd."
        )
