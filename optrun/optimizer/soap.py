"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner. torch has none."""

from __future__ import annotations

import torch
from torch import Tensor

from optrun.base.options import Group, Scalars, State
from optrun.config.schema.optimizer import SoapConfig
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import (
    bias_correction,
    decay_param_,
    first_moment_,
    local,
    second_moment_,
)

Bases = dict[str, Tensor]
"""Dimension of a tensor, as text -> its basis; a dimension without a preconditioner is missing.

Keys are texts, since torch flattens only such states (`flatten_optimizer_state_dict`).
"""


def _single_tensor_soap(batch: Batch) -> None:
    """Take the step of `Soap` in place, one full tensor after another.

    exp_avg is in the coordinates of the parameter, exp_avg_sq in those of the eigenbases. The first
    gradient of a tensor makes the bases, and moves nothing.
    """
    options = batch.options
    beta1, beta2 = options["betas"]
    for param, grad, exp_avg, exp_avg_sq, scalars in batch.tensors():
        k = scalars["step"] - 1  # number of this update: the first gradient is not used for one
        bases = scalars["bases"]
        if k:
            # Adam's step in the eigenbases.
            first_moment_(exp_avg, grad, beta1)
            second_moment_(exp_avg_sq, project(grad, bases), beta2)
            direction = project(exp_avg, bases).div_(exp_avg_sq.sqrt().add_(options["eps"]))
            scale = bias_correction(beta2, k) ** 0.5 / bias_correction(beta1, k)
            param.sub_(project(direction, bases, back=True), alpha=scalars["lr"] * scale)
            decay_param_(param, scalars["keep"])
        _update_bases(grad, exp_avg_sq, scalars, k, options["precondition_frequency"])


def _update_bases(
    grad: Tensor, exp_avg_sq: Tensor, scalars: Scalars, k: int, frequency: int
) -> None:
    """Update the preconditioners of a tensor, and every `frequency` steps their eigenbases.

    In place: `preconditioners` (L and R of `Soap`) and `bases` (QL and QR) of the scalars are dicts
    of tensors by dimension, "0" and "1" for a matrix, which stand in the state.

    Args:
        grad: Gradient of the tensor.
        exp_avg_sq: Its second moment; follows the columns of a new basis.
        scalars: The two dicts, and `shampoo_beta`.
        k: Number of gradients before this one; with 0 the bases are made.
        frequency: Steps from one pair of bases to the next.
    """
    bases = scalars["bases"]
    for dim, preconditioner in scalars["preconditioners"].items():
        # The tensors of a batch are local already. Preconditioners and bases come from the state,
        # which is plain if SOAP made it; `local` allows for DTensors, as in `project`.
        matrix = local(preconditioner)
        # The gradient as a matrix (side, all others): of g itself for dimension 0, of g' for 1.
        # A tensor of more dimensions is flattened to that.
        rows = grad.movedim(int(dim), 0).reshape(grad.shape[int(dim)], -1)
        matrix.lerp_(rows @ rows.T, 1 - scalars["shampoo_beta"])
        if not k:  # the first gradient
            bases[dim] = eigenvectors(matrix)
        elif k % frequency == 0:
            bases[dim], order = next_basis(matrix, local(bases[dim]))
            # Columns of the basis changed places, and their second moments with them.
            exp_avg_sq.copy_(exp_avg_sq.index_select(int(dim), order))


def project(tensor: Tensor, bases: Bases, *, back: bool = False) -> Tensor:
    """Return a tensor in the coordinates of the bases: each dimension multiplied with its basis.

    `back` multiplies with the transposed bases, which is the inverse.

    Example:
        >>> turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> project(torch.tensor([[1.0], [2.0]]), {"0": turn})
        tensor([[-2.],
                [ 1.]])
        >>> project(project(torch.tensor([[1.0], [2.0]]), {"0": turn}), {"0": turn}, back=True)
        tensor([[1.],
                [2.]])
    """
    projected = tensor.clone()
    axis_of_basis = 1 if back else 0
    for name, basis in bases.items():
        dim = int(name)
        product = torch.tensordot(projected, local(basis), dims=([dim], [axis_of_basis]))
        projected = product.movedim(-1, dim)  # tensordot puts the new dimension last
    return projected


