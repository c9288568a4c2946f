"""Find the order in which a model uses its parameters, by a forward pass on the meta device.

On the meta device tensors have shapes and dtypes, but no values: such a pass takes no memory.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optrun.base.plain import PlainDict

Uses: TypeAlias = Mapping[str, tuple[int, int]]
"""Parameter name -> numbers of the first and the last operation that use it, counted from 1 in a
forward pass; unused parameters are missing."""

W = TypeVar("W", bound="UseRecorder")

_MAX_OPERATIONS = 50_000
"""Largest number of operations of a forward pass, some seconds. Since there are no values, a loop
that waits for a value may never end."""


def uses_of(model: nn.Module, batch: Mapping[str, object]) -> Uses:
    """Find the first and last operation on each parameter in a forward pass.

    Operations are watched, and not modules: a weight that another module uses
    (`nn.functional.linear` with `self.proj.weight`), a class token, and a tied embedding count
    where they are used. See `run_on_meta`.

    Args:
        model: On any device.
        batch: Keyword arguments of `model.forward`; only shapes and dtypes matter.

    Raises:
        Exception: Whatever the model raises if it cannot run on the meta device or on this batch.

    Example:
        >>> class Tail(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.last, self.first = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        ...
        ...     def forward(self, x: Tensor) -> Tensor:
        ...         return self.last(self.first(x))
        >>> uses = uses_of(Tail(), {"x": torch.ones(1, 2)})
        >>> sorted(uses, key=uses.__getitem__)
        ['first.weight', 'last.weight']
    """
    return run_on_meta(model, batch, UseRecorder).uses


def run_on_meta(
    model: nn.Module, batch: Mapping[str, object], make_recorder: Callable[[nn.Module], W]
) -> W:
    """Run a copy of a model on the meta device, and return the recorder of its operations.

    The pass runs in evaluation mode and takes no memory. The model, its buffers and the random
    generators do not change. Warnings are not shown.

    Args:
        model: On any device.
        batch: See `uses_of`.
        make_recorder: Makes the recorder, a `TorchDispatchMode`, from the copy of the model; such
            as the class `UseRecorder`.

    Raises:
        Exception: Whatever the model raises; RuntimeError after 50,000 operations.
    """
    # 1. Copy the model, with every tensor replaced by one on the meta device. `memo` maps the id of
    # an object to what `deepcopy` puts in its place, so no tensor is copied.
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):  # a plain attribute, neither a parameter nor a buffer
                memo[id(value)] = value.detach().to("meta")
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(param.detach().to("meta"), requires_grad=False)
    model_on_meta = copy.deepcopy(model, memo).eval()
    # 2. Run the copy under the recorder.
    batch_on_meta = {
        key: value.to("meta") if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }
    recorder = make_recorder(model_on_meta)
    quiet = warnings.catch_warnings()
    keep_rng = torch.random.fork_rng(devices=[])
    # A mask has no values here: to `nonzero` it is true everywhere.
    full_masks = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    # `torch.device`: for the tensors that the model makes. As a mode, the recorder sees every
    # operation in the block.
    with quiet, keep_rng, full_masks, torch.no_grad(), torch.device("meta"), recorder:
        warnings.simplefilter("ignore")
        model_on_meta(**batch_on_meta)
    return recorder


def example_batches(model: Any) -> list[dict[str, Tensor]]:
    """Make batches of zeros on the meta device for a transformers model.

    Returns:
        A batch of one example, with every kind of input that `forward` takes: 8 tokens, an image,
        one second of sound, or 30 seconds of sound as features. If it has tokens and others, also a
        batch with the tokens only. Empty for models of other libraries.
    """
    config = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    if config is None or main_input is None:
        return []
    inputs = inspect.signature(model.forward).parameters
    token_inputs = [key for key in ("input_ids", "decoder_input_ids") if key in inputs]
    # A multiple-choice model takes several sequences for an example: here two.
    choices = (2,) if type(model).__name__.endswith("MultipleChoice") else ()
    with torch.device("meta"):
        tokens = {key: torch.zeros(1, *choices, 8, dtype=torch.long) for key in token_inputs}
        batch = dict(tokens)
        if "pixel_values" in inputs:
            vision = getattr(config, "vision_config", None) or config
            size = getattr(vision, "image_size", 224)
            sides = (size, size) if isinstance(size, int) else tuple(size)[:2]
            batch["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), *sides)
        if main_input == "input_values":
            batch[main_input] = torch.zeros(1, 16_000)  # samples of one second
        if main_input == "input_features":
            # 100 frames a second, as Whisper takes them.
            batch[main_input] = torch.zeros(1, getattr(config, "num_mel_bins", 80), 3_000)
    if 0 < len(tokens) < len(batch):
        return [batch, tokens]
    return [batch]


def describe_uses(model: nn.Module, batch: Mapping[str, object] | None) -> tuple[Uses, str]:
    """Find the uses of parameters in a forward pass, and write a note on the result for users.

    Args:
        model: On any device.
        batch: See `uses_of`; None: the first of `example_batches` that the model runs on.

    Returns:
        The uses, empty if the model cannot run on the meta device; and the note.
    """
    kind = type(model).__name__
    recorder, reason = record_forward(model, batch, UseRecorder, "no batch was given")
    if recorder is None:
        note = (
            f"param_groups=layerwise: the parameters of {kind} outside of its blocks get their"
            f" layer by name, because no forward pass on the meta device was possible ({reason})."
            " Use param_groups.name_dict to set layers yourself."
        )
        return {}, note
    count = len(list(model.parameters()))
    note = (
        f"param_groups=layerwise: a forward pass of {kind} used {len(recorder.uses)} of {count}"
        " parameters; those outside of its blocks get their layer by the order of use."
    )
    return recorder.uses, note


def record_forward(
    model: nn.Module,
    batch: Mapping[str, object] | None,
    make_recorder: Callable[[nn.Module], W],
    reason_without_batch: str,
) -> tuple[W | None, str]:
    """Record a forward pass on the meta device, with the first batch that works.

    Args:
        model: On any device.
        batch: See `uses_of`; None: each of `example_batches` is tried.
        make_recorder: See `run_on_meta`, which runs the model.
        reason_without_batch: The reason to return if there is no batch at all.

    Returns:
        The recorder after the pass, and an empty text. Or None, and the reason for users: the error
        of the last batch, or of making the batches. Errors are not raised.
    """
    batches: Sequence[Mapping[str, object]]
    try:
        batches = example_batches(model) if batch is None else [batch]
    except Exception as error:  # a configuration of another form than most
        return None, describe_briefly(error)
    reason = reason_without_batch
    for example in batches:
        try:
            return run_on_meta(model, example, make_recorder), ""
        except Exception as error:  # whatever a model's own code raises
            reason = describe_briefly(error)
    return None, reason


def describe_briefly(error: Exception) -> str:
    """Describe an error by its type and the first 120 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class UseRecorder(TorchDispatchMode):
    """Record the first and the last operation on each parameter during a forward pass.

    If the model reads a value, which the meta device does not have, it gets 1.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(param): name for name, param in model.named_parameters()}
        self._count = 0
        self.uses: dict[str, tuple[int, int]] = {}
        """First and last operation on each parameter, counted from 1."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: PlainDict | None = None,
    ) -> Any:
        """Count an operation, record the parameters among its arguments, and run it.

        Raises:
            RuntimeError: There were more than `_MAX_OPERATIONS`.
        """
        self._count += 1
        if self._count > _MAX_OPERATIONS:
            raise RuntimeError(
                f"more than {_MAX_OPERATIONS:,} operations, such as a loop until a value is small"
            )
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf))
            if name is not None:
                first, _ = self.uses.get(name, (self._count, 0))
                self.uses[name] = (first, self._count)
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if func is torch.ops.aten._grouped_mm.default:  # on shapes torch has it for bfloat16 alone
            left, right = args[:2]
            return left.new_empty(*left.shape[:-1], right.shape[-1])
        return func(*args, **(kwargs or {}))
