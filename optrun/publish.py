"""A trained model as others load it: `model/` of a run, and `optrun export`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optrun.artifacts.run_dir import RunDir
from optrun.errors import StorageError


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
    from optrun.report.card import model_card

    model.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    (folder / "README.md").write_text(model_card(dict(summary), dict(config), sample=sample), encoding="utf-8")


def publish(
    run: RunDir,
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
    aside = run.path / f".model-{os.getpid()}"
    try:
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        write_model(aside, model, tokenizer, {**summary, "status": "finished"}, config, sample)
        if run.model.exists():
            shutil.rmtree(run.model)
        aside.rename(run.model)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise StorageError(f"{run.model}: cannot be written: {error.strerror or error}.") from error
