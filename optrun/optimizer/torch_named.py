"""torch's own optimizers as `NamedOptimizer`s; the update is torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, groupby
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr  # torch offers no other door to its arithmetic

from optrun.base.options import Group, ParamGroup
from optrun.config.schema.optimizer import (
    AdafactorConfig,
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    SGDConfig,
)
from optrun.config.schema.ranges import Check, flag, one_of, optional, positive
from optrun.optimizer.base import NamedOptimizer, Numeric, Params, evaluate_closure
from optrun.optimizer.decay import decay_scale, keep_base_lr
from optrun.optimizer.groups import list_params
from optrun.optimizer.newton_schulz import orthogonalize
from optrun.optimizer.numerics import local, place_like, sharding_of, stores_its_values
from optrun.optimizer.whole_matrices import on_whole

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Types of devices for which torch has a fused Adam."""

MUON_BUCKET = 2**25
"""Elements of this process's shards that Muon steps at once: 64 MiB in bfloat16."""


def fusable(params: list[object]) -> bool:
    """Tell whether torch's fused kernels can step all parameters.

    They must be floating-point tensors without gaps, on a type of device in `FUSED_DEVICES`.

    Args:
        params: Parameters, (name, parameter) pairs, or group dicts of either.
    """
    tensors: list[object] = []
    for entry in params:
        inner = entry.get("params", ()) if isinstance(entry, dict) else [entry]
        tensors += [pair[1] if isinstance(pair, tuple) else pair for pair in inner]
    return all(
        isinstance(t, torch.Tensor)
        and t.is_floating_point()
        and t.device.type in FUSED_DEVICES
        and _is_dense(t)
        for t in tensors
    )


def _is_dense(param: Tensor) -> bool:
    """Tell whether a parameter fills its memory without gaps or overlaps; True for DTensors.

    True for a transposed one, False for a slice of columns and for a lazily negated one.
    """
    if param.is_neg():
        return False
    if isinstance(param, DTensor) or param.is_contiguous():
        return True
    # `empty_like` keeps the strides only of tensors without gaps.
    return torch.empty_like(param, device="meta").stride() == param.stride()


class _OneLayout(Optimizer):
    """Give torch's fused kernels gradients and state with the strides of the parameter.

    On a CPU these kernels read all tensors of a parameter as flat memory and check no strides: they
    would read a transposed gradient in the wrong order. On CUDA they refuse it.
    """

    def _init_group(
        self, group: ParamGroup, params: list[Tensor], grads: list[Tensor], *state: Any
    ) -> Any:
        """Fill the lists as torch does, then replace tensors with other strides than the parameter.

        torch's `step` calls this for each group, with empty lists, and steps the tensors that are
        in them afterwards. They are replaced for fused groups only:

        - a gradient by a copy in `grads`; `param.grad` stays;
        - a state tensor by the data of a copy, so that the next step need not copy again.

        Args:
            group: A parameter group.
            params: Empty; torch appends the parameters with a gradient.
            grads: Empty; torch appends their gradients.
            *state: Empty lists, one for each kind of state; torch appends its tensors.

        Returns:
            What torch's method returns.

        Raises:
            RuntimeError: A parameter has gaps in its memory.
        """
        returned = super()._init_group(group, params, grads, *state)  # type: ignore[misc]
        if not group.get("fused"):
            return returned
        # The usual case: nothing has to be replaced, because everything is contiguous.
        states = chain.from_iterable(state)
        if _all_flat([*params, *grads]) and all(map(Tensor.is_contiguous, states)):
            return returned
        for i, param in enumerate(params):
            if isinstance(param, DTensor):
                continue
            if not _is_dense(param):
                raise RuntimeError(
                    f"fused=True: a parameter of shape {tuple(param.shape)} and strides"
                    f" {param.stride()} does not fill its memory, and torch's fused kernel would"
                    " write between its entries. Give fused=False."
                )
            grads[i] = _with_strides_of(param, grads[i])
            for tensors in state:  # one list for each kind of state, empty if it is not used
                entry = tensors[i] if i < len(tensors) else None
                # Not a step count, whose shape is (), and not a momentum that is None yet.
                if isinstance(entry, Tensor) and entry.shape == param.shape:
                    entry.data = _with_strides_of(param, entry)
        return returned


def _all_flat(tensors: list[Any]) -> bool:
    """Tell whether all tensors are plain and contiguous, and not lazily negated or zero.

    Plain: of the class Tensor or Parameter, and no subclass such as DTensor. Runs at every step,
    hence `map` over C functions.
    """
    return (
        set(map(type, tensors)) <= {Tensor, Parameter}
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(Tensor._is_zerotensor, tensors))
    )


