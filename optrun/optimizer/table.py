"""Every optimizer that can be named: in `optimizer=...`, in a rule's `optimizer`, in a saved configuration."""

from __future__ import annotations

from optrun.optimizer.adamax import Adamax
from optrun.optimizer.adamwdl import AdamWDL
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.lamb import Lamb
from optrun.optimizer.lazy_adam import LazyAdam
from optrun.optimizer.torch_named import SGD, Adafactor, Adam, AdamW, Muon, NAdam, RAdam, RMSprop

CLASSES: dict[str, type[NamedOptimizer]] = {
    "lamb": Lamb,
    "adamax": Adamax,
    "adamwdl": AdamWDL,
    "lazy_adam": LazyAdam,
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "rmsprop": RMSprop,
    "nadam": NAdam,
    "radam": RAdam,
    "adafactor": Adafactor,
    "muon": Muon,
}
