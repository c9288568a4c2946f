"""LazyAdam: Adam that touches the rows a sparse gradient lists, and no others.

torch's SparseAdam cannot decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from optrun.base.options import Group, ParamGroup, Scalars
from optrun.config.schema.optimizer import LazyAdamConfig
from optrun.optimizer.adam_update import ADAM, unscale_and_decay
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.groups import refuse_flat_pieces

NAME_RULE = ("beta", "gamma")
"""Default of `exclude_from_weight_decay`: norm parameters as MindSpore names them."""


class LazyAdam(BatchOptimizer):
    """Adam with coupled decay, which leaves rows alone that a sparse gradient does not list.

    One step of a dense gradient, t counting the gradients a parameter has had from 1:

        g = g / loss_scale + weight_decay w
        g = g - mean of g over all axes but the first    (where grad_centralization)
        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w = w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    A sparse gradient does the same to the rows it lists; repeated rows are summed first. Other rows
    keep w, m and v; time and memory of a step grow with the rows listed, not with the table.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: >= 0; where it is added is said by `eps_form`.
        weight_decay: Coupled L2, >= 0; may be a function of the step.
        exclude_from_weight_decay: Regular expressions; names in which one is found are not decayed.
            The default holds
            for ungrouped named parameters only: in groups, decay follows the group's value for
            every name.
        nesterov: Step along b1 m + (1 - b1) g instead of m.
        loss_scale: What gradients were multiplied by, > 0; they are divided by it, the decay is
            not.
        eps_form: "documented": added after bias correction, so that a dense LazyAdam is
            torch.optim.Adam; "mindspore": added to the raw sqrt(v), as the package computes.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).
        grad_centralization: Centre the gradients of tensors of two or more dimensions; mostly set
            in a group.
        unmatched_patterns: "error", or "ignore" for patterns that match no name.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range, a pattern that matches nothing, or patterns over
            unnamed parameters.

    Source: MindSpore 2.10 LazyAdam, after Kingma & Ba 2015, arXiv:1412.6980. Gradient
    centralization: Yong et al. 2020, arXiv:2004.01461, equation 1.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(4, 1, sparse=True)
        >>> before = table.weight.detach().clone()
        >>> optimizer = LazyAdam(table.named_parameters(), lr=0.1)
        >>> table(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).flatten().tolist()
        [False, False, True, False]
    """

    OPTIONS = LazyAdamConfig
    OPTIMIZER_WIDE = frozenset({"unmatched_patterns"})
    RULES = ("exclude_from_weight_decay", "grad_centralization")
    FORMULA = ADAM
    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = NAME_RULE,
        nesterov: bool = False,
        loss_scale: float = 1.0,
        eps_form: Literal["documented", "mindspore"] = "documented",
        foreach: bool | None = None,
        grad_centralization: bool = False,
        unmatched_patterns: Literal["error", "ignore"] = "error",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "exclude_from_weight_decay": exclude_from_weight_decay,
                "nesterov": nesterov,
                "loss_scale": loss_scale,
                "eps_form": eps_form,
                "foreach": foreach,
                "grad_centralization": grad_centralization,
                "unmatched_patterns": unmatched_patterns,
            },
        )

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group as in `NamedOptimizer`, but without the default name rule.

        The default of `exclude_from_weight_decay` holds only for parameters that were passed to the
        constructor without groups. A rule that the user has set holds for groups, too.
        """
        # Not the one group that torch makes of parameters passed without groups.
        is_users_group = self._built or self._grouped
        has_default_rule = self.defaults["exclude_from_weight_decay"] == list(NAME_RULE)
        if is_users_group and has_default_rule and isinstance(param_group, dict):
            param_group = {"exclude_from_weight_decay": None, **param_group}
        super().add_param_group(param_group)

    def _resolve(self) -> None:
        """Store the names excluded from decay; refuse FSDP1's pieces under grad_centralization.

        Raises:
            ValueError: A pattern matches no name, unless `unmatched_patterns` is "ignore"; a flat
                piece of FSDP1, whose rows are not known, is to be centred.
        """
        if any(group["grad_centralization"] for group in self.param_groups):
            refuse_flat_pieces(list(self.named_params().items()), type(self).__name__)
        self._undecayed = self._find_excluded_names(
            "exclude_from_weight_decay",
            must_match=self.defaults["unmatched_patterns"] == "error",
            optional=NAME_RULE,
        )

    def _traits(self, group: Group, name: str, param: Tensor) -> tuple[bool, bool]:
        """Tell whether a parameter decays, and whether its gradient is centred.

        Raises:
            RuntimeError: It is to be centred and sharded over another dimension than the first.
        """
        centre = group["grad_centralization"] and param.dim() >= 2
        placements = param.placements if isinstance(param, DTensor) else ()
        has_cut_rows = any(p.is_shard() and not p.is_shard(0) for p in placements)
        if centre and has_cut_rows:
            raise RuntimeError(
                "grad_centralization needs whole rows, and a parameter is placed as"
                f" {placements}: shard over dimension 0, or switch it off for that group."
            )
        return self.decays(name), centre

    def _scalars(self, group: Group, traits: tuple[bool, bool], counters: Scalars) -> Scalars:
        """Return `lr`, `l2`, `centre` and `loss_scale`; `keep` is 1, since decay is coupled."""
        del counters
        decays, centre = traits
        return {
            "lr": group["lr"],
            "keep": 1.0,
            "l2": group["weight_decay"] if decays else 0.0,
            "centre": centre,
            "loss_scale": group["loss_scale"],
        }

    def _sparse_policy(self, _group: Group) -> str:
        """Update the rows of a sparse gradient, and no others."""
        return "rows"

    def _update(self, batch: Batch) -> None:
        """Step as Adam, after centring gradients."""
        if any(row["centre"] for row in batch.rows):
            batch = _with_centred_grads(batch)
        self.FORMULA.step(batch)


def _with_centred_grads(batch: Batch) -> Batch:
    """Return a batch with new gradients for tensors to centre: unscaled, decayed and centred.

    Their `l2` becomes 0 and their `loss_scale` 1, so that Adam's step does neither again. Addresses
    of gradients and tables of kernels are dropped, since the gradients are other tensors.
    """
    grads = []
    for param, grad, scalars in zip(batch.params, batch.grads, batch.scalars, strict=True):
        if scalars["centre"]:
            grad = centre_rows(
                unscale_and_decay(param, grad, l2=scalars["l2"], loss_scale=scalars["loss_scale"])
            )
        grads.append(grad)
    rows = [{**row, "l2": 0.0, "loss_scale": 1.0} if row["centre"] else row for row in batch.rows]
    return replace(batch, grads=grads, rows=rows, grad_addresses=[], tables={})


def centre_rows(grad: Tensor) -> Tensor:
    """Return a gradient minus its mean over all axes but the first: each row gets mean 0.

    The gradient must have two or more dimensions.

    Example:
        >>> import torch
        >>> centre_rows(torch.tensor([[1.0, 3.0], [2.0, 2.0]])).tolist()
        [[-1.0, 1.0], [0.0, 0.0]]
    """
    return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
