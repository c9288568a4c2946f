"""AdamWDL: AdamW with a learning rate falling from layer to layer, as in PaddleNLP.

torch's AdamW has no ratio per tensor. `param_groups=layerwise` gives the same layer scales to every
optimizer; this class is for those who come from PaddleNLP with its arguments, or want its decay as
the package really computed it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from optrun.base.errors import did_you_mean
from optrun.base.options import Group, Scalars
from optrun.base.plain import PlainDict
from optrun.config.schema.optimizer import AdamWDLConfig
from optrun.config.schema.ranges import Check, not_negative
from optrun.optimizer.adam_update import ADAM
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.param_groups.layerwise import NamedParam, SetParamLrFun, layerwise_lr_decay


def _check_function(name: str, value: Any) -> Any:
    """Return a function or None; raise TypeError for any other value of the option `name`."""
    if value is not None and not callable(value):
        raise TypeError(
            f"{name}={value!r}: expected a function or None, got {type(value).__name__}."
        )
    return value


class AdamWDL(BatchOptimizer):
    """AdamW with a ratio per tensor.

    One step, t counting the gradients a parameter has had from 1, s the group's `lr_scale`, ratio
    what
    `set_param_lr_fun` returns:

        w = w (1 - lr s ratio weight_decay)
        w = w - lr s ratio (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the numbers.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: Added after bias correction, >= 0. PaddleNLP prints it before; its code adds it after.
        weight_decay: Decoupled; any finite number, or a function of the step.
        apply_decay_param_fun: From a parameter's name to whether it decays; None: all do.
        layerwise_decay: Factor from one layer to the next below, > 0; 1 switches the default ratio
            off.
        n_layers: Depth of the encoder, for the ratio.
        name_dict: From parameter names to the structured names the ratio function reads; None: the
            names themselves.
        set_param_lr_fun: `f(layerwise_decay, name_dict, n_layers, param) -> ratio`, `param.name`
            being the parameter's name; None: ratio 1. Called once for each parameter.
        decay_form: "documented": one decay at the scaled rate, as above. "paddlenlp" (2.3 to 2.8)
            decays by lr weight_decay first, unscaled unless a schedule drives the rate, and then
            again as documented; "paddlenlp-2.2" (2.0 to 2.2) does the first alone.
        lazy_mode: Take sparse gradients, and update the rows they list alone; dense ones are the
            same.
        master_weights: Keep a float32 copy of 16-bit parameters in the state and round it into
            them.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type, an unknown group key, or a ratio that is no
            number.
        ValueError: For a value out of range, a `name_dict` that knows other names than the
            parameters', or a layerwise_decay that moves no block.

    Source: PaddleNLP 2.8, `paddlenlp/ops/optimizer/adamwdl.py`, after Loshchilov & Hutter 2019,
        arXiv:1711.05101.

    Example:
        >>> import torch
        >>> layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
        >>> encoder = torch.nn.ModuleDict({"layers": layers})
        >>> model = torch.nn.ModuleDict({"encoder": encoder})
        >>> optimizer = AdamWDL(model.named_parameters(), layerwise_decay=0.5, n_layers=2)
        >>> optimizer.lr_ratios["encoder.layers.0.weight"]
        0.25
    """

    OPTIONS = AdamWDLConfig
    CHECKS: ClassVar[Mapping[str, Check]] = {
        "apply_decay_param_fun": _check_function,
        "set_param_lr_fun": _check_function,
    }
    APART = frozenset(
        {
            "apply_decay_param_fun",
            "layerwise_decay",
            "n_layers",
            "name_dict",
            "set_param_lr_fun",
            "decay_form",
        }
    )
    FORMULA = ADAM
    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        layerwise_decay: float = 1.0,
        n_layers: int = 12,
        name_dict: Mapping[str, str] | None = None,
        set_param_lr_fun: SetParamLrFun | None = layerwise_lr_decay,
        decay_form: Literal["documented", "paddlenlp", "paddlenlp-2.2"] = "documented",
        lazy_mode: bool = False,
        master_weights: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "apply_decay_param_fun": apply_decay_param_fun,
                "layerwise_decay": layerwise_decay,
                "n_layers": n_layers,
                "name_dict": name_dict,
                "set_param_lr_fun": set_param_lr_fun,
                "decay_form": decay_form,
                "lazy_mode": lazy_mode,
                "master_weights": master_weights,
                "foreach": foreach,
            },
        )

    @property
    def lr_ratios(self) -> dict[str, float]:
        """Ratio of every parameter by name, from `set_param_lr_fun`; 1 without one."""
        return {name: self._lr_ratios.get(name, 1.0) for name in self.named_params()}

    def get_config(self) -> PlainDict:
        """Return the keywords as in `NamedOptimizer`, without the default `set_param_lr_fun`."""
        config = super().get_config()
        if config["set_param_lr_fun"] is layerwise_lr_decay:
            del config["set_param_lr_fun"]
        return config

    def _resolve(self) -> None:
        """Store the lr ratio of each parameter, and the names of parameters without decay.

        Raises:
            ValueError: `apply_decay_param_fun` is given and the parameters have no names.
        """
        applies = self._apart["apply_decay_param_fun"]
        names = self.named_params()
        self._lr_ratios: dict[str, float] = self._layer_ratios(names)
        if applies is None:
            return
        if not self._all_have_names():
            raise ValueError(
                "apply_decay_param_fun goes by parameter name, and the parameters have none. "
                "Pass model.named_parameters()."
            )
        self._undecayed = {name for name in names if not applies(name)}

    def _all_have_names(self) -> bool:
        """Tell whether all groups have parameter names."""
        return all("param_names" in group for group in self.param_groups)

    def _layer_ratios(self, params: dict[str, Tensor]) -> dict[str, float]:
        """Return the lr ratio of each parameter, by name, from `set_param_lr_fun`.

        Empty, meaning 1 for all, without a function or with the default one and
        `layerwise_decay=1`.

        Raises:
            TypeError: The function returned no number.
            ValueError: The parameters have no names, `name_dict` has other names, a ratio is
                negative, or the default function gives no block another ratio than 1.
        """
        function = self._apart["set_param_lr_fun"]
        rate = self._apart["layerwise_decay"]
        name_dict = self._apart["name_dict"]
        has_names = self._all_have_names()
        is_default = function is layerwise_lr_decay
        if name_dict is not None and has_names:
            _refuse_other_names(name_dict, list(params))
        if function is None or (is_default and rate == 1.0):
            return {}
        if not has_names:
            raise ValueError(
                "layer ratios go by parameter name, and the parameters have none. Pass"
                " model.named_parameters()."
            )
        structured = name_dict if name_dict is not None else {name: name for name in params}
        ratios = {}
        for name, param in params.items():
            ratio = function(rate, structured, self._apart["n_layers"], NamedParam(name, param))
            if ratio is None:
                raise TypeError(
                    f"set_param_lr_fun returned None for {name!r}: it has to return the ratio. "
                    "(Up to PaddleNLP 2.2 it set the learning rate of the parameter instead.)"
                )
            ratios[name] = not_negative(f"set_param_lr_fun's ratio for {name}", ratio)
        if is_default:
            _refuse_unscaled_blocks(rate, [structured[name] for name in params], ratios)
        return ratios

    def _traits(self, group: Group, name: str, param: Tensor) -> tuple[float, bool]:
        """Return the ratio of a parameter, and whether it decays."""
        del group, param
        return self._lr_ratios.get(name, 1.0), self.decays(name)

    def _scalars(self, group: Group, traits: tuple[float, bool], counters: Scalars) -> Scalars:
        """Return `lr`, the group's lr times the ratio, and `keep` by `decay_form`.

        PaddleNLP multiplies the weights with 1 - lr weight_decay first, before the ratio, and with
        the base lr unless a schedule drives it. This factor is left out if lr is 0.
        """
        del counters
        ratio, decays = traits
        lr = group["lr"] * ratio
        weight_decay = group["weight_decay"] if decays else 0.0
        form = self._apart["decay_form"]
        keep = 1.0
        if form != "documented" and group["lr"]:
            # The lr that a schedule has written, with the scale of the group; without a schedule
            # PaddleNLP takes the base lr, without a scale.
            first_lr = group["lr"] if self.lr_driver() else self.get_lr()
            keep *= 1.0 - first_lr * weight_decay
        if form != "paddlenlp-2.2":
            keep *= 1.0 - lr * weight_decay
        return {"lr": lr, "keep": keep}

    def _sparse_policy(self, group: Group) -> str:
        """Update the listed rows of sparse gradients under `lazy_mode`, else refuse them."""
        if group["lazy_mode"]:
            return "rows"
        return "refuse"


def _refuse_unscaled_blocks(rate: float, names: list[str], ratios: Mapping[str, float]) -> None:
    """Refuse ratios of `layerwise_lr_decay` if the names lead it to scale no block.

    It finds blocks by `encoder.layers.<number>` and embeddings by `embedding`. Without such blocks
    it would scale embeddings alone, which is worse than nothing. Names without any number, of a
    model without blocks, pass if some ratio is not 1.

    Args:
        rate: `layerwise_decay`.
        names: Structured names of the parameters.
        ratios: Their ratios, by the names of the parameters.
    """
    if any("encoder.layers." in name for name in names):
        return
    has_numbers = any(re.search(r"(^|\.)\d+(\.|$)", name) for name in names)
    scales_nothing = all(ratio == 1.0 for ratio in ratios.values())
    if has_numbers or scales_nothing:
        raise ValueError(
            f"layerwise_decay={rate!r} scales no block: no name contains"
            f" 'encoder.layers.<number>' (such as {next(iter(ratios))}). Give name_dict, or use"
            " param_groups=layerwise, which reads the model."
        )


def _refuse_other_names(name_dict: Mapping[str, str], names: list[str]) -> None:
    """Refuse a `name_dict` unless its keys are exactly the names of the parameters.

    Raises:
        ValueError: Naming the first name that is missing or extra, with the nearest valid one.
    """
    for name in names:
        if name not in name_dict:
            raise ValueError(
                f"name_dict lacks the parameter {name!r}. {did_you_mean(name, name_dict)}"
            )
    for key in name_dict:
        if key not in names:
            raise ValueError(
                f"name_dict names {key!r}, which is no parameter here. {did_you_mean(key, names)}"
            )
