"""Optimizers that compute what they say, over parameters with names."""

from optrun.config.dialects import dialect_options
from optrun.optimizer.adamax import Adamax
from optrun.optimizer.adamwdl import AdamWDL
from optrun.optimizer.ademamix import AdEMAMix
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.lamb import Lamb
from optrun.optimizer.lazy_adam import LazyAdam
from optrun.optimizer.lion import Lion
from optrun.optimizer.mars import Mars
from optrun.optimizer.schedule_free import ScheduleFreeAdamW
from optrun.optimizer.soap import Soap
from optrun.optimizer.torch_named import AdamW

__all__ = [
    "AdEMAMix",
    "AdamW",
    "AdamWDL",
    "Adamax",
    "Lamb",
    "LazyAdam",
    "Lion",
    "Mars",
    "ScheduleFreeAdamW",
    "Soap",
    "build_optimizer",
    "dialect_options",
]