def eigenvectors(matrix: Tensor) -> Tensor:
    """Compute the eigenvectors of a symmetric matrix, as columns, largest eigenvalue first.

    LAPACK fails for some float32 matrices that are nearly zero, such as an embedding's after its
    first gradient; they are decomposed in float64, as in the authors' code. The vectors of zero
    eigenvalues are drawn, see `_replace_weightless_columns`.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # documented, and not in torch's own list
        in_float64 = torch.linalg.eigh(matrix.double())
        values = in_float64.eigenvalues.to(matrix.dtype)
        vectors = in_float64.eigenvectors.to(matrix.dtype)
    # eigh sorts eigenvalues from the smallest.
    return _replace_weightless_columns(vectors.flip(1), values.flip(0))


def next_basis(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a basis of eigenvectors by one power iteration, and make it orthogonal by QR.

    Args:
        matrix: Symmetric, (n, n).
        basis: Eigenvectors of this matrix some steps ago, as columns, (n, n).

    Returns:
        The new basis, largest estimated eigenvalue first; and for each of its columns the index of
        the column of `basis` that it comes from.

    Source: Vyas et al. 2024, arXiv:2409.11321, Algorithm 4.
    """
    product = matrix @ basis
    # q' A q of a column q is an estimate of its eigenvalue.
    estimates = (basis * product).sum(dim=0)
    order = estimates.argsort(descending=True)
    q, r = torch.linalg.qr(product.index_select(1, order))
    return _replace_weightless_columns(q, r.diagonal().abs()), order


def _replace_weightless_columns(basis: Tensor, weights: Tensor) -> Tensor:
    """Replace basis vectors of weight 0, up to rounding, by drawn ones orthogonal to the others.

    After few gradients a preconditioner has a low rank. The vectors that a factorisation returns
    for its null space depend on the last bits of the gradients, and later steps depend on these
    vectors: one process and two ranks would diverge. The drawn vectors depend on the size alone.

    Args:
        basis: Orthogonal, (n, n); columns with a weight first.
        weights: Eigenvalue of each column, or its estimate, (n,).
    """
    # 1. Count the columns before the first one whose weight may be a rounding error. These grow
    # with the square root of the size; the 8 is a margin.
    side = len(weights)
    rounding = 8 * side**0.5 * torch.finfo(weights.dtype).eps * weights.max()
    # On the meta device there are no values to compare.
    rank = side if weights.is_meta else int((weights > rounding).cumprod(0).sum())
    if rank == side:
        return basis
    # 2. Draw the others, and make them orthogonal to these and to each other.
    with_weight = basis[:, :rank]
    drawn = torch.randn(
        side, side - rank, generator=torch.Generator().manual_seed(side), dtype=torch.float64
    )
    replaced = drawn.to(basis)
    for _ in range(2):  # after one pass they are not orthogonal to the last bits
        replaced = torch.linalg.qr(replaced - with_weight @ (with_weight.T @ replaced)).Q
    return torch.cat([with_weight, replaced], dim=1)


