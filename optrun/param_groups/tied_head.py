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

from optrun.param_groups.order import UseRecorder, describe_briefly, example_batches, run_on_meta
from optrun.param_groups.roles import is_norm


class NoCarrierError(Exception):
    """No norm before the head can take a factor on the logits; the message is the reason."""


def carrier_of_logits(model: nn.Module) -> tuple[str, float]:
    """Find the norm before a model's head; its parameters can carry a factor on the logits.

    Two forward passes on the meta device: the first finds the last norm before the head; in the
    second its output is replaced by ones and twos, to see whether the head reads a multiple of it.

    Args:
        model: A transformers model, on any device.

    Returns:
        Path of the norm; and that multiple: 1 in most models, 1/sqrt(width) in T5.

    Raises:
        NoCarrierError: There is no such norm, it is called more than once, the head reads anything
            but a multiple of its output, or its output is not linear in its parameters.
    """
    why = "it is no transformers model"
    for batch in example_batches(model):
        try:
            # Paths of the norms called before the head, in the order of the calls.
            norms = run_on_meta(model, batch, _LastNormRecorder).norms
            path = norms[-1] if norms else ""
            factor = None  # of the norm's output in the input of the head
            if path:
                replace_output = partial(_LastNormRecorder, replaced=path)
                factor = run_on_meta(model, batch, replace_output).factor
        except Exception as error:  # whatever a model's own code raises
            why = describe_briefly(error)
            continue
        if not path or norms.count(path) > 1:
            raise NoCarrierError("there is no norm that is used only before the head")
        if factor is None:
            raise NoCarrierError(f"the head reads more than a multiple of the output of {path}")
        if not _is_linear(model.get_submodule(path)):
            raise NoCarrierError(f"the output of {path} is not linear in its parameters")
        return path, factor
    raise NoCarrierError(f"it cannot run a forward pass on the meta device ({why})")


class _LastNormRecorder(UseRecorder):
    """Note the norms called before the head of a model.

    Args:
        model: On the meta device.
        replaced: Path of a norm whose output is replaced by ones and twos in turn, to see what
            reaches the head; empty: none.

    Attributes:
        norms: Paths in the order of their calls, of norms whose output has the width that the head
            takes.
        head_input: Input of the head.
    """

    def __init__(self, model: nn.Module, replaced: str = "") -> None:
        super().__init__(model)
        self.norms: list[str] = []
        self.head_input = torch.empty(0)
        head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]

        def record(path: str, _: nn.Module, args: object, out: Tensor) -> Tensor | None:
            del args
            if out.shape[-1] == head.in_features:
                self.norms.append(path)
            if path == replaced:
                return (1.0 + torch.arange(out.shape[-1], device="cpu") % 2).expand(out.shape)
            return None

        def record_head_input(_: nn.Module, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
            self.head_input = args[0]
            for handle in handles:
                handle.remove()
            return (torch.empty(args[0].shape, dtype=head.weight.dtype, device="meta"),)

        norms = [(path, module) for path, module in model.named_modules() if is_norm(module)]
        handles = [module.register_forward_hook(partial(record, path)) for path, module in norms]
        handles.append(head.register_forward_pre_hook(record_head_input))

    @property
    def factor(self) -> float | None:
        """Factor between the norm's replaced output and the head's input; None if not proportional.

        If each token of the output was (1, 2, 1, 2, ...) and arrives as (0.5, 1, ...), it is 0.5.
        The first two elements of each token are compared: the first must be equal in all tokens,
        and the second twice the first. Also None if the replaced output did not arrive at all, so
        that the head's input has no values (meta device).
        """
        if self.head_input.device.type == "meta":
            return None
        from_ones = self.head_input[..., 0]
        from_twos = self.head_input[..., 1]
        tokens_agree = from_ones.min() == from_ones.max()
        if tokens_agree and torch.equal(from_twos, 2 * from_ones):
            return float(from_ones.max())
        return None


@torch.no_grad()
def _is_linear(norm: nn.Module) -> bool:
    """Tell whether doubling all parameters of a norm doubles its output.

    Tested on a float64 copy with arbitrary values. False for a norm that adds 1 to its weight, as
    Gemma's does, and for one without parameters.
    """
    norm_copy = copy.deepcopy(norm).to_empty(device="cpu").double()
    params = list(norm_copy.parameters())
    if not params:
        return False
    for param in params:
        param.copy_(torch.arange(1, param.numel() + 1).cos().view_as(param))
    width = params[0].numel()
    x = torch.arange(2 * width).sin().double().view(2, width)  # two tokens
    output = norm_copy(x)
    for param in params:
        param.mul_(2)
    return torch.allclose(norm_copy(x), 2 * output)
