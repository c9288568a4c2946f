"""Weights by name, each tensor once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optrun.base.errors import CheckpointError
from optrun.model.adapter import adapter_of


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect the tensors of a checkpoint: all of a model, or only those of its adapter.

    The frozen base of an adapter can be loaded from its own folder.

    Args:
        model: A module.

    Returns:
        References, detached; parameters first, in the module's order.
    """
    tensors = all_tensors(model)
    adapter = adapter_of(model)
    if adapter is None:
        return tensors
    return {name: tensors[name] for name in tensors if name in adapter.names}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect weights and persistent buffers by name.

    Tied tensors appear once, under the name of the parameter.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    # Views of one storage that cover the same elements are one tensor: GPT-2's head is its
    # embedding.
    seen = {_elements_of(tensor) for tensor in tensors.values()}
    for name, tensor in model.state_dict().items():
        if name in tensors or (tensor.numel() and _elements_of(tensor) in seen):
            continue
        seen.add(_elements_of(tensor))
        tensors[name] = tensor.detach()
    return tensors


def _elements_of(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Identify the elements of a tensor in memory; equal for views of the same elements."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into a model by name, in place.

    Args:
        model: A module.
        tensors: As `model_tensors` returns them.

    Raises:
        CheckpointError: The first name that is missing, is not in the model, or has another shape;
            nothing is copied then.
    """
    model_values = model_tensors(model)
    for name, tensor in model_values.items():
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}: the model has changed since it was saved."
            )
        if tensors[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name}: shape {tuple(tensors[name].shape)} in the checkpoint,"
                f" {tuple(tensor.shape)} in the model."
            )
    for name in tensors:
        if name not in model_values:
            raise CheckpointError(
                f"the checkpoint has a tensor {name}, which the model does not have."
            )
    with torch.no_grad():
        for name, tensor in model_values.items():
            tensor.copy_(tensors[name])


def assign_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace parameters and buffers of a model on the meta device by tensors, without a copy.

    Args:
        model: Changed in place; a parameter trains if the one that it replaces did.
        tensors: Dotted name to tensor. Shapes are not checked; other tensors of the model stay.
    """
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        param = module._parameters.get(leaf)
        if param is None:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=param.requires_grad)