class Soap(BatchOptimizer):
    """Shampoo with Adam in the preconditioner's eigenbasis, tensor by tensor.

    One step of one matrix, k counting from 1 the gradients it has had after the first:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) (QL' g QR)^2
        w = w - lr QL ((QL' m QR / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps / sqrt(1 - b2^k))) QR'
        w = w (1 - lr weight_decay)
        L = bs L + (1 - bs) g g'        R = bs R + (1 - bs) g' g
        QL, QR = orthogonal factors of L QL and R QR, every precondition_frequency steps

    The first gradient of a tensor makes L, R and their eigenvectors QL, QR, and moves nothing: no
    gradient is projected by what it made itself. A tensor of more dimensions has a matrix for each;
    vectors and numbers take Adam's step. Everything is float32 at least; n x m parameters keep 2
    (n^2 + m^2 + n m) numbers.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following;
            no shards.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        shampoo_beta: Decay bs of L and R, in [0, 1); None: that of the second moment.
        eps: Added to the square root of the second moment before its bias correction, >= 0.
        weight_decay: Decoupled, after the step, >= 0; may be a function of the step.
        precondition_frequency: Steps from one pair of bases to the next, >= 1.
        max_precondition_dim: A longer dimension is left as it is, as those of a vocabulary.
        precondition_1d: Vectors have a basis, too.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range, or a sharded parameter.

    Source: Vyas et al. 2024, arXiv:2409.11321, Algorithms 3 and 4; the first step, the bias
    correction and the order of decay as in the authors' code.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
        >>> optimizer = Soap([weight], lr=0.1, weight_decay=0.0)
        >>> for _ in range(2):
        ...     weight.grad = torch.tensor([[0.5, 0.0]])
        ...     optimizer.step()
        >>> weight.data
        tensor([[0.9000, 2.0000]])
    """

    OPTIONS = SoapConfig
    FORMULA = Formula(_single_tensor_soap)
    MOMENTS = ("exp_avg", "exp_avg_sq")
    STATE = ("exp_avg", "exp_avg_sq", "preconditioners", "bases")
    TAKES_SHARDS = False
    NEEDS_FULL_TENSORS = True

    def __init__(
        self,
        params: Params,
        lr: Numeric = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        precondition_frequency: int = 10,
        max_precondition_dim: int = 10000,
        precondition_1d: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "shampoo_beta": shampoo_beta,
                "eps": eps,
                "weight_decay": weight_decay,
                "precondition_frequency": precondition_frequency,
                "max_precondition_dim": max_precondition_dim,
                "precondition_1d": precondition_1d,
            },
        )

    def _traits(self, group: Group, name: str, param: Tensor) -> Tensor:
        """Return the parameter: each has preconditioners of its own."""
        del group, name
        return param

    def _new_state(self, group: Group, param: Tensor) -> State:
        """Create the state: zero moments and preconditioners, and an empty dict of bases.

        A tensor without a preconditioner has neither `preconditioners` nor `bases`.
        """
        state = super()._new_state(group, param)
        dims = self._preconditioned_dims(param, group)
        if dims:
            like = local(state["exp_avg"])
            state["preconditioners"] = {
                str(dim): like.new_zeros(like.shape[dim], like.shape[dim]) for dim in dims
            }
            state["bases"] = {}
        return state

    def _scalars(self, group: Group, traits: Tensor, counters: Scalars) -> Scalars:
        """Return `lr`, `keep`, `shampoo_beta`, and the preconditioners and bases of the parameter.

        The two are the dicts of its state; `traits` is the parameter.
        """
        state = self.state[traits]
        shampoo_beta = group["shampoo_beta"]
        return {
            **super()._scalars(group, traits, counters),
            "preconditioners": state.get("preconditioners", {}),
            "bases": state.get("bases", {}),
            "shampoo_beta": group["betas"][1] if shampoo_beta is None else shampoo_beta,
        }

    def _preconditioned_dims(self, param: Tensor, group: Group) -> list[int]:
        """List the dimensions of a parameter with a preconditioner.

        These are all that are not longer than `max_precondition_dim`; none of a vector unless
        `precondition_1d` is set.
        """
        if param.numel() == 0 or (param.dim() < 2 and not group["precondition_1d"]):
            return []
        return [
            dim for dim, side in enumerate(param.shape) if side <= group["max_precondition_dim"]
        ]

    def state_keys(self, param: Tensor, group: Group) -> set[str]:
        """List state keys as `NamedOptimizer`, with bases only for preconditioned tensors."""
        keys = super().state_keys(param, group)
        if self._preconditioned_dims(param, group):
            return keys
        return keys - {"preconditioners", "bases"}
