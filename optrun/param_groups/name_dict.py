"""Assign parameters to layers by `param_groups.name_dict`: names or patterns to layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.names import near_names
from optrun.param_groups.layer_map import EMBEDDINGS, Layer, layer_at
from optrun.param_groups.roles import HEAD

_IN_LIST = re.compile(r"^(?:(?P<stack>.*)\.)?layers?\.(?P<block>\d+)(?:\.|$)")


def structured_names(
    params: Mapping[str, Tensor], name_dict: Mapping[str, object]
) -> dict[str, str]:
    r"""Map parameter names to the values of the matching keys in `name_dict`.

    Groups in a value, such as `\1`, are replaced by what the pattern matched.

    Args:
        params: Every parameter by name.
        name_dict: Parameter name, or regular expression searched in names, -> layer. Names win over
            patterns, and earlier patterns over later ones.

    Returns:
        Parameter name -> value; parameters without a matching key are missing.

    Raises:
        ConfigError: A key is no regular expression, matches nothing, or only parameters that other
            keys match before; or a value has a group that its pattern lacks.

    Example:
        >>> import torch
        >>> structured_names({"h.3.fc.weight": torch.ones(1)}, {r"h\.(\d+)\.": r"\1"})
        {'h.3.fc.weight': '3'}
    """
    # Keys that are names of parameters come first.
    layer_by_name = {name: str(value) for name, value in name_dict.items() if name in params}
    # All other keys are patterns.
    for key, value in name_dict.items():
        if key in params:
            continue
        try:
            pattern = re.compile(key)
        except re.error as error:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: not a regular expression: {error}."
            ) from error
        matches = {}
        for name in params:
            match = pattern.search(name)
            if match is not None:
                matches[name] = match
        if not matches:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: matches no parameter name."
                f" {near_names(key, params)}"
            )
        unclaimed = {name: match for name, match in matches.items() if name not in layer_by_name}
        if not unclaimed:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: other keys match all of its parameters before it,"
                f" such as {next(iter(matches))}. Put the narrower pattern first."
            )
        for name, match in unclaimed.items():
            try:
                layer_by_name[name] = match.expand(str(value))
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"param_groups.name_dict[{key}]={value}: the pattern has no such group"
                    f" ({error})."
                ) from error
    return layer_by_name


def layers_from_name_dict(
    params: Mapping[str, Tensor], name_dict: Mapping[str, object], *, n_layers: int | None = None
) -> dict[str, Layer]:
    r"""Map every parameter to its layer in `name_dict`; to the head if no key matches it.

    Args:
        params: Every parameter by name.
        name_dict: See `structured_names`. A layer is a block number, `head`, `embeddings`, or a
            structured name: with `layers.<number>` it is a block of the stack named before that
            (`decoder.layers.3` is block 3 of `decoder`), with `embedding` it is the embeddings, and
            any other dotted name is the head.
        n_layers: Number of blocks of each stack; None: its highest block number plus 1.

    Raises:
        ConfigError: As `structured_names`; a value is no layer; there is no block; or a block
            number is `n_layers` or more.

    Example:
        >>> import torch
        >>> names = ("wte.weight", "h.0.weight", "h.1.weight", "out.weight")
        >>> params = {name: torch.ones(1) for name in names}
        >>> layers = layers_from_name_dict(params, {"wte": "embeddings", r"h\.(\d+)": r"\1"})
        >>> [layers[name].label for name in names]
        ['embeddings', 'layer_00', 'layer_01', 'head']
    """
    values = structured_names(params, name_dict)  # without the parameters that no key matches
    parsed = {name: _parse_layer(value) for name, value in values.items()}
    # 1. Count the blocks of each stack.
    depths: dict[str, int] = {}
    for stack, block in parsed.values():
        if block is not None:
            depths[stack] = max(depths.get(stack, 0), block + 1)
    if not depths:
        raise ConfigError(
            "param_groups.name_dict: no parameter belongs to a block, so every layer would have the"
            ' same lr. Map block names to their number, such as {"^trunk\\\\.(\\\\d+)\\\\.":'
            ' "\\\\1"}.'
        )
    if n_layers is not None:
        for stack, depth in depths.items():
            if depth > n_layers:
                of_stack = f" of {stack}" if stack else ""
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: name_dict names block {depth - 1}"
                    f"{of_stack}, counted from 0. Expected at least {depth}."
                )
        depths = dict.fromkeys(depths, n_layers)
    # 2. Place every parameter. Embeddings and head belong to the deepest stack.
    deepest = max(depths.values())
    layers: dict[str, Layer] = {}
    for name in params:
        # Without a block number, `stack` is the word `embeddings` or `head`.
        stack, block = parsed.get(name, (HEAD, None))
        if block is not None:
            shown_stack = stack if len(depths) > 1 else ""
            layers[name] = layer_at(block + 1, depths[stack], "name_dict", shown_stack)
        elif stack == EMBEDDINGS:
            layers[name] = layer_at(0, deepest, "name_dict")
        else:
            layers[name] = layer_at(deepest + 1, deepest, "name_dict")
    return layers


def _parse_layer(value: str) -> tuple[str, int | None]:
    """Parse a layer: (name of its stack, block number), or (`head` or `embeddings`, None).

    The name of the stack is empty for a plain number, or if nothing stands before `layers`.

    Raises:
        ConfigError: It is no layer.

    Example:
        >>> _parse_layer("3"), _parse_layer("decoder.layers.3.fc"), _parse_layer("word_embeddings")
        (('', 3), ('decoder', 3), ('embeddings', None))
    """
    if value.isdigit():
        return "", int(value)
    if value in (HEAD, EMBEDDINGS):
        return value, None
    in_list = _IN_LIST.search(value)
    if in_list:
        return in_list["stack"] or "", int(in_list["block"])
    if "embedding" in value:
        return EMBEDDINGS, None
    if "." in value:
        return HEAD, None
    raise ConfigError(
        f"param_groups.name_dict: {value} is no layer. Expected a block number, head, embeddings,"
        " or a name that contains layers.<number> or embedding."
        f" {did_you_mean(value, (HEAD, EMBEDDINGS))}"
    )
