"""optrun: train transformers with the optimizer you mean."""

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
    "register_callback",
    "register_data",
    "register_metric",
    "register_optimizer",
    "register_scheduler",
    "register_task",
    "register_tracker",
]
