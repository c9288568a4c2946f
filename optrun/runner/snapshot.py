"""Copies of everything the next step depends on, for checkpoints that are written beside training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.manifest import FORMAT
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.tensor_file import local_part
from optrun.data.loader import EpochPlan
from optrun.model.weights import model_tensors
from optrun.optimizer.averaged import evaluation_weights
from optrun.optimizer.state import named_state
from optrun.training.state import TrainState
from optrun.training.step import TrainStep


class Copier:
    """Copies tensors to the CPU, into memory that is used again at the next call.

    New memory costs more than the copy itself; what is kept instead is one copy of the state for the run's whole life.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The copies, by the same names; they change at the next call."""
        copies = {}
        copied_from = set()
        for name, tensor in tensors.items():
            held = self._buffers.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = self._buffers[name] = _buffer(tensor)
            local_part(held).copy_(local_part(tensor.detach()), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                copied_from.add(tensor.device)
            copies[name] = held
        for device in copied_from:
            torch.cuda.synchronize(device)  # without one it waits for the current device, which may be another
        return copies


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate memory on the CPU for a copy; for a divided tensor, for what this rank holds of it."""
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor.detach(), device="cpu", memory_format=torch.contiguous_format)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Snapshots:
    """Takes snapshots of one run.

    Args:
        model: The module whose weights are saved.
        train_step: Its optimizer, schedule and loss scale.
        state: Where the run stands.
        plan: Which examples each step sees.
        constants: What is the same at every step of this start of the run: configuration, fingerprints, versions.
        allow_nonfinite: Whether weights may hold NaN or infinity.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        train_step: TrainStep,
        state: TrainState,
        plan: EpochPlan,
        constants: CheckpointMetadata,
        allow_nonfinite: bool,
    ) -> None:
        self.model = model
        self.train_step = train_step
        self.state = state
        self.plan = plan
        trainable = [name for name, param in model.named_parameters() if param.requires_grad]
        self.constants = replace(
            constants,
            format=FORMAT,
            parameters=[name for name, _ in model.named_parameters()],
            trainable=trainable,
        )
        self.finite = () if allow_nonfinite else trainable
        self._copy_model = Copier()
        self._copy_optimizer = Copier()

    def __call__(
        self,
        random: dict[str, object],
        callbacks: dict[str, object] | None = None,
        stop: dict[str, object] | None = None,
    ) -> Snapshot:
        """Copy everything as it stands now.

        Args:
            random: Random states, as JSON can hold them.
            callbacks: States of the loop's components.
            stop: The request to end training early; None: there is none.

        Returns:
            A snapshot whose tensors are written over by the next one.
        """
        tensors, optimizer = named_state(self.train_step.optimizer)
        epoch, step_in_epoch = self.plan.locate(self.state.position)
        with evaluation_weights(self.train_step.optimizer):  # those it trains are among the optimizer's tensors
            weights = self._copy_model(model_tensors(self.model))
        return Snapshot(
            global_step=self.state.global_step,
            model=weights,
            optimizer=self._copy_optimizer(tensors),
            metadata=replace(
                self.constants,
                global_step=self.state.global_step,
                epoch=epoch,
                step_in_epoch=step_in_epoch,
                train=self.state.to_dict(),
                random=random,
                scheduler=copy.deepcopy(self.train_step.scheduler.state_dict()),
                scaler=self.train_step.scaler.state_dict(),
                optimizer=optimizer,
                callbacks=callbacks or None,
                stop=stop,
            ),
            finite=self.finite,
        )
