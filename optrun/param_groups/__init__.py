"""Which parameter gets which learning rate and decay: names and shapes in, group dicts out."""

from optrun.param_groups.build import build_param_groups
from optrun.param_groups.layerwise import NamedParam, layerwise_lr_decay
from optrun.param_groups.order import uses_of
from optrun.param_groups.stacks import block_paths

__all__ = ["NamedParam", "block_paths", "build_param_groups", "layerwise_lr_decay", "uses_of"]
