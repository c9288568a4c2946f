"""A trained model as others load it: `model/` of a run, and `optrun export`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optrun.artifacts.atomic import remove_folder, storing
from optrun.artifacts.checkpoint import load_checkpoint
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_check import refuse_damaged
from optrun.artifacts.run_dir import SUMMARY, TOKENIZER, RunDir
from optrun.artifacts.run_manifest import RunManifest, recorded
from optrun.config.kind import saved_kind
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.errors import CheckpointError, ConfigError
from optrun.model.weights import load_model_tensors
from optrun.report.card import TaskCard, model_card
from optrun.runner.resume.data_position import vocabulary_digest
from optrun.runner.resume.state_file import refuse_garbage


def write_model(
    folder: Path,
    model: Any,
    tokenizer: Any | None,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    sample: tuple[str, str] | None = None,
) -> None:
    """`save_pretrained` form: configuration, safetensors, tokenizer, model card.

    Args:
        folder: New or empty.
        model: A transformers model.
        tokenizer: Its tokenizer or image processor; None: it has none.
        summary: Of the run, for the card.
        config: Resolved configuration, for the card.
        sample: Prompt and continuation, for the card.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the verbs say what they do in one line
    model.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    card = model_card(summary, config, task_card(config))
    if sample is not None:
        card += f"\n## Sample\n\nThe prompt\n\n{_fenced(sample[0])}\n\nwas continued with\n\n{_fenced(sample[1])}\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


def task_card(config: Mapping[str, Any]) -> TaskCard | None:
    """What the task's schema says for the card; None where the task is not known here."""
    task = config.get("task")
    try:
        schema = TASKS[saved_kind("task", TASKS, task)] if isinstance(task, Mapping) and "name" in task else None
    except ConfigError:
        return None
    if schema is None:
        return None
    return TaskCard(schema.TITLE, schema.PIPELINE_TAG, schema.AUTO_CLASS, schema.PROCESSOR, schema.USAGE)


def _fenced(text: str) -> str:
    """A block of text as it stands, whatever back-ticks it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def write_tokenizer(manifest: RunManifest, tokenizer: Any) -> None:
    """Write `tokenizer/` of a run, aside first: a link inside of it is replaced, not followed.

    Raises:
        StorageError: The disk refused.
    """
    with _replacing(manifest, manifest.run.tokenizer) as aside:
        tokenizer.save_pretrained(str(aside))


def publish(
    manifest: RunManifest,
    model: Any,
    tokenizer: Any | None,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    sample: tuple[str, str] | None,
) -> None:
    """Write `model/`, aside first; that of an earlier end of the same run is replaced.

    Raises:
        StorageError: The disk refused.
    """
    with _replacing(manifest, manifest.run.model) as aside:
        write_model(aside, model, tokenizer, {**summary, "status": "finished"}, config, sample)


@contextmanager
def _replacing(manifest: RunManifest, folder: Path) -> Iterator[Path]:
    """Inside, a folder of a run is written aside; then it replaces the one that is there."""
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        with storing(folder), manifest.rewriting(f"{folder.name}/*"):
            aside.mkdir()
            yield aside
            if folder.exists():
                remove_folder(folder)
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def export(run: RunDir, checkpoint: Path, destination: Path) -> str:
    """Write the model of a checkpoint in `save_pretrained` form.

    Args:
        run: The run it belongs to; lends the tokenizer and the numbers of the card, where they are there.
        checkpoint: Whole.
        destination: New or empty.

    Returns:
        Name of the transformers class that loads it.

    Raises:
        CheckpointError: The checkpoint, or what is taken from the run, is damaged, or its model class is not one of
            this transformers.
        StorageError: The disk refused.
        LockedError: The destination lies in a run directory that another process writes.
    """
    import transformers

    refuse_damaged(run, SUMMARY, f"{TOKENIZER}/*")
    snapshot = load_checkpoint(checkpoint)
    refuse_garbage(checkpoint, snapshot.metadata)
    values = dict(snapshot.metadata.model_config)
    name = snapshot.metadata.model_class
    kind = getattr(transformers, name, None)
    if kind is None or values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{checkpoint}: its model class {name} is not one of this transformers ({transformers.__version__})."
        )
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = kind(config)
    load_model_tensors(model, snapshot.model)
    tokenizer = _tokenizer(run)
    if tokenizer is not None and snapshot.metadata.tokenizer not in (None, vocabulary_digest(tokenizer)):
        raise CheckpointError(
            f"{run.tokenizer}: another tokenizer than {checkpoint} was trained with: its weights would read other "
            "words. Restore it from a copy."
        )
    try:
        summary = read_summary(run.summary)
    except (OSError, ValueError):
        summary = {}
    # What is told is told of these weights, not of those the run ended with.
    known = snapshot.metadata.train
    summary |= {"global_step": snapshot.global_step, "metrics": {key: known[key] for key in ("last", "best")}}
    aside = destination.with_name(f".{destination.name}-{os.getpid()}")
    try:
        with recorded(destination, aside), storing(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            aside.mkdir()
            write_model(aside, model, tokenizer, summary, snapshot.metadata.config)
            if destination.exists():
                destination.rmdir()
            aside.rename(destination)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return name


def _tokenizer(run: RunDir) -> Any | None:
    import transformers

    folder = run.tokenizer
    if not folder.is_dir():
        return None
    if (folder / "preprocessor_config.json").is_file():
        return transformers.AutoImageProcessor.from_pretrained(str(folder))
    return transformers.AutoTokenizer.from_pretrained(str(folder))
