"""Find the class of an optimizer by the name of its choice, as in `optimizer=NAME`."""

from __future__ import annotations

from torch.optim import Optimizer

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import registry
from optrun.config.schema.optimizer import SCHEMAS
from optrun.optimizer.base import NamedOptimizer

LIBRARY_CHOICE = "pytorch_optimizer"
"""The choice for all classes of the library pytorch_optimizer; it has no class itself."""


def class_of(name: str) -> type[Optimizer]:
    """Find the class behind `optimizer=NAME`.

    Raises:
        ConfigError: No optimizer of this name is registered; it is `pytorch_optimizer`, a choice of
            many classes; or what was registered is no torch optimizer.

    Example:
        >>> class_of("lamb").__name__
        'Lamb'
    """
    if name not in SCHEMAS or name == LIBRARY_CHOICE:
        choices = [choice for choice in registry.names("optimizer") if choice != LIBRARY_CHOICE]
        near = did_you_mean(name, choices)
        raise ConfigError(f"optimizer={name}: there is no such optimizer. {near}")
    row = registry.choices("optimizer")[name]  # `origin` is the plugin that registered it
    cls = row.load()
    if not isinstance(cls, type) or not issubclass(cls, Optimizer):
        raise ConfigError(
            f"optimizer={name}: {row.origin} registered {cls!r}: expected a torch optimizer's"
            " class."
        )
    return cls


def class_of_member(name: str) -> type[NamedOptimizer]:
    """Find the class behind the `optimizer` of a parameter group.

    Raises:
        ConfigError: As `class_of`; or the class is no `NamedOptimizer`, and cannot share its state
            with other optimizers.
    """
    cls = class_of(name)
    if not issubclass(cls, NamedOptimizer):
        raise ConfigError(
            f"optimizer={name}: {cls.__name__} cannot share a run with other optimizers. Expected a"
            " class derived from optrun.optimizer.base.NamedOptimizer; or choose it for all"
            " parameters."
        )
    return cls


def is_builtin(name: str) -> bool:
    """Tell whether an optimizer is optrun's; False for plugins and unknown names."""
    row = registry.choices("optimizer").get(name)
    return row is not None and row.origin is None
