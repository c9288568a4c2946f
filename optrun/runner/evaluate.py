"""A checkpoint and a configuration to metrics: `optrun evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.saved_folder import refuse_damaged
from optrun.base.errors import ConfigError
from optrun.config.schema.run import RunConfig
from optrun.model.forward import without_cache_and_padding_check
from optrun.model.weights import load_model_tensors
from optrun.runner.adapter_base import adapter_facts, refuse_other_adapter
from optrun.runner.assemble import build_loaders
from optrun.runner.chunked import configure_chunked_loss
from optrun.runner.prepare import TrainedArtifacts, prepare
from optrun.runner.reference_log_probs import add_reference_log_probs
from optrun.runner.resume.data_position import (
    class_names,
    pinned_revision,
    refuse_other_tokenizer,
    warn_of_other_eval_rows,
    with_revision,
)
from optrun.runner.resume.state_file import read_checkpoint
from optrun.task.class_table import ClassTable
from optrun.task.evaluation import MetricAccumulator
from optrun.training.device import pick_device
from optrun.training.display import with_progress_bar
from optrun.training.evaluate import evaluate_sets
from optrun.training.step import Precision


@dataclass
class Evaluated:
    """The result of evaluating a checkpoint."""

    step: int
    examples: int
    metrics: dict[str, float]
    """Names with prefix `eval/` to values."""
    tables: dict[str, ClassTable]
    """Figures of each class by evaluation set; the name of a single one is empty."""
    warning: str | None


def evaluate_checkpoint(config: RunConfig, run: RunDir, checkpoint: Path) -> Evaluated:
    """Evaluate a checkpoint on the evaluation split of a configuration.

    Tokenizer and classes are those of the run and the checkpoint, even if the configuration now
    names other training data.

    Args:
        config: Says which data and task, and on which device.
        run: The run of the checkpoint.
        checkpoint: A complete checkpoint.

    Raises:
        ConfigError: The data does not fit, has no rows to evaluate on, or the tokenizer is not the
            one of training.
        CheckpointError: The checkpoint or a file of the run is damaged, or the weights do not fit
            the model.
    """
    refuse_damaged(run.tokenizer)
    device = pick_device(config.training.device)
    snapshot = read_checkpoint(checkpoint)
    tokenizer = run.tokenizer if (run.tokenizer / "tokenizer.json").is_file() else None
    at = with_revision(config, pinned_revision(config, snapshot.metadata))
    classes = class_names(snapshot.metadata.model_config)
    prepared = prepare(at, TrainedArtifacts(tokenizer, classes))
    refuse_other_tokenizer(snapshot.metadata, prepared.tokenizer)
    task = prepared.task
    examples = sum(map(len, task.eval_sets.values()))
    if examples == 0:
        rows_key = config.data.EVALUATION_ROWS
        advice = f": {config.data.name}."
        if rows_key:
            advice = f". Name rows it has not seen: {rows_key}."
        raise ConfigError(
            f"data.eval_fraction={config.data.eval_fraction:g}: the run was trained on all rows, so"
            f" there are none to evaluate on{advice}"
        )
    warning = None
    if prepared.cut_from_train:
        warning = warn_of_other_eval_rows(snapshot.metadata, task.eval)
    refuse_other_adapter(snapshot.metadata, adapter_facts(prepared.model), config)
    model = prepared.model.to(device)
    configure_chunked_loss(task, model, config)
    add_reference_log_probs(task, model, config, device, snapshot.metadata.reference, trains=False)
    load_model_tensors(model, snapshot.model)
    _, loaders = build_loaders(config, task, device)
    precision = Precision(device, config.training.precision.value)
    tables: dict[str, ClassTable] = {}

    def keep(name: str, accumulator: MetricAccumulator) -> None:
        table = accumulator.table()
        if table is not None:
            tables[name] = table

    with without_cache_and_padding_check(model):
        metrics = evaluate_sets(
            model,
            loaders,
            config.training.per_device_eval_batch_size,
            task.evaluation,
            lambda batches, before, total: with_progress_bar(batches, total - before),
            precision=precision,
            keep=keep,
            forward=task.forward,
        )
    return Evaluated(snapshot.global_step, examples, metrics, tables, warning)
