"""Find the norm before a tied head, which can take muP's factor on the logits.

Logits are E (w n + b), and a factor on them is one on w and b. E keeps the rule of an embedding:
its gradients are those of a multiplied forward pass. Found in forward passes over shapes, so no
architecture is listed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from optrun.param_groups.order import Watch, example_batches, run_on_shapes
from optrun.param_groups.roles import is_norm


class NoCarrierError(Exception):
    """No norm before the head can take a factor on the logits; the message is the reason."""


def carrier_of_logits(model: nn.Module) -> tuple[str, float]:
    """Find the norm before a model's head, and the factor between the two.

    Args:
        model: A model of transformers, on any device.

    Returns:
        Path of the norm; and the factor, which is 1, or 1/sqrt(width) in T5.

    Raises:
        NoCarrierError: There is no such norm, it is called more than once, more than a factor is in
            between, or its output is not linear in its parameters.
    """
    why = "it is no model of transformers"
    for batch in example_batches(model):
        try:
            norms = run_on_shapes(model, batch, _LastNorm).norms
            path = norms[-1] if norms else ""
            if path:
                factor = run_on_shapes(model, batch, partial(_LastNorm, replaced=path)).factor
            else:
                factor = None
        except Exception as error:  # whatever a model's own code raises
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if not path or norms.count(path) > 1:
            raise NoCarrierError("no norm of its own stands before the head")
        if factor is None:
            raise NoCarrierError(f"between {path} and the head is more than a factor")
        if not _is_linear(model.get_submodule(path)):
            raise NoCarrierError(f"the output of {path} is not its parameters times something")
        return path, factor
    raise NoCarrierError(f"no forward pass over shapes can be made ({why})")


class _LastNorm(Watch):
    """Note the norms called before the head of a model.

    Args:
        model: On the meta device.
        replaced: Path of a norm whose output is replaced by ones and twos in turn, to see what
            reaches the head; empty: none.

    Attributes:
        norms: Paths in the order of their calls, of norms whose output has the width that the head
            takes.
        arrived: Input of the head.
    """

    def __init__(self, model: nn.Module, replaced: str = "") -> None:
        super().__init__(model)
        self.norms: list[str] = []
        self.arrived = torch.empty(0)
        head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]

        def record(path: str, _: nn.Module, args: object, out: Tensor) -> Tensor | None:
            del args
            if out.shape[-1] == head.in_features:
                self.norms.append(path)
            if path == replaced:
                return (1.0 + torch.arange(out.shape[-1], device="cpu") % 2).expand(out.shape)
            return None

        def arrives(_: nn.Module, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
            self.arrived = args[0]
            for handle in handles:
                handle.remove()
            return (torch.empty(args[0].shape, dtype=head.weight.dtype, device="meta"),)

        norms = [(path, module) for path, module in model.named_modules() if is_norm(module)]
        handles = [module.register_forward_hook(partial(record, path)) for path, module in norms]
        handles.append(head.register_forward_pre_hook(arrives))

    @property
    def factor(self) -> float | None:
        """Input of the head over the output of the replaced norm; None if not proportional."""
        if self.arrived.device.type == "meta":
            return None
        ones = self.arrived[..., 0]
        twos = self.arrived[..., 1]
        if ones.min() != ones.max() or not torch.equal(twos, 2 * ones):
            return None
        return float(ones.max())


@torch.no_grad()
def _is_linear(norm: nn.Module) -> bool:
    """Tell whether twice the parameters of a norm give twice the output.

    False for one that adds 1 to its weight, and for one without parameters.
    """
    twin = copy.deepcopy(norm).to_empty(device="cpu").double()
    params = list(twin.parameters())
    if not params:
        return False
    for param in params:
        param.copy_(torch.arange(1, param.numel() + 1).cos().view_as(param))
    x = torch.arange(2 * params[0].numel()).sin().double().view(2, -1)
    once = twin(x)
    for param in params:
        param.mul_(2)
    return torch.allclose(twin(x), 2 * once)
