"""The frozen base of an adapter: find it again, and refuse another one."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import tensor_digest
from optrun.base.errors import CheckpointError, ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.original_cwd import original_cwd, rebase_paths
from optrun.config.safety import refuse_stored_trust
from optrun.config.saved import with_schemas
from optrun.config.schema.adapter import LoraConfig
from optrun.config.schema.run import RunConfig
from optrun.config.store import typed
from optrun.model.adapter import adapter_of, base_tensors, inject_adapter
from optrun.model.build import build_with_start_weights
from optrun.model.quantization import is_quantized, quantization_of, require_quantization
from optrun.model.weights import load_model_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def adapter_facts(model: PreTrainedModel) -> PlainDict | None:
    """Describe a model's adapter for checkpoints, and name its base by a digest.

    Returns:
        `base` (`base_digest`), `target_modules`, `modules_to_save` and `quantization` of the base;
        None for a model without an adapter.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return None
    return {
        "base": base_digest(model),
        "target_modules": list(adapter.modules.targets),
        "modules_to_save": list(adapter.modules.saved),
        "quantization": quantization_of(model),
    }


def base_digest(model: PreTrainedModel) -> str:
    """Digest the frozen weights, or all of a model without an adapter; 32 hexadecimal digits.

    Equal digests mean equal names, shapes and values.
    """
    total = hashlib.sha256()  # over one line a tensor: name, dtype, shape, digest of its bytes
    for name, tensor in sorted(base_tensors(model).items()):
        shape = tuple(tensor.shape)
        total.update(f"{name} {tensor.dtype} {shape} {tensor_digest(tensor)}\n".encode())
    return total.hexdigest()[:32]


def refuse_other_adapter(
    saved: CheckpointMetadata, now: PlainMapping | None, config: RunConfig
) -> None:
    """Refuse a checkpoint if its adapter does not fit the model.

    They do not fit if only one of them has an adapter, or if their adapters have another base.

    Args:
        saved: Metadata of the checkpoint.
        now: `adapter_facts` of the built model; None: it has no adapter.
        config: The configuration that the model was built from.

    Raises:
        ConfigError: The message names the key and a way out.
    """
    before = saved.adapter
    name = config.adapter.name
    # 1. One of them has none.
    if before is None and now is None:
        return
    if before is None:
        raise ConfigError(
            f"adapter={name}: the checkpoint is of a run that trained all weights, so it has no"
            " adapter to continue. Make a model of it (optrun export CHECKPOINT DIR), and start a"
            f" new run with model=pretrained model.path=DIR adapter={name}."
        )
    if now is None:
        raise ConfigError(
            f"adapter={name}: the checkpoint holds an adapter"
            f" ({saved.config.get('adapter', {}).get('name')}) and no other weights. Leave adapter"
            " as it was; or merge it into its base (optrun export CHECKPOINT DIR merge=true) and"
            " start a new run with model=pretrained model.path=DIR."
        )
    # 2. Both have one, on different bases.
    if before.get("quantization") != now["quantization"]:
        raise ConfigError(
            f"{_in_words(now['quantization'])}: the adapter in the checkpoint was trained on a base"
            f" with {_in_words(before.get('quantization'))}. Leave model.quantization as it was."
        )
    if before.get("base") != now["base"]:
        model = saved.config.get("model", {})
        old = origin_of(model.get("path"), model.get("name", ""), saved.config.get("seed", 0))
        new = origin_of(getattr(config.model, "path", None), config.model.name, config.seed)
        if old != new:
            new += f" (it was {old})"
        raise ConfigError(
            f"{new}: these are not the base weights that the adapter in the checkpoint was"
            f" trained on: their digest is {now['base']}, expected {before.get('base')}. Restore"
            " the base as it was."
        )


def _recorded_adapter(checkpoint: Path, saved: CheckpointMetadata, config: RunConfig) -> LoraConfig:
    """Return the adapter's configuration with the modules that it was built on.

    `exclude_modules` and `layers_to_transform` are None: the recorded modules are what they left.

    Raises:
        CheckpointError: The checkpoint records no adapter.
    """
    facts = saved.adapter
    if not isinstance(config.adapter, LoraConfig) or facts is None:
        raise CheckpointError(
            f"{checkpoint}: its weights are an adapter's, but its configuration names no adapter."
        )
    return replace(
        config.adapter,
        target_modules=list(facts["target_modules"]),
        modules_to_save=list(facts["modules_to_save"]),
        exclude_modules=None,
        layers_to_transform=None,
    )


def rebuild_adapter_model(
    run: RunDir,
    checkpoint: Path,
    snapshot: Snapshot,
    kind: type[PreTrainedModel],
    values: PretrainedConfig,
    *,
    dequantized: bool,
) -> PreTrainedModel:
    """Build the model of an adapter's checkpoint: the base of the run, and the adapter on it.

    The base is built from the recorded configuration, under its seed, since a base or a head from
    scratch is drawn at random, and checked by its digest. The adapter's weights come from the
    checkpoint.

    Args:
        run: The run of the checkpoint.
        checkpoint: Path of the checkpoint, for messages.
        snapshot: Content of the checkpoint.
        kind: The model's class in transformers.
        values: The model's transformers configuration.
        dequantized: Dequantise the base, so that the adapter can be merged into it.

    Raises:
        ConfigError: The base was moved or changed.
        CheckpointError: The checkpoint records no adapter.
    """
    # 1. The configuration of the run, as it was recorded. Relative paths count from the folder that
    # the run was started in. No file may ask to trust remote code, only a command line, and here
    # is none.
    saved = snapshot.metadata
    tree = with_schemas(saved.config, str(checkpoint))
    rebase_paths(tree, original_cwd(run.hydra))
    refuse_stored_trust(tree, [])
    config = typed(tree)
    adapter = _recorded_adapter(checkpoint, saved, config)
    require_quantization(config.model)
    quantized = is_quantized(config.model)

    def build_with_adapter(*, dequantize: bool) -> PreTrainedModel:
        # `base` is the path of the base weights; None: they were drawn from the seed.
        torch.manual_seed(config.seed)
        model, base = build_with_start_weights(config.model, kind, copy.deepcopy(values))
        inject_adapter(
            adapter,
            model,
            config.task.AUTO_CLASS,
            base=base,
            quantized=quantized,
            dequantized=dequantize,
        )
        return model

    # 2. The base and a new adapter. The digest is that of the quantised base: this one is built
    # first in any case.
    model = build_with_adapter(dequantize=False)
    refuse_other_adapter(saved, adapter_facts(model), config)
    if dequantized and quantized:
        model = build_with_adapter(dequantize=True)
    # 3. The weights of the adapter.
    load_model_tensors(model, snapshot.model)
    return model


def _in_words(quantization: str | None) -> str:
    return f"model.quantization={quantization or 'null'}"


def origin_of(path: str | None, name: str, seed: int) -> str:
    """Name the origin of a model's first weights: its path, or its name and the seed."""
    if path is None:
        return f"model={name} with seed={seed}"
    return f"model.path={path}"
