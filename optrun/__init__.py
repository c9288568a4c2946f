"""optrun: train transformers with exactly the optimizer you asked for.

From Python: `optrun.run`, `optrun.sweep`, `optrun.compose`, `optrun.load_run`, `optrun.transfer`,
and the decorators
`optrun.register_*`; the optimizers are in `optrun.optimizer`. The types of these names stand in
`__init__.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(
        ("Result", "Run", "SweepResult", "compose", "load_run", "run", "sweep", "transfer"),
        "optrun.api",
    ),
    **{
        f"register_{kind}": "optrun.config.registry"
        for kind in ("callback", "data", "metric", "optimizer", "scheduler", "task", "tracker")
    },
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    """Import what `import optrun` does without.

    Neither Hydra nor torch is needed to ask for the version.
    """
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'optrun' has no attribute {name!r}")
