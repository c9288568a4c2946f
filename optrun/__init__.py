"""optrun: train transformers with the optimizer you mean.

From Python: `optrun.run`, `optrun.sweep`, `optrun.compose`, `optrun.load_run`; the optimizers are in
`optrun.optimizer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optrun.api import Result, Run, SweepResult, compose, load_run, run, sweep
    from optrun.registry import (
        register_callback,
        register_data,
        register_metric,
        register_optimizer,
        register_scheduler,
        register_task,
        register_tracker,
    )

__version__ = "0.1.0"
__all__ = [
    "Result",
    "Run",
    "SweepResult",
    "compose",
    "load_run",
    "register_callback",
    "register_data",
    "register_metric",
    "register_optimizer",
    "register_scheduler",
    "register_task",
    "register_tracker",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import what `import optrun` does without: neither Hydra nor torch is needed to ask for the version."""
    if name in __all__:
        module = "optrun.registry" if name.startswith("register_") else "optrun.api"
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'optrun' has no attribute {name!r}")
