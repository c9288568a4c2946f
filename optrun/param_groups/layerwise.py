"""The layer ratio of PaddleNLP, as published, for parameters whose names say their layer.

`AdamWDL` calls it, or a function of the user with the same arguments. `param_groups=layerwise`
reads the module tree of any model instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor


class HasName(Protocol):
    """An object with a name, such as `NamedParam` or a parameter of PaddlePaddle."""

    @property
    def name(self) -> str:
        """Name of the parameter, a key of `name_dict`."""
        ...


@dataclass(frozen=True)
class NamedParam:
    """A parameter with its name; torch's parameters have none."""

    name: str
    tensor: Tensor


SetParamLrFun: TypeAlias = Callable[[float, Mapping[str, str], int, NamedParam], float]
"""`set_param_lr_fun(decay_rate, name_dict, n_layers, param) -> ratio`."""


def layerwise_lr_decay(
    decay_rate: float,
    name_dict: Mapping[str, str],
    n_layers: int,
    param: HasName | str,
) -> float:
    """Scale of one parameter's learning rate by the depth of its layer.

    Layers count from 0, so the top one of `n_layers` gets `decay_rate` to the power 1, layer 0 to
    the power `n_layers`, and embeddings one more. The pooler, the head and every other name get 1,
    among them the singular `encoder.layer.3` of transformers: for such models use
    `param_groups=layerwise`.

    Args:
        decay_rate: Factor from one layer to the next below; unitless.
        name_dict: From the parameter's own name to its structured name, which is searched for
            `encoder.layers.<number>` and `embedding`.
        n_layers: Depth of the encoder.
        param: The parameter, or its own name.

    Returns:
        The ratio; unitless, above 1 for a layer number of `n_layers` or more.

    Raises:
        KeyError: The name is not in `name_dict`.
        IndexError: The structured name ends at `encoder.layers` without a layer number.
        ValueError: What follows `encoder.layers.` is not a number.

    Source: PaddleNLP 2.8, `paddlenlp/ops/optimizer/adamwdl.py`; ratio = decay_rate ** (n_layers -
        layer).

    Example:
        >>> names = {"linear_3.w_0": "bert.encoder.layers.11.linear1.weight"}
        >>> names["emb_0.w_0"] = "bert.embeddings.weight"
        >>> layerwise_lr_decay(0.5, names, 12, "linear_3.w_0")
        0.5
        >>> layerwise_lr_decay(0.5, names, 12, "emb_0.w_0") == 0.5**13
        True
    """
    own_name = param if isinstance(param, str) else param.name
    name = name_dict[own_name]
    if "encoder.layers" in name:
        tail = name[name.find("encoder.layers.") :]  # such as "encoder.layers.11.linear1.weight"
        layer = int(tail.split(".")[2])
        return float(decay_rate ** (n_layers - layer))
    if "embedding" in name:
        return float(decay_rate ** (n_layers + 1))
    return 1.0
