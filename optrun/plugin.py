"""What a plugin builds on: one place whose names stay when files of the package move.

The decorators are `optrun.register_*`. Each name below is imported when it is asked for, so that a
plugin with a schedule loads no torch. The types stand in `plugin.pyi`.
"""

from __future__ import annotations

import importlib

_NAMES = {
    "optrun.base.errors": ("ConfigError",),
    "optrun.config.registry.plugins": ("load",),
    "optrun.config.schema.checks": ("expect", "expect_count", "expect_not_negative"),
    "optrun.config.schema.data": ("ColumnsConfig",),
    "optrun.config.schema.metric": ("MetricConfig",),
    "optrun.config.schema.optimizer_base": ("OptimizerConfig",),
    "optrun.config.schema.scheduler": ("FloorConfig",),
    "optrun.config.schema.task": ("ProblemType", "SequenceClassificationConfig"),
    "optrun.config.schema.task_base": ("TaskConfig",),
    "optrun.config.schema.tracking": ("TrackingConfig",),
    "optrun.data.columns": ("label_column", "missing_column", "text_column", "texts"),
    "optrun.data.examples": ("InMemory", "chosen"),
    "optrun.data.source": ("Source", "Split"),
    "optrun.optimizer.base": ("NamedOptimizer",),
    "optrun.optimizer.numerics": ("norms",),
    "optrun.optimizer.whole_matrices": ("on_whole",),
    "optrun.runner.predictors": ("Predictor",),
    "optrun.task.base": ("Task", "pad"),
    "optrun.task.sequence_classification": ("SequenceClassification",),
    "optrun.training.trackers": ("scalars",),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULE)


def __getattr__(name: str) -> object:
    """Import a name from where it stands."""
    if name in _MODULE:
        return getattr(importlib.import_module(_MODULE[name]), name)
    raise AttributeError(f"module 'optrun.plugin' has no attribute {name!r}")
