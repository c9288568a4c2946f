"""Describe a step with a NaN or infinite loss or gradient, and save its batch to reproduce it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from optrun.artifacts.atomic import storage_errors
from optrun.artifacts.metrics import to_json
from optrun.artifacts.run_dir import RunDir, step_name
from optrun.artifacts.tensor_file import write_tensors
from optrun.base.plain import PlainDict
from optrun.data.loader import Batch
from optrun.training.setup import TrainingSetup
from optrun.training.step import StepResult


@dataclass
class NonfiniteStep:
    """The description of a step with a NaN or infinite loss or gradient."""

    message: str
    """Sentences for the user; whoever acts on the step may add to them."""
    values: PlainDict
    """Content of `report.json`."""
    bad_weights: bool
    """Whether a weight was not finite before the step, so that skipping the update cannot help."""


def describe(setup: TrainingSetup, result: StepResult, micro_batches: list[Batch]) -> NonfiniteStep:
    """Find non-finite micro-batches, gradients and weights; every rank takes part.

    The message names the first cause found: weights, else a micro-batch, else a gradient.

    Args:
        setup: The run; its model still has the gradients of the step, its state is from before it.
        result: Losses and gradient norm of the step.
        micro_batches: Micro-batches of all ranks, in the order of the step.
    """
    state = setup.state
    world = setup.train_step.world

    # 1. Find what is not finite: the names of gradients and weights on any rank, the numbers of
    # micro-batches from 0.
    parameters = dict(setup.model.named_parameters())
    gradients = {}
    for name, param in parameters.items():
        if param.grad is not None:
            gradients[name] = param.grad
    bad_gradients = world.merge_names(_nonfinite_names(gradients))
    bad_weights = world.merge_names(_nonfinite_names(parameters))
    bad_losses = [number for number, loss in enumerate(result.losses) if not math.isfinite(loss)]

    # 2. Write the message. The plan has a list for each micro-batch of the step at the present
    # position, with the epoch and the number of each example; `examples` has the numbers.
    examples = [[index for _, index in keys] for keys in next(setup.plan.steps(state.position))]
    message = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}."
    first_examples = list(chain.from_iterable(examples))[:8]
    message += f" Examples {', '.join(map(str, first_examples))}, ..."
    if bad_weights:
        message += f" Weights were not finite before the step: {bad_weights[0]}."
    elif bad_losses:
        message += f" First in micro-batch {bad_losses[0] + 1} of {len(micro_batches)}."
    elif bad_gradients:
        message += f" The loss is finite; first such gradient: {bad_gradients[0]}."
    scaler = setup.train_step.scaler
    scale = float(scaler.get_scale()) if scaler.is_enabled() else None  # None without fp16
    if scale is not None and scale < 1:
        message += f" The loss scale is {scale:g} already; a lower one would not help."

    # 3. Collect the values of the report, `report.json`.
    epoch, _ = setup.plan.locate(state.position)
    values = {
        "step": state.global_step + 1,
        "epoch": epoch,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "losses": result.losses,
        "lr": [float(group["lr"]) for group in setup.train_step.optimizer.param_groups],
        "loss_scale": scale,
        "examples": examples,
        "gradients_not_finite": bad_gradients,
        "weights_not_finite": bad_weights,
    }
    return NonfiniteStep(message, values, bool(bad_weights))


def _nonfinite_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List the names of tensors with a NaN or infinite value on this rank."""
    return [
        name for name, value in tensors.items() if not torch.isfinite(_local_values(value)).all()
    ]


def _local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, the stored values of a sparse tensor, else itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if tensor.is_sparse:
        return tensor.coalesce().values()
    return tensor


def save(run: RunDir, nonfinite: NonfiniteStep, micro_batches: list[Batch]) -> Path:
    """Write the report and the batch of a step; those of an earlier try are replaced.

    Args:
        run: The run directory.
        nonfinite: Description of the step.
        micro_batches: Micro-batches of all ranks; a tensor is named NUMBER/NAME in the file.

    Returns:
        `nonfinite/step-...` in the run directory, with `report.json` and `batch.safetensors`.

    Raises:
        StorageError: The disk refused.
    """
    folder = run.path / "nonfinite" / step_name(nonfinite.values["step"])
    tensors: Batch = {}
    for number, micro_batch in enumerate(micro_batches):
        for name, tensor in micro_batch.items():
            tensors[f"{number}/{name}"] = tensor.contiguous()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(
            json.dumps(to_json(nonfinite.values), indent=2), encoding="utf-8"
        )
        batch = folder / "batch.safetensors"
        batch.unlink(missing_ok=True)
        write_tensors(batch, tensors)
    return folder
