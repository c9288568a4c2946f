"""A trained model as others load it: `model/` of a run, and `optrun export`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optrun.artifacts.atomic import refuse_without_room, storing
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
from optrun.model.tokenizer import save_tokenizer
from optrun.model.weights import all_tensors, assign_tensors
from optrun.report.templating import code_block
from optrun.runner.best_checkpoint import describe_best
from optrun.runner.card import TaskCard, model_card
from optrun.runner.folders import written_aside
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

    An adapter is written in peft's form.

    An adapter on a base that was initialised from a seed is merged into the base, since the base
    could not be loaded elsewhere.

    Args:
        folder: Where to write; new or empty.
        model: The transformers model.
        tokenizer: Its tokenizer or image processor, or None.
        summary: Summary of the run, for the card.
        config: Resolved configuration of the run, for the card.
        sample: A prompt and its continuation, for the card.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the verbs say what they do in one line
    facts = task_card(config)
    adapter = adapter_of(model)
    if adapter is not None and adapter.base is not None:
        write_adapter(folder, model)
        arguments = {}
        if facts is not None and facts.classifies:
            arguments["num_labels"] = model.config.num_labels
        facts = replace(facts or TaskCard(), base=adapter.base, arguments=arguments)
    else:
        if adapter is not None:  # nobody else has its base
            model = copy.deepcopy(model)
            merge_adapter(model)
        size = sum(param.nbytes for param in model.parameters())
        refuse_without_room(folder, size, "Make room.")
        with without_pooling(model.config):
            model.save_pretrained(str(folder))
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    if facts is not None and facts.embeds:
        write_modules(folder, model, int(config["data"]["max_length"]))
    card = model_card(summary, config, facts)
    if sample is not None:
        prompt, continuation = (code_block(text.rstrip(), "text") for text in sample)
        card += f"\n## Sample\n\nThe prompt\n\n{prompt}\n\nwas continued with\n\n{continuation}\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


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
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {
        f"base_model.model.{name}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "adapter_model.safetensors", tensors)


def task_card(config: Mapping[str, object]) -> TaskCard | None:
    """Return the task's part of the model card.

    None if the configuration names no task, or one that is not registered here.
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
    folder = run.tokenizer
    with written_aside(folder, replaces=True) as aside:
        save_tokenizer(tokenizer, aside)
        write_checksums(aside)


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
    folder = run.model
    with written_aside(folder, replaces=True) as aside:
        write_model(aside, model, tokenizer, summary, config, sample)
        write_checksums(aside)


def whole_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel | None:
    """Gather a sharded model, one tensor at a time; every rank takes part.

    Args:
        model: The trained model.
        folder: Folder on a disk with room for the model, since no rank holds all of it in memory.

    Returns:
        On rank 0 a model on the CPU whose weights are mapped from a file, or the model itself if it
        is not sharded. None on other ranks.

    Raises:
        StorageError: The disk refused the write.
    """
    if not is_sharded(model):
        return model
    import torch
    import torch.distributed as dist

    gathered = gather_full_tensors(all_tensors(model).items())
    try:
        if dist.get_rank() == 0:
            with storing(folder):
                tensors = tensors_on_disk(gathered, folder)
    finally:
        deque(gathered, maxlen=0)  # the ranks part when all is gathered, whatever the disk says
    if dist.get_rank():
        return None
    with torch.device("meta"):
        merged_model: PreTrainedModel = model_class(model)(copy.deepcopy(model.config))
        inject_same_adapter(model, merged_model)
    if model.can_generate():
        merged_model.generation_config = copy.deepcopy(model.generation_config)
    tensors |= {
        name: buffer.cpu() for name, buffer in model.named_buffers()
    }  # some are saved nowhere
    assign_tensors(merged_model, tensors)
    merged_model.tie_weights()
    return merged_model.train(model.training)


def _explain_quantised_base(quantization: str, *, merged: bool) -> str:
    """Explain how to load a quantised base for the same results."""
    if merged:
        return (
            f"the factors were trained beside a base in {quantization}: these are its weights"
            " dequantised"
        )
    return (
        "the factors were trained beside a quantised base: give the base dtype=model.dtype of the"
        " run and quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True,"
        " bnb_4bit_quant_type='nf4'), whose llm_int8_skip_modules are the head and what was trained"
        " whole, and whose bnb_4bit_compute_dtype is that dtype"
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
        Name of the transformers class that loads the model, or the adapter's base.

    Raises:
        ConfigError: `merged` without an adapter, or the base of the adapter was moved or changed.
        CheckpointError: The checkpoint or a file of the run is damaged, or this transformers lacks
            the model class.
        StorageError: The disk refused the write.
    """
    refuse_damaged(run.tokenizer)
    model, snapshot = load_trained_model(run, checkpoint, dequantized=merged)
    if merged and snapshot.metadata.adapter is None:
        raise ConfigError(
            f"merge=true: {checkpoint} has no adapter: all its weights trained, and are exported"
            " whole."
        )
    adapter = adapter_of(model)
    if not merged and adapter is not None and adapter.base is None:
        raise ConfigError(
            f"{checkpoint}: an adapter whose base was made from a seed, so nobody else has it. Give"
            " merge=true."
        )
    if merged:
        merge_adapter(model)
    quantization = (snapshot.metadata.adapter or {}).get("quantization")
    if quantization is not None:
        note(_explain_quantised_base(quantization, merged=merged))
    tokenizer = _tokenizer(run)
    refuse_other_vocabulary(run, checkpoint, snapshot, tokenizer)
    summary = try_read_summary(run.summary)
    step = snapshot.global_step
    counters = snapshot.metadata.train
    best = describe_best(summary)
    if best.startswith(f"best: step {step:,} "):
        note(best)
    # What is told is told of these weights, not of those the run ended with.
    told_of = {
        "global_step": step,
        "max_steps": snapshot.metadata.total_steps,
        "wall_seconds": counters["seconds"],
    }
    metrics = {key: counters.get(key, {}) for key in ("last", "best", "before_training")}
    summary |= {**told_of, "metrics": metrics}
    with written_aside(destination) as aside:
        write_model(aside, model, tokenizer, summary, snapshot.metadata.config)
    return snapshot.metadata.model_class


def _tokenizer(run: RunDir) -> Any:
    """Load the tokenizer or image processor of a run; None if it has none."""
    import transformers

    folder = run.tokenizer
    if not folder.is_dir():
        return None
    if (folder / "preprocessor_config.json").is_file():
        return transformers.AutoImageProcessor.from_pretrained(str(folder))
    return transformers.AutoTokenizer.from_pretrained(str(folder))
