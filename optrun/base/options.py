"""Type names for the dictionaries of torch's optimizers."""

from collections.abc import Mapping
from typing import Any

ParamGroup = dict[str, Any]
"""One of an optimizer's parameter groups: `params` and its options; which keys there are is up to
the optimizer."""

Group = Mapping[str, Any]
"""A parameter group, or a rule for one, that is only read."""

Options = Mapping[str, Any]
"""Options of an optimizer or a schedule by name."""

State = dict[str, Any]
"""What an optimizer keeps of one parameter, by state key."""

Scalars = dict[str, Any]
"""What the formula of an optimizer takes for one parameter, by name: numbers, or tensors of one
number."""

StateDict = dict[str, Any]
"""The value of `state_dict()`: all that is needed to continue from it."""
