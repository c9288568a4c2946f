"""Rules of parameter groups: the first pattern found in a name wins, and each must win once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from optrun.base.errors import ConfigError
from optrun.base.options import Group
from optrun.base.plain import PlainDict
from optrun.config.names import near_names

EVERYTHING = (".*",)
"""Pattern list that matches every name of a group."""


def assign_rules(
    rules: Sequence[Group], params: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, int]:
    """Map every trainable parameter to the index of its first matching rule.

    Args:
        rules: In order; each with a `pattern`.
        params: Every parameter by name, frozen ones included.
        tied: Further names of tensors that several modules share -> their first name.

    Returns:
        Parameter name -> index of its rule; without the parameters that no rule matches.

    Raises:
        ConfigError: A rule matches nothing, nothing that trains, or only parameters of earlier
            rules.

    Example:
        >>> import torch
        >>> params = dict(torch.nn.Linear(2, 2).named_parameters())
        >>> assign_rules([{"pattern": "bias"}, {"pattern": "."}], params, {})
        {'bias': 0, 'weight': 1}
    """
    claimed: dict[str, int] = {}
    for index, rule in enumerate(rules):
        key = f"param_groups.rules[{index}].pattern={rule['pattern']}"
        pattern = re.compile(rule["pattern"])
        matching = [name for name in params if pattern.search(name)]
        if not matching:
            shared = [name for name in tied if pattern.search(name)]
            if shared:
                raise ConfigError(
                    f"{key}: {shared[0]} is the same tensor as {tied[shared[0]]}; match it by that"
                    " name."
                )
            raise ConfigError(f"{key}: matches no parameter. {near_names(rule['pattern'], params)}")
        training = [name for name in matching if params[name].requires_grad]
        if not training:
            raise ConfigError(
                f"{key}: matches only parameters that do not train, such as {matching[0]}."
            )
        unclaimed = [name for name in training if name not in claimed]
        if not unclaimed:
            by = claimed[training[0]]
            raise ConfigError(
                f"{key}: everything it matches is taken by earlier rules, {training[0]} by"
                f" rules[{by}] ({rules[by]['pattern']}). Put the narrower rule first."
            )
        claimed.update(dict.fromkeys(unclaimed, index))
    return claimed


def group_options(rule: Group) -> PlainDict:
    """Convert a rule to options of a parameter group, without `pattern`, `lr_scale` and `freeze`.

    `adaptation` (of the lr by the layer's trust ratio) becomes the options of Lamb for it: false
    adapts no parameter of the group; true every one, also those without decay and those that
    `optimizer.exclude_from_layer_adaptation` names. `centralization` (of gradients) becomes
    LazyAdam's `grad_centralization`, and `betas` a tuple. Other keys stay, `optimizer` too.

    Example:
        >>> group_options({"pattern": "bias", "weight_decay": 0.0, "betas": [0.9, 0.99]})
        {'weight_decay': 0.0, 'betas': (0.9, 0.99)}
        >>> group_options({"adaptation": False, "lr": 0.1})
        {'lr': 0.1, 'exclude_from_layer_adaptation': ('.*',)}
        >>> group_options({"adaptation": True})
        {'always_adapt': True, 'exclude_from_layer_adaptation': None}
    """
    options = {
        str(key): value
        for key, value in rule.items()
        if key not in ("pattern", "lr_scale", "freeze")
    }
    if "adaptation" in options:
        if options.pop("adaptation"):
            options["always_adapt"] = True
            options["exclude_from_layer_adaptation"] = None
        else:
            options["exclude_from_layer_adaptation"] = EVERYTHING
    if "centralization" in options:
        options["grad_centralization"] = options.pop("centralization")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return options
