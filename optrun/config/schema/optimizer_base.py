"""Base classes of optimizer schemas."""

import re
from dataclasses import dataclass
from typing import ClassVar

from optrun.base.errors import ConfigError
from optrun.config.dialects import expect_dialect
from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import Betas, Finite, NotNegative, Positive


@dataclass(kw_only=True)
class OptimizerConfig(Checked):
    """What every optimizer choice has."""

    GROUP = "optimizer."
    name: str
    default_lr: Positive
    """Peak learning rate where the top-level `lr` is not set."""
    weight_decay: Finite
    """Decay of the parameters that param_groups does not exempt; what it does is the optimizer's.
    """
    SCHEDULE_FREE: ClassVar[bool] = False
    """Whether something else takes the place of a schedule, so that one is worth a word."""
    DEFAULT_WARMUP: ClassVar[bool] = True
    """Whether a run that asks for no warm-up gets one, whose first step has lr 0."""
    transfer: ClassVar[str | None] = None
    """How lr goes with the width under `parametrization=mup`: as that of `adam`, `sgd`, `lamb` or
    `muon`; None: it is not known, and refused. `optrun certify transfer` finds out."""
    COUPLED_DECAY: ClassVar[bool] = False
    """Whether weight decay is always part of the gradient."""


@dataclass(kw_only=True)
class DecaysForward(OptimizerConfig):
    """An optimizer with a weight decay of 0 or more, 0 by default."""

    weight_decay: NotNegative = 0.0


@dataclass(kw_only=True)
class TwoMoments(OptimizerConfig):
    """An optimizer of Adam's kind."""

    betas: Betas = (0.9, 0.999)
    """Decay of first and second moment, each in [0, 1)."""
    eps: NotNegative = 1e-8
    """Keeps the denominator from 0."""
    foreach: bool | None = None
    """Multi-tensor kernels; null: wherever they are the faster."""


@dataclass(kw_only=True)
class HasDialects(OptimizerConfig):
    """An optimizer with dialects of other packages."""

    DIALECTS_OF: ClassVar[str] = ""
    """Choice whose presets, by the name of a package, these are."""
    dialect: str | None = None
    """Package whose numbers these are: it sets the defaults of options that it has otherwise; null:
    optrun's own."""

    def __post_init__(self) -> None:
        """Refuse unknown dialects."""
        super().__post_init__()
        expect_dialect(self.DIALECTS_OF, self.dialect)


_FEW_BITS = re.compile(r"[48]_?bit|^paged|bnb|bitsandbytes|torchao|fp8", re.IGNORECASE)


def refuse_few_bits(key: str, name: str) -> None:
    """Refuse the optimizers of bitsandbytes and torchao by the names they have in other programs.

    Raises:
        ConfigError: With the reason and what to take instead.
    """
    if _FEW_BITS.search(name):
        raise ConfigError(
            f"{key}={name}: not offered: the optimizers of bitsandbytes and torchao, with a state"
            " of few bits or in pages, are not proved to continue from a checkpoint bit for bit,"
            " and torchao's state are tensors that a checkpoint cannot hold. Less state than"
            " AdamW's: optimizer=lion, optimizer=adafactor, optimizer=muon or optimizer=sgd."
        )
