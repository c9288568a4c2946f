"""Load the trained model of a checkpoint, with its tokenizer and without data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import CheckpointError
from optrun.base.plain import PlainDict
from optrun.model.weights import load_model_tensors
from optrun.runner.adapter_base import rebuild_adapter_model
from optrun.runner.resume.data_position import vocabulary_digest
from optrun.runner.resume.state_file import read_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_trained_model(
    run: RunDir, checkpoint: Path, *, dequantized: bool = False
) -> tuple[PreTrainedModel, Snapshot]:
    """Build the model of a checkpoint with its weights; an adapter on its base.

    Args:
        run: The run of the checkpoint, which records the base of an adapter.
        checkpoint: A complete checkpoint.
        dequantized: Dequantise a quantised base.

    Returns:
        The model, on the CPU and in evaluation mode, and the snapshot of the checkpoint.

    Raises:
        ConfigError: The base of the adapter was moved or changed.
        CheckpointError: The checkpoint is damaged, or this transformers lacks the model class.
    """
    import transformers
    from transformers import GenerationConfig

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    snapshot = read_checkpoint(checkpoint)
    # The class and configuration of transformers.
    values = dict(snapshot.metadata.model_config)
    name = snapshot.metadata.model_class
    kind = getattr(transformers, name, None)
    if kind is None or values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint}: its model class {name} is not one of this transformers"
            f" ({transformers.__version__})."
        )
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    # The model, in the dtype of the checkpoint: that of its first floating-point tensor.
    if snapshot.metadata.adapter is None:
        floats = (tensor for tensor in snapshot.model.values() if tensor.is_floating_point())
        dtype = next((tensor.dtype for tensor in floats), None)
        model = kind._from_config(config, dtype=dtype)
        load_model_tensors(model, snapshot.model)
    else:
        model = rebuild_adapter_model(
            run, checkpoint, snapshot, kind, config, dequantized=dequantized
        )
    if snapshot.metadata.generation_config is not None:
        generation = GenerationConfig.from_dict(dict(snapshot.metadata.generation_config))
        model.generation_config = generation
    return model.eval(), snapshot


def generation_values(model: PreTrainedModel) -> PlainDict | None:
    """Return the generation configuration of a model as plain values, for checkpoints.

    Only values that differ from the defaults of transformers; None if the model has none.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return None
    values: PlainDict = json.loads(generation.to_json_string(use_diff=True))
    return values


def refuse_other_vocabulary(
    run: RunDir, checkpoint: Path, snapshot: Snapshot, tokenizer: object
) -> None:
    """Refuse a missing tokenizer, and one with other token ids than in training.

    Checkpoints without a record of the tokenizer pass.

    Args:
        run: The run, for messages.
        checkpoint: Path of the checkpoint, for messages.
        snapshot: Its content, with a digest of the tokenizer.
        tokenizer: The loaded tokenizer or image processor; None: the run has none.

    Raises:
        CheckpointError: The message names a way out.
    """
    recorded = snapshot.metadata.tokenizer
    if tokenizer is None and recorded:
        raise CheckpointError(
            f"{run.tokenizer}: missing: {checkpoint} was trained with a tokenizer, and its weights"
            " are useless without it. Restore the folder from a copy, or continue the run, which"
            f" writes it again: resume={run.path}"
        )
    if tokenizer is not None and recorded not in (None, vocabulary_digest(tokenizer)):
        raise CheckpointError(
            f"{run.tokenizer}: this is not the tokenizer that {checkpoint} was trained with, so its"
            " token ids mean other words. Restore it from a copy."
        )
