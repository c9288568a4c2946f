"""Log-probabilities of preference pairs under the reference model, before training.

The reference model is the model with the weights that training starts from; with an adapter, its
frozen base. Its log-probabilities are computed once, before the first step, and cached, so that no
second model is in memory during training.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.adapter import LoraConfig
from optrun.config.schema.run import RunConfig
from optrun.data.cache import digest, versions
from optrun.data.cached_arrays import cached_arrays
from optrun.distributed.world import ALONE, World
from optrun.model.adapter import without_adapter
from optrun.model.forward import evaluation_mode, without_cache_and_padding_check
from optrun.runner.adapter_base import base_digest, origin_of
from optrun.task import Task
from optrun.task.preference import Pairs, Preference
from optrun.training.step import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_reference_log_probs(
    task: Task,
    model: PreTrainedModel,
    config: RunConfig,
    device: torch.device,
    saved: str | None,
    *,
    world: World = ALONE,
    trains: bool = True,
) -> str | None:
    """Add to preference pairs their log-probabilities under the reference model.

    The reference model of DPO is the model with its start weights. They are gone after the first
    step, so this is done before it; a resumed run must start from the same weights.

    Args:
        task: If it is a preference task with a reference model, its pairs are changed in place.
        model: The model on its device, with the weights that training starts from.
        config: Says precision and batch size.
        device: Where the model is.
        saved: Digest of the start weights in the checkpoint; None: no checkpoint.
        world: The ranks. Rank 0 computes, and sends the results to the others.
        trains: Whether the training pairs are needed, too.

    Returns:
        Digest of the start weights; None if the task has no reference model.

    Raises:
        ConfigError: The start weights are not those that the run was started with.
    """
    if not isinstance(task, Preference) or not task.has_reference:
        return None
    weights = base_digest(model)
    _refuse_other_weights(saved, weights, config)
    sets = list(task.eval_sets.values())
    # The training pairs are one set, or in a mixture the set of each source.
    if trains:
        sets += getattr(task.train, "sources", {"": task.train}).values()
    for pairs in sets:
        if isinstance(pairs, Pairs):
            pairs.reference = world.call_on_main(
                partial(_reference_log_probs, task, model, pairs, config, device, weights)
            )
    return weights


def _reference_log_probs(
    task: Preference,
    model: PreTrainedModel,
    pairs: Pairs,
    config: RunConfig,
    device: torch.device,
    weights: str,
) -> np.ndarray:
    """Compute the log-probabilities of each pair under the reference model, or read the cache.

    The cache key has weights, pairs, precision, device, batch size, attention and versions. An
    adapter that leaves its base unchanged is switched off meanwhile. The model's mode is restored.

    Args:
        task: The task.
        model: The model with its start weights.
        pairs: The pairs; not changed.
        config: Says precision, batch size and attention.
        device: Where the model is.
        weights: Digest of the start weights.

    Returns:
        Of the chosen and the rejected answer, shape (pairs, 2).
    """
    # 1. What the numbers depend on.
    precision = config.training.precision.value
    size = config.training.per_device_eval_batch_size
    made_by = versions("torch", "transformers")
    settings = f"{precision} {device.type} {size} {config.model.attn_implementation} {made_by}"
    if task.chunked:
        settings += " chunked"  # sums in another order
    key = digest("reference-1", weights, pairs.fingerprint(), settings)
    # 2. How to compute them, if the cache has none. One array under one name: the two
    # log-probabilities of each pair.
    run = Precision(device, precision)
    # Without the adapter the model is the reference model.
    has_adapter = isinstance(config.adapter, LoraConfig) and config.adapter.keeps_base

    def compute() -> dict[str, np.ndarray]:
        with (
            evaluation_mode(model),
            without_cache_and_padding_check(model),
            without_adapter(model) if has_adapter else nullcontext(),
        ):
            return {"logps": task.reference(model, pairs, size, run.to_device, run.autocast)}

    return cached_arrays("reference", key, compute)["logps"]


def _refuse_other_weights(saved: str | None, weights: str, config: RunConfig) -> None:
    """Refuse start weights other than those in the checkpoint, by digest."""
    if saved in (None, weights):
        return
    origin = origin_of(getattr(config.model, "path", None), config.model.name, config.seed)
    raise ConfigError(
        f"{origin}: these are not the weights that the run started from, which are its reference"
        f" model (digest {saved} then, {weights} now). Restore them, or start a new run."
    )
