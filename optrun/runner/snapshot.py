"""Copy everything the next step depends on, for checkpoints written during training."""

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
from optrun.model.weights import model_tensors
from optrun.optimizer.evaluation_weights import evaluation_weights, has_evaluation_weights
from optrun.optimizer.state import named_state
from optrun.training.setup import TrainingSetup


class Copier:
    """Copies tensors to the CPU, into memory that the next call reuses.

    Allocating memory would take longer than the copy. The cost: one copy of the state stays in
    memory for the whole run.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(
        self, tensors: Mapping[str, torch.Tensor], *, in_place: bool = False
    ) -> dict[str, torch.Tensor]:
        """Copy the tensors, under the same names; the next call overwrites the copies.

        Args:
            tensors: The tensors to copy.
            in_place: Return CPU tensors themselves, without a copy, and free the memory of their
                earlier copies.
        """
        copies = {}
        copied_from = set()
        for name, tensor in tensors.items():
            if in_place and tensor.device.type == "cpu":
                self._buffers.pop(name, None)
                copies[name] = tensor.detach()
                continue
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = _empty_on_cpu(tensor)
                self._buffers[name] = buffer
            local_part(buffer).copy_(local_part(tensor.detach()), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                copied_from.add(tensor.device)
            copies[name] = buffer
        for device in copied_from:
            torch.cuda.synchronize(device)
        return copies


def _empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate CPU memory for a copy; for a DTensor, of this rank's part."""
    if isinstance(tensor, DTensor):
        contiguous = torch.contiguous_format
        return torch.empty_like(tensor.detach(), device="cpu", memory_format=contiguous)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Snapshots:
    """Takes snapshots of one run.

    Args:
        setup: Model, optimizer and state of training.
        constants: Metadata that stays the same during this start: configuration, digests, versions.
        allow_nonfinite: Whether weights may hold NaN or infinity.
    """

    def __init__(
        self, setup: TrainingSetup, constants: CheckpointMetadata, *, allow_nonfinite: bool
    ) -> None:
        self.setup = setup
        params = dict(setup.model.named_parameters())
        trainable = [name for name, param in params.items() if param.requires_grad]
        self.constants = replace(
            constants, format=FORMAT, parameters=list(params), trainable=trainable
        )
        self.finite = () if allow_nonfinite else trainable
        self._copy_model = Copier()
        self._copy_optimizer = Copier()

    def __call__(
        self,
        random: dict[str, object],
        callbacks: dict[str, object] | None = None,
        stop: dict[str, object] | None = None,
        *,
        in_place: bool = False,
    ) -> Snapshot:
        """Take a snapshot of the training state as it is now.

        Args:
            random: Random states, as JSON can hold them.
            callbacks: States of the callbacks.
            stop: The request to end training early, or None.
            in_place: Do not copy CPU tensors, since nothing changes until the snapshot is written.

        Returns:
            A snapshot whose tensors the next call overwrites.
        """
        state = self.setup.state
        step = self.setup.train_step
        tensors, optimizer = named_state(step.optimizer)
        epoch, step_in_epoch = self.setup.plan.locate(state.position)
        # The model is saved with the weights to evaluate; those that are trained are among the
        # optimizer's tensors. If they differ, the end of the block changes them in place.
        with evaluation_weights(step.optimizer):
            changes = has_evaluation_weights(step.optimizer)
            weights = self._copy_model(
                model_tensors(self.setup.model), in_place=in_place and not changes
            )
        return Snapshot(
            global_step=state.global_step,
            model=weights,
            optimizer=self._copy_optimizer(tensors, in_place=in_place),
            metadata=replace(
                self.constants,
                global_step=state.global_step,
                epoch=epoch,
                step_in_epoch=step_in_epoch,
                train=state.to_dict(),
                random=random,
                scheduler=copy.deepcopy(step.scheduler.state_dict()),
                scaler=step.scaler.state_dict(),
                optimizer=optimizer,
                callbacks=callbacks or None,
                stop=stop,
            ),
            finite=self.finite,
        )