def _with_strides_of(param: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in the strides of a parameter: itself or a copy; a sparse one itself."""
    if tensor.is_sparse or (tensor.stride() == param.stride() and stores_its_values(tensor)):
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


class _FusedAdam(_OneLayout, NamedOptimizer):
    """Set `fused` to True by default if torch's fused kernel can step all parameters.

    Not if the caller sets `foreach` or `fused`.
    """

    STATE = ("exp_avg", "exp_avg_sq")
    SLOTS: ClassVar[Mapping[str, str]] = {"amsgrad": "max_exp_avg_sq"}

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        entries = list_params(params)
        for index, entry in enumerate(entries):
            if isinstance(entry, dict) and "params" in entry:
                of_group = list_params(entry["params"], may_be_empty=True)
                entries[index] = {**entry, "params": of_group}
        if defaults["foreach"] is None and defaults["fused"] is None:
            defaults["fused"] = fusable(entries) or None
        super().__init__(entries, defaults)

    def _init_group(
        self, group: ParamGroup, params: list[Tensor], grads: list[Tensor], *state: Any
    ) -> Any:
        """Fill the lists for neighbouring fused groups with equal options as for one group.

        torch's `step` calls this for each group, and then steps the tensors in the lists; each call
        of a kernel has a cost. So the first of such groups gets the parameters of all, and the
        others get none: torch does nothing for empty lists.

        Args:
            group: A parameter group.
            params: Empty; gets the parameters with a gradient, as do `grads` and `state` theirs.
            grads: Empty; gets their gradients.
            *state: Empty lists, one for each kind of state.

        Returns:
            What torch's method returns, whether a parameter is complex; False for a group that was
            joined to an earlier one.
        """
        if group is self.param_groups[0]:  # the first call of this step: join the groups anew
            # By the id of the first group of each run of neighbours: all of these.
            self._joined_groups: dict[int, list[ParamGroup]] = {}
            for _, neighbours in groupby(self.param_groups, self._options_read_by_torch):
                joined = list(neighbours)
                self._joined_groups[id(joined[0])] = joined
        joined = self._joined_groups.pop(id(group), [])
        if not joined:  # its parameters were in the lists of an earlier group
            return False
        joined_params = chain.from_iterable(member["params"] for member in joined)
        return super()._init_group({**group, "params": joined_params}, params, grads, *state)

    def _options_read_by_torch(self, group: ParamGroup) -> list[object]:
        """List the options read by torch's update; unique for a group without `fused`.

        Neighbours with equal lists are joined, so a group without `fused` stays alone.
        """
        return [group["fused"] or id(group), *map(group.get, self.defaults)]

    def skips_on_device(self) -> bool:
        """Tell whether torch's fused kernels step all groups; they read `found_inf`."""
        return all(group["fused"] for group in self.param_groups)


class AdamW(_FusedAdam, torch.optim.AdamW):
    """torch's AdamW, fused where it can be.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: Added after bias correction, >= 0.
        weight_decay: Decoupled, >= 0; may be a function of the step.
        amsgrad: Use the largest second moment so far.
        foreach: True: torch's multi-tensor kernels; False: its loop; None: see `fused`.
        fused: True or False; None: fused where torch has it for these parameters and `foreach` is
            None too.
        weight_decay_mode: What the decay is multiplied with: "decoupled": lr, as in torch;
            "scheduled": lr / peak, the schedule's multiplier, as in the paper; "corrected": lr^2 /
            base, as timm's `corrected_weight_decay`, with base this `lr`, whatever rate a group
            has; "fixed": 1, as pytorch_optimizer's `fixed_decay`, but nothing in a step whose lr is
            0.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2, as in torch.optim.AdamW.

    Example:
        >>> optimizer = AdamW(torch.nn.Linear(2, 1).named_parameters(), lr=2e-3)
        >>> optimizer.get_lr(), optimizer.param_groups[0]["param_names"]
        (0.002, ['weight', 'bias'])
    """

    OPTIONS = AdamWConfig
    OPTIMIZER_WIDE = frozenset({"weight_decay_mode"})

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        weight_decay_mode: Literal["decoupled", "fixed", "scheduled", "corrected"] = "decoupled",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "foreach": foreach,
                "fused": fused,
                "weight_decay_mode": weight_decay_mode,
            },
        )

    def _resolve(self) -> None:
        """Store the base lr in each group, if its decay needs it (`keep_base_lr`)."""
        for group in self.param_groups:
            if "weight_decay_mode" in group:  # torch's constructor makes groups before there is one
                keep_base_lr(group, group.get("functions", ()), self.defaults["lr"])

    def _set_functions(self) -> None:
        """Set functions of the step, and restore a decay left behind by a failed step."""
        _restore_decay(self)
        super()._set_functions()

    def _register_hooks(self) -> None:
        """Register the hooks, and two more to replace the decay for each step."""
        super()._register_hooks()
        if _decay_of_step not in self._optimizer_step_pre_hooks.values():
            self.register_step_pre_hook(_decay_of_step)
            self.register_step_post_hook(_restore_decay)


