"""A trained model as others load it: `model/` of a run, and `optrun export`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optrun.artifacts.atomic import refuse_without_room, storage_errors
from optrun.artifacts.metrics import try_read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged, write_checksums
from optrun.artifacts.tensor_file import tensors_on_disk, write_tensors
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.config.kind import saved_kind
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.distributed.shard import gather_full_tensors, is_sharded, model_class
from optrun.model.adapter import ADAPTER, adapter_of, inject_same_adapter, merge_adapter
from optrun.model.tokenizer import load_saved_tokenizer, save_tokenizer
from optrun.model.weights import all_tensors, assign_tensors
from optrun.report.templating import code_block
from optrun.runner.best_checkpoint import describe_best
from optrun.runner.card import TaskCard, model_card
from optrun.runner.folders import write_through_temporary
from optrun.runner.model_loading import load_trained_model, refuse_other_vocabulary
from optrun.runner.sentence_transformers import write_modules
from optrun.task.pooling import without_pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Saved(Protocol):
    """A tokenizer, or an image processor."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the files of the object into a folder."""


def write_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Saved | None,
    summary: Mapping[str, object],
    config: PlainMapping,
    sample: tuple[str, str] | None = None,
) -> None:
    """Write a model in `save_pretrained` form, with tokenizer and model card.

    An adapter is written in peft's form, without its base. If the base was initialised from a seed,
    nobody else could load it: a copy of the model is merged and written whole.
    An embedding model also gets the files of sentence-transformers.

    Args:
        folder: Where to write; new or empty.
        model: The transformers model; not changed.
        tokenizer: Its tokenizer or image processor, or None.
        summary: Summary of the run, for the card.
        config: Resolved configuration of the run, for the card.
        sample: A prompt and its continuation, for the card.

    Raises:
        DiskFullError: The disk has no room for a whole model.
        OSError: The disk refused a write.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # 1. The weights.
    facts = task_card(config)  # None: the task is not known here
    adapter = adapter_of(model)
    # `base` is the hub name or the folder of the base; None: it was initialised from a seed.
    if adapter is not None and adapter.base is not None:
        write_adapter(folder, model)
        facts = replace(facts or TaskCard(), base=adapter.base)
        if facts.classifies:  # the base has no head of this size yet
            facts = replace(facts, arguments={"num_labels": model.config.num_labels})
    else:
        _write_whole_model(folder, model)
    # 2. What goes with them.
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    if facts is not None and facts.embeds:
        write_modules(folder, model, int(config["data"]["max_length"]))
    card = model_card(summary, config, facts)
    if sample is not None:
        prompt, continuation = (code_block(text.rstrip(), "text") for text in sample)
        card += f"\n## Sample\n\nThe prompt\n\n{prompt}\n\nwas continued with\n\n{continuation}\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_whole_model(folder: Path, model: PreTrainedModel) -> None:
    """Write a model with its adapter merged, if it has one; the model is not changed.

    Raises:
        DiskFullError: The disk has no room.
    """
    if adapter_of(model) is not None:
        model = copy.deepcopy(model)
        merge_adapter(model)
    size = sum(param.nbytes for param in model.parameters())
    refuse_without_room(folder, size, "Make room.")
    with without_pooling(model.config):
        model.save_pretrained(str(folder))


def write_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Write an adapter as peft does: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        folder: Where to write; new or empty.
        model: A model with an adapter; it is not changed.
    """
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    # "auto", the default, asks the hub for the vocabulary of the base, and may add embeddings.
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    # The names that peft gives its own files.
    tensors = {
        f"base_model.model.{name}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "adapter_model.safetensors", tensors)


def task_card(config: Mapping[str, object]) -> TaskCard | None:
    """Return the task's part of the model card.

    It says how to load and to call the model. None if the configuration names no task, or one that
    is not registered here.

    Args:
        config: The resolved configuration of the run.
    """
    task = config.get("task")
    if not isinstance(task, Mapping) or "name" not in task:
        return None
    try:
        schema = TASKS[saved_kind("task", TASKS, task)]
    except ConfigError:
        return None
    return TaskCard(
        schema.TITLE,
        schema.PIPELINE_TAG,
        schema.AUTO_CLASS,
        schema.PROCESSOR,
        schema.usage(config),
        classifies=bool(schema.COUNTED_FROM_DATA),
        embeds=schema.EMBEDS,
    )


def write_tokenizer(run: RunDir, tokenizer: Saved) -> None:
    """Write `tokenizer/` of a run, through a temporary folder.

    Raises:
        StorageError: The disk refused the write.
    """
    with write_through_temporary(run.tokenizer, replaces=True) as temporary:
        save_tokenizer(tokenizer, temporary)
        write_checksums(temporary)


def publish(
    run: RunDir,
    model: PreTrainedModel,
    tokenizer: Saved | None,
    summary: Mapping[str, object],
    config: Mapping[str, object],
    sample: tuple[str, str] | None,
) -> None:
    """Write `model/` of a run through a temporary folder, replacing an earlier one.

    Raises:
        StorageError: The disk refused the write.
    """
    with write_through_temporary(run.model, replaces=True) as temporary:
        write_model(temporary, model, tokenizer, summary, config, sample)
        write_checksums(temporary)


def gather_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel | None:
    """Gather a sharded model on rank 0, one tensor at a time; every rank takes part.

    Args:
        model: The trained model; one that is not sharded is returned as it is, on every rank.
        folder: Folder on a disk with room for the model, since no rank holds all of it in memory.

    Returns:
        On rank 0 a model on the CPU whose weights are mapped from a file; None on other ranks.

    Raises:
        StorageError: The disk refused the write.
    """
    if not is_sharded(model):
        return model
    import torch
    import torch.distributed as dist

    # 1. Gather. Each step of this iterator is a collective, so every rank has to go on to its end.
    # Rank 0 writes the tensors to disk. The deque of no length takes what is left, and drops it:
    # on the other ranks all of it, on rank 0 what follows an error of the disk.
    gathered = gather_full_tensors(all_tensors(model).items())
    try:
        if dist.get_rank() == 0:
            with storage_errors(folder):
                tensors = tensors_on_disk(gathered, folder)
    finally:
        deque(gathered, maxlen=0)
    if dist.get_rank() != 0:
        return None
    # 2. Build a model without weights, and give it the gathered ones.
    with torch.device("meta"):
        merged_model: PreTrainedModel = model_class(model)(copy.deepcopy(model.config))
        inject_same_adapter(model, merged_model)
    if model.can_generate():
        merged_model.generation_config = copy.deepcopy(model.generation_config)
    for name, buffer in model.named_buffers():  # some are in no state dict
        tensors[name] = buffer.cpu()
    assign_tensors(merged_model, tensors)
    merged_model.tie_weights()
    return merged_model.train(model.training)


def _explain_quantised_base(quantization: str, *, merged: bool) -> str:
    """Write a note on the quantised base of an adapter.

    It says that the merged weights are dequantised, or how to load the base for the same results.
    """
    if merged:
        return (
            f"the adapter was trained on a base in {quantization}; the exported weights are"
            " dequantised"
        )
    return (
        "the adapter was trained on a quantised base. For the same results load the base with"
        " dtype=model.dtype of the run and quantization_config=transformers.BitsAndBytesConfig("
        "load_in_4bit=True, bnb_4bit_quant_type='nf4'); set its bnb_4bit_compute_dtype to that"
        " dtype, and list the head and the fully trained modules in llm_int8_skip_modules"
    )


def export(
    run: RunDir,
    checkpoint: Path,
    destination: Path,
    *,
    merged: bool = False,
    note: Callable[[str], object] = lambda line: None,  # noqa: ARG005
) -> str:
    """Write the model of a checkpoint as `save_pretrained` does, or an adapter as peft does.

    Args:
        run: The run of the checkpoint. Its tokenizer, and its summary for the card, are used if
            they exist.
        checkpoint: A complete checkpoint.
        destination: Where to write; new or empty.
        merged: Write an adapter and its base as one model.
        note: Called with each note for the user.

    Returns:
        Name of the transformers class that loads the model; for an adapter, that of its base.

    Raises:
        ConfigError: `merged` without an adapter, or the base of the adapter was moved or changed.
        CheckpointError: The checkpoint or a file of the run is damaged, or this transformers lacks
            the model class.
        StorageError: The disk refused the write.
    """
    # 1. The model.
    refuse_damaged(run.tokenizer)
    model, snapshot = load_trained_model(run, checkpoint, dequantized=merged)
    if merged and snapshot.metadata.adapter is None:
        raise ConfigError(
            f"merge=true: {checkpoint} has no adapter to merge: all weights were trained. Leave"
            " merge out."
        )
    adapter = adapter_of(model)
    if not merged and adapter is not None and adapter.base is None:
        raise ConfigError(
            f"{checkpoint}: the base of this adapter was initialised from a seed, so nobody else"
            " could load it. Export both as one model: merge=true."
        )
    if merged:
        merge_adapter(model)
    quantization = (snapshot.metadata.adapter or {}).get("quantization")
    if quantization is not None:
        note(_explain_quantised_base(quantization, merged=merged))
    # 2. The tokenizer.
    tokenizer = _load_tokenizer(run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    # 3. The summary, for the card: that describes the weights of this checkpoint, not those of the
    # end of the run. Without a summary the card has these values alone.
    summary = try_read_summary(run.summary)
    step = snapshot.global_step
    counters = snapshot.metadata.train
    best = describe_best(summary)
    if best.startswith(f"best: step {step:,} "):
        note(best)
    summary["global_step"] = step
    summary["max_steps"] = snapshot.metadata.total_steps
    summary["wall_seconds"] = counters["seconds"]
    summary["metrics"] = {key: counters.get(key, {}) for key in ("last", "best", "before_training")}
    with write_through_temporary(destination) as temporary:
        write_model(temporary, model, tokenizer, summary, snapshot.metadata.config)
    return snapshot.metadata.model_class


def _load_tokenizer(run: RunDir) -> Any:
    """Load the tokenizer or image processor of a run; None if it has none."""
    import transformers

    folder = run.tokenizer
    if not folder.is_dir():
        return None
    if (folder / "preprocessor_config.json").is_file():
        return transformers.AutoImageProcessor.from_pretrained(str(folder))
    return load_saved_tokenizer(folder)
