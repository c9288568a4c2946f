"""The order in which a model uses its parameters.

One forward pass over shapes alone, on a copy, without arithmetic.
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
"""Parameter name -> numbers of the first and of the last operation that use it, from 1; unused ones
are missing."""

W = TypeVar("W", bound="Watch")

_MOST = 50_000
"""Operations of a forward pass, some seconds: on shapes a loop that waits for a value may never
end."""


def uses_of(model: nn.Module, batch: Mapping[str, object]) -> Uses:
    """Find when each parameter is used in a forward pass.

    Operations are watched, and not modules: a weight that its module's owner uses
    (`nn.functional.linear` with
    `self.proj.weight`), a class token, and a tied table count where they are used. The pass runs in
    evaluation mode on a copy of the model on the meta device. So it costs no memory, and the model,
    its buffers and the random generators stay as they are.

    Args:
        model: On any device.
        batch: Keyword arguments of `model.forward`; only shapes and dtypes matter.

    Raises:
        Exception: Whatever the model raises where it cannot run on shapes alone, or not on this
            batch.

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
    """Run a copy of a model on shapes under a watch over its operations, and return the watch.

    See `uses_of`.
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
    """Build examples of zeros on the meta device for a model of transformers.

    All that it takes, then its tokens alone.

    Returns:
        Batches of one example: token ids, images and sound, as far as `forward` takes them. Empty
        for other models.
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
    """Watch a forward pass over shapes, and describe the result in a sentence.

    Args:
        model: On any device.
        batch: See `uses_of`; None: the first of `example_batches` that the model runs on.

    Returns:
        The uses, none where the model cannot run on shapes; and a sentence.
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
    """Run a model on shapes under a watch, on its first working batch.

    Args:
        model: On any device.
        batch: See `uses_of`; None: each of `example_batches` is tried.
        make: As for `run_on_shapes`.
        why: There is no watch if there is nothing to run on.

    Returns:
        The watch; None and the reason if the model cannot run on shapes.
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
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class Watch(TorchDispatchMode):
    """Notes the operations on each parameter.

    Where a model asks for a value, which shapes have not, it is 1.
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
        self._count += 1
        if self._count > _MOST:
            raise RuntimeError(
                f"more than {_MOST:,} operations, such as a loop until a value is small"
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
