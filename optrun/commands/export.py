"""`optrun export`: a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from optrun.commands.arguments import parse_arguments
from optrun.errors import EXIT_DONE, ConfigError, refuse_url

USAGE = """
optrun export RUN_DIR|CHECKPOINT DEST

Writes the model of a checkpoint (of a run: its newest) in save_pretrained form: config.json, model.safetensors,
tokenizer, model card. transformers.AutoModel...from_pretrained(DEST) loads it. DEST must be new or empty.
"""


def run(argv: list[str]) -> int:
    """Export.

    Returns:
        0.
    """
    words = parse_arguments("export", argv, USAGE)
    if words is None:
        return EXIT_DONE
    if words.overrides or len(words.positional) != 2:
        raise ConfigError("optrun export takes a checkpoint and a destination: optrun export RUN_DIR|CHECKPOINT DEST")
    refuse_url("DEST", words.positional[1])
    source, destination = words.positional[0], Path(words.positional[1]).expanduser()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: is there already, and nothing is overwritten. Choose a new folder.")
    from rich.console import Console

    from optrun.run.export import export
    from optrun.run.resume.target import checkpoint_of

    run_dir, checkpoint = checkpoint_of(source)
    name = export(run_dir, checkpoint, destination)
    Console().print(f"{checkpoint} -> {destination}", markup=False, highlight=False, soft_wrap=True)
    Console().print(
        f"load it with transformers.{name}.from_pretrained({str(destination)!r})", markup=False, soft_wrap=True
    )
    return EXIT_DONE
