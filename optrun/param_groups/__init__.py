"""Which parameter gets which learning rate and decay: names and shapes in, group dicts out."""

from optrun.param_groups.layerwise import NamedParam, layerwise_lr_decay

__all__ = ["NamedParam", "layerwise_lr_decay"]
