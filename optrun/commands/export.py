"""`optrun export`: a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

from optrun.commands.parser import VerbParser
from optrun.errors import EXIT_DONE, ConfigError, refuse_url


def parser() -> VerbParser:
    """Build the parser of the verb."""
    return VerbParser(
        "export",
        "RUN_DIR|CHECKPOINT DEST [merge=true]",
        """
Writes the model of a checkpoint (of a run: its newest) in save_pretrained form: config.json, model.safetensors,
tokenizer, model card. transformers.AutoModel...from_pretrained(DEST) loads it. DEST must be new or empty.
Of a run with an adapter, writes the adapter as peft does; merge=true adds it to its base, and writes the whole model.
""",
        keys=("merge",),
    )


def run(argv: list[str]) -> int:
    """Export a checkpoint.

    Returns:
        0.
    """
    arguments = parser().parse(argv)
    if arguments is None:
        return EXIT_DONE
    if len(arguments.positional) != 2:
        raise ConfigError("optrun export takes a checkpoint and a destination: optrun export RUN_DIR|CHECKPOINT DEST")
    source, target = arguments.positional
    refuse_url("DEST", target)
    merged = arguments.values("export").get("merge", "false")
    if merged not in ("true", "false"):
        raise ConfigError(f"optrun export merge={merged}: expected true or false.")
    destination = Path(target).expanduser()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: is there already, and nothing is overwritten. Choose a new folder.")
    from rich.console import Console

    from optrun.runner.export import export
    from optrun.runner.resume.target import checkpoint_of

    run_dir, checkpoint = checkpoint_of(source)
    name = export(run_dir, checkpoint, destination, merged=merged == "true")
    Console().print(f"{checkpoint} -> {destination}", markup=False, highlight=False, soft_wrap=True)
    if (destination / "adapter_config.json").is_file():
        Console().print(
            f"load it with peft.PeftModel.from_pretrained(BASE, {str(destination)!r}), where BASE is a {name}; "
            f"{destination / 'README.md'} has the lines",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return EXIT_DONE
    Console().print(
        f"load it with transformers.{name}.from_pretrained({str(destination)!r})", markup=False, soft_wrap=True
    )
    return EXIT_DONE