def _decay_of_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Set the weight decay of each group for one step, by its `weight_decay_mode`.

    torch multiplies the weight decay with lr, so it is set to weight_decay * decay_scale / lr, or 0
    if lr is 0. The value of the option is kept under `given_weight_decay`, for `_restore_decay`.
    Nothing changes under "decoupled".
    """
    for group in optimizer.param_groups:
        decay = group["weight_decay"]
        if group.get("weight_decay_mode", "decoupled") == "decoupled" or not decay:
            continue
        group["given_weight_decay"] = decay
        group["weight_decay"] = decay * decay_scale(group) / group["lr"] if group["lr"] else 0.0


def _restore_decay(optimizer: Optimizer, *_: object) -> None:
    """Restore the weight decay of each group after a step, see `_decay_of_step`."""
    for group in optimizer.param_groups:
        group["weight_decay"] = group.pop("given_weight_decay", group["weight_decay"])


class Adam(_FusedAdam, torch.optim.Adam):
    """torch's Adam, with coupled decay, fused where it can be. Keywords as in `AdamW`."""

    OPTIONS = AdamConfig

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "foreach": foreach,
                "fused": fused,
            },
        )


class SGD(_OneLayout, NamedOptimizer, torch.optim.SGD):
    """torch's SGD with momentum; keywords as there."""

    OPTIONS = SGDConfig
    CHECKS: ClassVar[Mapping[str, Check]] = {"fused": optional(flag)}
    SLOTS: ClassVar[Mapping[str, str]] = {"momentum": "momentum_buffer"}

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: Numeric = 0.0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "foreach": foreach,
                "fused": fused,
            },
        )


class Adafactor(NamedOptimizer, torch.optim.Adafactor):
    """torch's Adafactor, for parameters that are not sharded; keywords as there.

    torch 2.13 takes row and column norms in place, which fails for DTensors.
    """

    OPTIONS = AdafactorConfig

    TAKES_SHARDS = False
    NEEDS_FULL_TENSORS = True

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: Numeric = 0.0,
        *,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "beta2_decay": beta2_decay,
                "eps": eps,
                "d": d,
                "weight_decay": weight_decay,
                "foreach": foreach,
            },
        )

    def state_keys(self, param: torch.Tensor, group: Group) -> set[str]:
        """List the state keys of a parameter: `row_var`, `col_var`; `variance` below 2-D."""
        del group
        if param.dim() > 1:
            return {"row_var", "col_var"}
        return {"variance"}


class Muon(NamedOptimizer, torch.optim.Muon):
    """torch's Muon, for 2-D parameters alone, sharded ones too; keywords as there.

    A sharded matrix is gathered and orthogonalized on one rank, see `whole_matrices.py`; momentum
    and weights stay sharded. With 16-bit parameters and `nesterov=False` torch 2.13 normalises the
    momentum in place; here it stays a momentum. On a CPU without arithmetic for bfloat16 larger
    matrices are multiplied in float32 and rounded (`newton_schulz.py`).
    """

    OPTIONS = MuonConfig
    CHECKS: ClassVar[Mapping[str, Check]] = {
        "eps": positive,
        "adjust_lr_fn": optional(one_of("original", "match_rms_adamw")),
    }
    STATE = ("momentum_buffer",)
    NEEDS_FULL_TENSORS = True

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        weight_decay: Numeric = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix with a gradient; return the result of `closure`, or None.

        Matrices are stepped together until they have `MUON_BUCKET` elements on this process.
        """
        loss = evaluate_closure(closure)
        bucket: list[tuple[Tensor, Group]] = []
        elements = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                bucket.append((param, group))
                elements += param.numel() // sharding_of(param).ranks
                if elements >= MUON_BUCKET:
                    self._step_together(bucket)
                    bucket = []
                    elements = 0
        self._step_together(bucket)  # the rest, perhaps none
        return loss

    def _step_together(self, bucket: list[tuple[Tensor, Group]]) -> None:
        """Step (parameter, group) pairs: decay the weights, subtract orthogonalized momentum.

        Creates and updates the momentum buffers, too. Sharded matrices are gathered for the
        orthogonalization (`on_whole`), so all ranks call this with the same parameters.
        """
        momenta = [self._update_momentum(param, group) for param, group in bucket]

        def orthogonalize_full(index: int, momentum: Tensor) -> Tensor:
            group = bucket[index][1]
            return orthogonalize(
                momentum, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )

        updates = on_whole(orthogonalize_full, momenta, [param for param, _ in bucket])
        for (param, group), update in zip(bucket, updates, strict=True):
            weights = local(param)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            adjusted_lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], param.shape)
            weights.add_(update, alpha=-adjusted_lr)

    def _update_momentum(self, param: Tensor, group: Group) -> Tensor:
        """Update the momentum buffer of a parameter, and return the matrix to orthogonalize.

        That is this process's shard of the momentum, or of its Nesterov form, in bfloat16 as in
        torch. Creates the buffer if it is missing.

        Raises:
            RuntimeError: The parameter is complex, or its gradient sparse.
        """
        grad = param.grad
        state = self.state[param]
        assert grad is not None
        if torch.is_complex(param) or grad.is_sparse:
            kind = "sparse gradients" if grad.is_sparse else "complex parameters"
            raise RuntimeError(f"Muon does not support {kind}.")
        grad = place_like(grad, param)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        shard = local(grad)
        buffer = local(state["momentum_buffer"])
        buffer.lerp_(shard, 1 - group["momentum"])
        if group["nesterov"]:
            return shard.lerp(buffer, group["momentum"]).to(torch.bfloat16)
        return buffer.to(torch.bfloat16, copy=True)
