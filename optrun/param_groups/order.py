"""Find the order in which a model uses its parameters, by a forward pass on the meta device."""

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
"""Parameter name -> (first, last) operation that uses it, counted from 1; an unused one is
missing."""

W = TypeVar("W", bound="Watch")

_MAX_OPERATIONS = 50_000
"""Largest number of operations of a forward pass, some seconds. Without values, a loop that waits
for one may never end."""


def uses_of(model: nn.Module, batch: Mapping[str, object]) -> Uses:
    """Find when each parameter is used in a forward pass.

    Operations are watched, and not modules: a weight that another module uses
    (`nn.functional.linear` with `self.proj.weight`), a class token, and a tied embedding count
    where they are used. The pass runs in evaluation mode on a copy of the model on the meta device.
    So it takes no memory, and the model, its buffers and the random generators do not change.

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
    return run_on_shapes(model, batch, Watch).uses


def run_on_shapes(
    model: nn.Module, batch: Mapping[str, object], make: Callable[[nn.Module], W]
) -> W:
    """Run a copy of a model on the meta device under a watch, and return the watch.

    Args:
        model: On any device; not changed.
        batch: See `uses_of`.
        make: Makes the watch over the copy.

    Raises:
        Exception: Whatever the model raises; RuntimeError after 50,000 operations.
    """
    plain_tensors: list[Tensor] = []  # attributes that are neither parameters nor buffers
    for module in model.modules():
        plain_tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    shapes: dict[int, object] = {
        id(tensor): tensor.detach().to("meta") for tensor in [*plain_tensors, *model.buffers()]
    }
    shapes |= {
        id(param): nn.Parameter(param.detach().to("meta"), False) for param in model.parameters()
    }
    twin = copy.deepcopy(model, shapes).eval()
    on_meta = {
        key: value.to("meta") if isinstance(value, Tensor) else value
        for key, value in batch.items()
    }
    watch = make(twin)
    quiet = warnings.catch_warnings()
    seeds = torch.random.fork_rng(devices=[])
    whole_masks = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with quiet, seeds, whole_masks, torch.no_grad(), torch.device("meta"), watch:
        warnings.simplefilter("ignore")
        twin(**on_meta)
    return watch


def example_batches(model: Any) -> list[dict[str, Tensor]]:
    """Make batches of zeros on the meta device for a model of transformers.

    Returns:
        Batches of one example of 8 tokens, with images and sound if `forward` takes them; then one
        with its tokens only. Empty for other models.
    """
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    takes = inspect.signature(model.forward).parameters
    choices = (2,) if type(model).__name__.endswith("MultipleChoice") else ()
    ids = [key for key in ("input_ids", "decoder_input_ids") if key in takes]
    if config is None or main is None:
        return []
    with torch.device("meta"):
        tokens = {key: torch.zeros(1, *choices, 8, dtype=torch.long) for key in ids}
        batch = dict(tokens)
        if "pixel_values" in takes:
            vision = getattr(config, "vision_config", None) or config
            size = getattr(vision, "image_size", 224)
            sides = (size, size) if isinstance(size, int) else tuple(size)[:2]
            batch["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), *sides)
        if main == "input_values":
            batch[main] = torch.zeros(1, 16_000)
        if main == "input_features":
            batch[main] = torch.zeros(1, getattr(config, "num_mel_bins", 80), 3_000)
    if 0 < len(tokens) < len(batch):
        return [batch, tokens]
    return [batch]


def describe_uses(model: nn.Module, batch: Mapping[str, object] | None) -> tuple[Uses, str]:
    """Find the uses of parameters in a forward pass, and describe the result in a sentence.

    Args:
        model: On any device.
        batch: See `uses_of`; None: the first of `example_batches` that the model runs on.

    Returns:
        The uses, empty if the model cannot run on the meta device; and the sentence.
    """
    kind = type(model).__name__
    count = sum(1 for _ in model.parameters())
    watch, why = first_watch(model, batch, Watch, "batch=: none given")
    if watch is None:
        return (
            {},
            (
                f"param_groups=layerwise: the tensors of {kind} beside the blocks are placed by"
                f" name, since no forward pass over shapes was made ({why}). param_groups.name_dict"
                " places them by hand."
            ),
        )
    return (
        watch.uses,
        (
            f"param_groups=layerwise: a forward pass of {kind} over shapes used {len(watch.uses)}"
            f" of {count} tensors; those beside the blocks lie where they were used."
        ),
    )


def first_watch(
    model: nn.Module, batch: Mapping[str, object] | None, make: Callable[[nn.Module], W], why: str
) -> tuple[W | None, str]:
    """Run a model under a watch, on the first batch that works.

    Args:
        model: On any device.
        batch: See `uses_of`; None: each of `example_batches` is tried.
        make: As for `run_on_shapes`.
        why: The reason to return if there is no batch at all.

    Returns:
        The watch, and an empty text; None and the reason if the model ran on no batch.
    """
    batches: Sequence[Mapping[str, object]]
    try:
        batches = example_batches(model) if batch is None else [batch]
    except Exception as error:  # a configuration of another form than most
        return None, _in_short(error)
    for example in batches:
        try:
            return run_on_shapes(model, example, make), ""
        except Exception as error:  # whatever a model's own code raises
            why = _in_short(error)
    return None, why


def _in_short(error: Exception) -> str:
    """Describe an error by its type and the first 120 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class Watch(TorchDispatchMode):
    """Note the first and the last operation on each parameter during a forward pass.

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
        """Count an operation, note the parameters among its arguments, and run it.

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
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[-1])
        return func(*args, **(kwargs or {}))
