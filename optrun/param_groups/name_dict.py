"""Assign parameters to layers by `param_groups.name_dict`: names or patterns to layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.names import near_names
from optrun.param_groups.layer_map import EMBEDDINGS, Layer, layer_at
from optrun.param_groups.roles import HEAD

_IN_LIST = re.compile(r"^(?:(?P<tower>.*)\.)?layers?\.(?P<block>\d+)(?:\.|$)")


def structured_names(
    params: Mapping[str, Tensor], name_dict: Mapping[str, object]
) -> dict[str, str]:
    r"""Map parameter names to their values in `name_dict`, with groups of a pattern filled in.

    Args:
        params: Every parameter by name.
        name_dict: Parameter name, or regular expression searched in names, -> layer. Names come
            first, then patterns in their order.

    Returns:
        Parameter name -> layer as the user writes it; parameters that no key matches are missing.

    Raises:
        ConfigError: A key is no regular expression, matches nothing, or only parameters that other
            keys matched before; or a value has a group that its pattern lacks.

    Example:
        >>> import torch
        >>> structured_names({"h.3.fc.weight": torch.ones(1)}, {r"h\.(\d+)\.": r"\1"})
        {'h.3.fc.weight': '3'}
    """
    out = {name: str(value) for name, value in name_dict.items() if name in params}
    for key, value in name_dict.items():
        if key in params:
            continue
        try:
            pattern = re.compile(key)
        except re.error as error:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: not a regular expression: {error}."
            ) from error
        matches = {name: pattern.search(name) for name in params}
        matching = {name: match for name, match in matches.items() if match is not None}
        if not matching:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: neither the name of a parameter nor found in one. "
                f"{near_names(key, params)}"
            )
        unclaimed = {name: match for name, match in matching.items() if name not in out}
        if not unclaimed:
            raise ConfigError(
                f"param_groups.name_dict[{key}]: everything it is found in, such as"
                f" {next(iter(matching))}, is taken by other keys. Put the narrower pattern first."
            )
        for name, match in unclaimed.items():
            try:
                out[name] = match.expand(str(value))
            except (re.error, IndexError) as error:
                raise ConfigError(
                    f"param_groups.name_dict[{key}]={value}: the pattern has no such bracket"
                    f" ({error})."
                ) from error
    return out


def layers_from_name_dict(
    params: Mapping[str, Tensor], name_dict: Mapping[str, object], *, n_layers: int | None = None
) -> dict[str, Layer]:
    """Map every parameter to its layer in `name_dict`; to the head if no key matches it.

    Args:
        params: Every parameter by name.
        name_dict: See `structured_names`. A layer is a block number, `head`, `embeddings`, or a
            structured name: with `layers.<number>` it is a block of the tower named before that,
            with `embedding` it is the embeddings, and any other dotted name is the head.
        n_layers: Number of blocks of each tower; None: the highest block number plus 1.

    Raises:
        ConfigError: As `structured_names`; a value is no layer; there is no block; or a block
            number is `n_layers` or more.
    """
    names = structured_names(params, name_dict)
    kinds = {name: _parse(value) for name, value in names.items()}
    depths: dict[str, int] = {}
    for tower, block in kinds.values():
        if block is not None:
            depths[tower] = max(depths.get(tower, 0), block + 1)
    if not depths:
        raise ConfigError(
            "param_groups.name_dict: no parameter belongs to a block, so every layer would have the"
            ' same lr. Map block names to their number, such as {"^trunk\\\\.(\\\\d+)\\\\.":'
            ' "\\\\1"}.'
        )
    if n_layers is not None:
        for tower, depth in depths.items():
            if depth > n_layers:
                at = f" of {tower}" if tower else ""
                raise ConfigError(
                    f"param_groups.n_layers={n_layers}: name_dict names block {depth - 1}{at},"
                    " from 0."
                )
        depths = dict.fromkeys(depths, n_layers)
    deepest = max(depths.values())
    out: dict[str, Layer] = {}
    for name in params:
        tower, block = kinds.get(name, (HEAD, None))
        if block is not None:
            out[name] = layer_at(
                block + 1, depths[tower], "name_dict", tower if len(depths) > 1 else ""
            )
        else:
            out[name] = layer_at(0 if tower == EMBEDDINGS else deepest + 1, deepest, "name_dict")
    return out


def _parse(value: str) -> tuple[str, int | None]:
    """Parse a layer: (tower, block number), or (`head` or `embeddings`, None).

    The tower is empty if the value names none.

    Raises:
        ConfigError: It is no layer.
    """
    if value.isdigit():
        return "", int(value)
    if value in (HEAD, EMBEDDINGS):
        return value, None
    in_list = _IN_LIST.search(value)
    if in_list:
        return in_list["tower"] or "", int(in_list["block"])
    if "embedding" in value:
        return EMBEDDINGS, None
    if "." in value:
        return HEAD, None
    raise ConfigError(
        f"param_groups.name_dict: {value} is no layer. Expected a block number, head, embeddings,"
        " or a name with layers.<number> or embedding in it."
        f" {did_you_mean(value, (HEAD, EMBEDDINGS))}"
    )
